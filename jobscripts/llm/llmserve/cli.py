"""``llmserve serve | batch | status``, and the commands of the gateway."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.batch_command import BatchSubmission, show_status, submit_batch
from llmserve.batch_member import BatchMember, MemberOptions
from llmserve.engine_check import MissingPackages, check_engine
from llmserve.engines import PROFILES, engine_command
from llmserve.gateway import commands as gateway_commands
from llmserve.job_options import NAMES, python_of
from llmserve.model_tokenizer import SIMULATED
from llmserve.replica_process import (
    DEFAULT_KV_TOKENS,
    EngineNeverLoads,
    ReplicaOptions,
    ReplicaProcess,
)
from malletrain.cli.for_argparse import SpecError, add_submit_options, submit_options_of

REPLICA_OPTIONS = (
    "model",
    "served_name",
    "engine",
    "slots",
    "kv_tokens",
    "port",
    "loads_at_once",
)
"""Options of replicas."""


def add_replica_options(options: argparse.ArgumentParser) -> None:
    """The options of whatever runs replicas."""
    options.add_argument("--model", required=True, help="path or name of the model")
    options.add_argument(
        "--served-name", metavar="NAME", help="as clients call the model (default: --model)"
    )
    options.add_argument(
        "--engine",
        choices=sorted(PROFILES),
        help="whose command is used if none is given; simulated answers with invented words",
    )
    options.add_argument("--slots", type=int, default=64, help="requests at once (default 64)")
    options.add_argument(
        "--kv-tokens",
        type=int,
        help="tokens of all requests at once: prompts and answers (default: what the engine's KV "
        f"cache holds, as vLLM says it; else {DEFAULT_KV_TOKENS})",
    )
    options.add_argument(
        "--port", type=int, default=0, help="port at which the engine is reached (default: any)"
    )
    options.add_argument(
        "--loads-at-once", type=int, default=4, metavar="N", help="replicas that load at a time"
    )


def replica_options(
    options: argparse.Namespace, command: Sequence[str], parser: argparse.ArgumentParser
) -> ReplicaOptions:
    """The options of a replica, checked."""
    for name in ("slots", "kv_tokens", "loads_at_once"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1.")
    if options.engine is None and (not command or _is_options(command)):
        parser.error(
            "No engine is named. Use --engine vllm, or a command after --, or, to try llmserve "
            "without a model, --engine simulated."
        )
    words = tuple(command)
    if _has_profile(command):
        words = (*PROFILES[options.engine], *command)
    try:
        engine_command(words, {})
    except ValueError as error:
        parser.error(str(error))
    return ReplicaOptions(
        words,
        options.model,
        options.served_name or options.model,
        options.slots,
        options.kv_tokens,
        options.port,
        options.loads_at_once,
    )


async def _serve(options: ReplicaOptions) -> None:
    async with ReplicaProcess(options) as replica:
        await replica.run()


async def _until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Run until it ends, or a signal says so."""
    running = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await running


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options, and the command after ``--``."""
    words = list(arguments)
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _is_options(command: Sequence[str]) -> bool:
    """Whether words after ``--`` are options of an engine, and no command."""
    return bool(command) and command[0].startswith("-")


def _has_profile(command: Sequence[str]) -> bool:
    """Whether the command of the engine is that of ``--engine``."""
    return not command or _is_options(command)


def _member_words(options: argparse.Namespace, command: Sequence[str]) -> list[str]:
    """The arguments of each process of a batch."""
    words = [str(options.output.resolve())]
    for name in REPLICA_OPTIONS:
        value = getattr(options, name)
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    words += ["--tokenizer", _tokenizer(options, command), "--nodes", options.nodes]
    words += ["--worth", str(options.worth)]
    return words + (["--", *command] if command else [])


def _tokenizer(options: argparse.Namespace, command: Sequence[str]) -> str:
    if options.tokenizer:
        return str(options.tokenizer)
    is_simulated = options.engine == SIMULATED and _has_profile(command)
    return SIMULATED if is_simulated else str(options.model)


def _batch(options: argparse.Namespace, command: Sequence[str]) -> int:
    job = submit_options_of(options, NAMES)
    python = python_of(job)
    if python is not None and _has_profile(command):
        try:
            check_engine(options.engine, *python)
        except MissingPackages as error:
            raise MissingPackages(
                f"{error} If the site runs jobs in a container by itself, name it with --container."
            ) from None
    batch = BatchSubmission(
        options.input.resolve(),
        options.output.resolve(),
        options.model,
        options.served_name or options.model,
        _tokenizer(options, command),
        options.nodes,
        options.job_name,
        job,
    )
    print(submit_batch(batch, _member_words(options, command)), flush=True)
    return show_status(options.output.resolve(), follow=True) if options.wait else 0


async def _batch_member(options: MemberOptions) -> None:
    await _until_signal(BatchMember(options).run())


def _parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser, and that of each command."""
    parser = argparse.ArgumentParser(prog="llmserve", description="LLM inference on idle nodes.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser(
        "serve",
        help="a replica: the process of a node of a service",
        usage="%(prog)s [options] [-- COMMAND {socket} {model}, or options of the engine]",
    )
    add_replica_options(serve)
    batch = commands.add_parser(
        "batch",
        help="submit a batch of requests as a job",
        usage="%(prog)s [options] INPUT OUTPUT [-- COMMAND {socket} {model}, or options of the "
        "engine]",
    )
    batch.add_argument("input", type=Path, help="JSON lines, as of the OpenAI batch API")
    member = commands.add_parser("batch-member", help="a process of a batch; started by its job")
    for one in (batch, member):
        one.add_argument("output", type=Path, help="JSON lines of answers, in the order of INPUT")
        add_replica_options(one)
        one.add_argument("--nodes", default="1:16", metavar="MIN:MAX", help="default 1:16")
        one.add_argument(
            "--tokenizer",
            metavar="FOLDER",
            help="of the model (default: --model; simulated: that of the simulated engine)",
        )
        one.add_argument(
            "--worth",
            type=float,
            default=1.0,
            metavar="SAMPLES",
            help="what a node is worth while there is work for it, in samples/s of the training "
            "beside it (default 1)",
        )
    batch.add_argument("--job-name", default="", help="default: batch-OUTPUT")
    batch.add_argument("--wait", action="store_true", help="show a bar until the output is there")
    add_submit_options(batch, NAMES)
    gateway_commands.add_commands(commands)
    status = commands.add_parser("status", help="how far a batch is")
    status.add_argument("output", type=Path)
    status.add_argument("--follow", "-f", action="store_true", help="until the output is there")
    return parser, commands.choices


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 it failed, 2 usage."""
    words, command = _split(sys.argv[1:] if arguments is None else arguments)
    parser, parsers = _parser()
    options, unknown = parser.parse_known_args(words)
    parser = parsers[options.command]  # it names the command in its errors
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.command in gateway_commands.NAMES:
        return gateway_commands.carry_out(options)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        if options.command == "status":
            return show_status(options.output.resolve(), follow=options.follow)
        replica = replica_options(options, command, parser)
        if options.command == "batch":
            return _batch(options, command)
        if options.command == "serve":
            if _has_profile(command):
                check_engine(options.engine, sys.executable, os.environ)
            asyncio.run(_until_signal(_serve(replica)))
        else:
            most = int(options.nodes.rpartition(":")[2])
            member = MemberOptions(options.output, replica, options.tokenizer, options.worth, most)
            asyncio.run(_batch_member(member))
    except SpecError as error:
        parser.error(str(error))
    except (OSError, ValueError, RuntimeError, EngineNeverLoads) as error:
        print(f"llmserve {options.command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
