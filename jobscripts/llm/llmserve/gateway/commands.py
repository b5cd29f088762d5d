"""The commands ``llmserve gateway``, ``key``, ``trace`` and ``replay``: their options, and what
they print.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import math
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from llmserve.gateway.errors import GatewayError
from llmserve.replay import Endpoint, ReplaySummary, replay, summarize
from llmserve.trace_files import FORMS, TraceWriter
from llmserve.traces import TraceFileError
from llmserve.traces import read as read_trace

if TYPE_CHECKING:
    from llmserve.gateway.configuration import GatewayConfiguration
    from llmserve.gateway.keys import KeyFile

NAMES = ("gateway", "key", "trace", "replay")
DEFAULT_CONFIGURATION = Path("gateway.toml")

Commands = Any
"""What ``add_subparsers`` returns."""


class OptionError(GatewayError):
    """A command cannot be carried out."""


class CheckFailure(GatewayError):
    """A test of the configuration failed."""


def add_commands(commands: Commands) -> None:
    """Add the commands of the gateway. Each sets ``run``, which takes the options.

    Args:
        commands: the result of ``add_subparsers`` of an argument parser.
    """
    _add_gateway(commands)
    _add_keys(commands)
    _add_trace(commands)
    _add_replay(commands)


def carry_out(options: argparse.Namespace) -> int:
    """Run the command that was chosen; return an exit code. Errors are sentences on stderr."""
    run: Callable[[argparse.Namespace], None] = options.run
    try:
        run(options)
    except (GatewayError, TraceFileError, OSError) as error:
        print(f"llmserve {options.command}: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(
            f"llmserve {options.command}: the package {error.name} is missing. In the clone: "
            "pip install -e 'jobscripts/llm[gateway]'",
            file=sys.stderr,
        )
        return 1
    return 0


# --- gateway ---


def _add_gateway(commands: Commands) -> None:
    parser = commands.add_parser(
        "gateway",
        help="the OpenAI API on the head node",
        description="Serve the OpenAI API to users with keys, until SIGTERM.",
    )
    _add_config(parser)
    parser.add_argument(
        "--check",
        action="store_true",
        help="start nothing; test, as this account, whether the gateway would work: the "
        "configuration, its files, tokenizers, the daemon and the services",
    )
    parser.add_argument(
        "--idle",
        type=float,
        metavar="SECONDS",
        help="seconds without requests after which the services release their nodes, instead of "
        "scaling.idle_s",
    )
    parser.add_argument("--state-dir", type=Path, help="state directory of the daemon")
    parser.set_defaults(run=_gateway)


def _gateway(options: argparse.Namespace) -> None:
    from llmserve.gateway.server import serve

    configuration = _configuration(options)
    if options.idle is not None:
        if not options.idle > 0:
            raise OptionError(f"--idle is {options.idle:g}; it must be above 0.")
        scaling = configuration.scaling.model_copy(update={"idle_s": options.idle})
        configuration = configuration.model_copy(update={"scaling": scaling})
    folder = options.config.resolve().parent
    if options.check:
        print(f"{'OK':15} {'file':10} {options.config} is correct.")
        _check(configuration, folder, options.state_dir)
        return
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(serve(configuration, folder, options.state_dir))


def _check(configuration: GatewayConfiguration, folder: Path, state_dir: Path | None) -> None:
    from llmserve.gateway.check import check_gateway

    findings = asyncio.run(check_gateway(configuration, folder, state_dir))
    for finding in findings:
        print(finding)
    failures = sum(finding.works is False for finding in findings)
    if failures:
        raise CheckFailure(f"{failures} of these would not work.")


# --- key ---


def _add_keys(commands: Commands) -> None:
    parser = commands.add_parser("key", help="keys of the gateway's users")
    actions = parser.add_subparsers(dest="action", required=True)
    add = actions.add_parser("add", help="make a key, and print it")
    add.add_argument("user", help="a user whom the configuration declares")
    add.add_argument("--application", default="", help="application of all requests with this key")
    listed = actions.add_parser("list", help="show the keys, without their secrets")
    listed.add_argument("--json", action="store_true", help="as JSON")
    revoke = actions.add_parser("revoke", help="make a key, or all keys of a user, invalid")
    revoke.add_argument("key", help="id of the key, the whole key, or a user: all keys of the user")
    for action, run in ((add, _add_key), (listed, _list_keys), (revoke, _revoke_key)):
        _add_config(action)
        action.set_defaults(run=run)


def _add_key(options: argparse.Namespace) -> None:
    configuration = _configuration(options)
    if options.user not in configuration.users:
        raise OptionError(
            f"{options.config} declares no user {options.user}; add [users.{options.user}] first."
        )
    if options.application and options.application not in configuration.applications:
        raise OptionError(
            f"{options.config} declares no application {options.application}; add "
            f"[applications.{options.application}] first."
        )
    _, text = _key_file(configuration).add(options.user, options.application)
    print(text)


def _list_keys(options: argparse.Namespace) -> None:
    keys = _key_file(_configuration(options)).list()
    if options.json:
        rows = [msgspec.to_builtins(key) for key in keys]
        for row in rows:
            del row["hash"]
        print(json.dumps(rows, indent=1))
        return
    print(f"{'id':10} {'user':20} {'application':20} {'created':17} revoked")
    for key in keys:
        revoked = "" if key.revoked is None else _date(key.revoked)
        columns = f"{key.id:10} {key.user:20} {key.application:20} {_date(key.created):17}"
        print(f"{columns} {revoked}".rstrip())


def _revoke_key(options: argparse.Namespace) -> None:
    keys = _key_file(_configuration(options)).revoke(options.key)
    for key in keys:
        print(f"Key {key.id} of user {key.user} is revoked.")
    if not keys:
        print(f"User {options.key} has no valid key.")


# --- trace and replay ---


def _add_trace(commands: Commands) -> None:
    parser = commands.add_parser(
        "trace",
        help="write the gateway's requests as a trace",
        description="Write the times and lengths of the gateway's requests, without their texts.",
    )
    parser.add_argument("output", type=Path, help="file to write")
    _add_config(parser)
    parser.add_argument("--form", choices=FORMS, default="vtc-arena", help="default: vtc-arena")
    parser.add_argument("--model", default="", help="requests of this model only")
    parser.add_argument(
        "--since",
        type=_time,
        default=0.0,
        metavar="DATE",
        help="from this time on (ISO 8601; without a zone: UTC)",
    )
    parser.add_argument(
        "--until", type=_time, default=math.inf, metavar="DATE", help="requests before this time"
    )
    parser.add_argument(
        "--anonymous", action="store_true", help="replace the names of users by numbers"
    )
    parser.set_defaults(run=_trace)


def _trace(options: argparse.Namespace) -> None:
    configuration = _configuration(options)
    from llmserve.gateway.request_log import RequestLog

    log = RequestLog(configuration.database, math.inf)
    numbers: dict[str, str] = {}
    count = 0
    try:
        with open(options.output, "w", newline="", encoding="utf-8") as file:
            writer = None
            for arrived, request in log.read(options.since, options.until, options.model):
                if writer is None:
                    begin = datetime.fromtimestamp(arrived, timezone.utc)
                    writer = TraceWriter(file, options.form, begin)
                if options.anonymous:
                    user = numbers.setdefault(request.user, f"user{len(numbers)}")
                    request = dataclasses.replace(request, user=user)
                writer.write(request)
                count += 1
    finally:
        log.close()
    print(f"{count} requests are in {options.output}.")


def _add_replay(commands: Commands) -> None:
    parser = commands.add_parser(
        "replay",
        help="send the requests of a trace",
        description="Send the requests of a trace (Azure, Mooncake, VTC-arena, ServeGen) to an "
        "OpenAI endpoint at their times, and measure the answers.",
    )
    parser.add_argument("trace", type=Path, help="file, perhaps .gz")
    parser.add_argument("--url", required=True, help="such as http://head:8300")
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--keys",
        type=Path,
        metavar="FILE",
        help="file with one key in each line; the users of the trace get them in turn",
    )
    parser.add_argument(
        "--speed", type=float, default=1.0, help="how many times as fast (default 1)"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="the first N requests only")
    parser.add_argument(
        "--vocabulary", type=int, default=32_000, help="number of ids of the model (default 32000)"
    )
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    parser.set_defaults(run=_replay)


def _replay(options: argparse.Namespace) -> None:
    if not options.speed > 0:
        raise OptionError(f"--speed is {options.speed:g}; it must be above 0.")
    keys = [""]
    if options.keys is not None:
        keys = [line.strip() for line in options.keys.read_text().splitlines() if line.strip()]
        if not keys:
            raise OptionError(f"{options.keys} has no keys; write one key in each line.")
    requests = read_trace(options.trace)[: options.limit]
    url = options.url.rstrip("/").removesuffix("/v1")
    endpoint = Endpoint(url, options.model, keys, options.vocabulary)
    summary = summarize(asyncio.run(replay(requests, endpoint, options.speed)))
    if options.json:
        print(json.dumps(msgspec.to_builtins(summary), indent=1))
    else:
        print(summary_text(summary))


def summary_text(summary: ReplaySummary) -> str:
    """Return the figures of a replay, for people."""
    lines = [
        f"{summary.requests} requests in {summary.seconds:.1f} s: {summary.answered} answered, "
        f"{summary.refused} refused, {summary.failed} failed; {summary.tokens_per_s:.1f} tokens/s"
    ]
    for name, values in (("TTFT", summary.ttft), ("TBT", summary.tbt)):
        if values:
            shown = ", ".join(f"{key} {value * 1000:.1f} ms" for key, value in values.items())
            lines.append(f"{name}: {shown}")
    lines += [f"{count} × {error}" for error, count in summary.errors.items()]
    return "\n".join(lines)


# --- common ---
# The parts of the gateway are imported when they are used: nodes do not have all their packages.


def _configuration(options: argparse.Namespace) -> GatewayConfiguration:
    from llmserve.gateway.configuration import read

    return read(options.config)


def _key_file(configuration: GatewayConfiguration) -> KeyFile:
    from llmserve.gateway.keys import KeyFile

    return KeyFile(configuration.keys)


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        default=DEFAULT_CONFIGURATION,
        metavar="FILE",
        help=f"configuration of the gateway (default: {DEFAULT_CONFIGURATION})",
    )


def _time(text: str) -> float:
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a date; write one such as 2026-01-31T12:00"
        ) from None
    return (date if date.tzinfo else date.replace(tzinfo=timezone.utc)).timestamp()


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%MZ")
