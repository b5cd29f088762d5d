"""``llmserve serve | batch | status``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

from llmserve.engines import PROFILES
from llmserve.replica_process import EngineNeverLoads, ReplicaOptions, ReplicaProcess
from malletrain.membership import MembershipError


def add_replica_options(options: argparse.ArgumentParser) -> None:
    """The options of whatever runs replicas."""
    options.add_argument("--model", required=True, help="path or name of the model")
    options.add_argument(
        "--served-name", metavar="NAME", help="as clients call the model (default: --model)"
    )
    options.add_argument(
        "--engine",
        choices=sorted(PROFILES),
        default="simulated",
        help="whose command is used if none is given (default: simulated)",
    )
    options.add_argument("--slots", type=int, default=64, help="requests at once (default 64)")
    options.add_argument(
        "--kv-tokens",
        type=int,
        default=65_536,
        help="tokens of all requests at once: prompts and answers (default 65536)",
    )
    options.add_argument("--port", type=int, default=0, help="of the front (default: any)")
    options.add_argument(
        "--loads-at-once", type=int, default=4, metavar="N", help="replicas that load at a time"
    )


def replica_options(
    options: argparse.Namespace, command: Sequence[str], parser: argparse.ArgumentParser
) -> ReplicaOptions:
    """The options of a replica, checked."""
    for name in ("slots", "kv_tokens", "loads_at_once"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1.")
    return ReplicaOptions(
        tuple(command) or PROFILES[options.engine],
        options.model,
        options.served_name or options.model,
        options.slots,
        options.kv_tokens,
        options.port,
        options.loads_at_once,
    )


async def _serve(options: ReplicaOptions) -> None:
    async with ReplicaProcess(options) as replica:
        running = asyncio.create_task(replica.run())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, running.cancel)
        try:
            await running
        except asyncio.CancelledError:
            pass


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options, and the command after ``--``."""
    words = list(arguments)
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 it failed, 2 usage."""
    words, command = _split(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="llmserve", description="LLM inference on idle nodes.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser(
        "serve",
        help="a replica: the process of a node of a service",
        usage="%(prog)s [options] [-- COMMAND {socket} {model}]",
    )
    add_replica_options(serve)
    options = parser.parse_args(words)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        asyncio.run(_serve(replica_options(options, command, serve)))
    except (OSError, ValueError, MembershipError, EngineNeverLoads) as error:
        print(f"llmserve {options.command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
