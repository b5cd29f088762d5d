"""``infinicache get|put|delete|stat|summary``: uses the cache from the shell."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import msgspec

from infinicache.objects import CacheError
from infinicache.sync import Cache

PIECE_BYTES = 8 << 20


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(PIECE_BYTES):
        yield piece


def _where(options: argparse.Namespace) -> tuple[list[str], bytes]:
    """Return the addresses of the members and the key: from the options, or from the service job
    that ``--job`` names.
    """
    if options.job:
        from malletrain.client import Connection

        with Connection.of() as client:
            service = client.members(options.job)
        return [m.address for m in service.members if m.address], bytes.fromhex(service.key)
    return [a for a in options.at.split(",") if a], bytes.fromhex(
        os.environ.get("MALLETRAIN_JOB_KEY", "")
    )


def _run(cache: Cache, options: argparse.Namespace) -> int:
    if options.command == "put":
        size = os.path.getsize(options.file)
        with open(options.file, "rb") as file:
            receipt = cache.put_stream(options.key, size, _pieces(file))
        weak = (
            ""
            if receipt.protection >= receipt.target_protection
            else f", but {receipt.target_protection} were wanted"
        )
        print(f"{size} bytes in {receipt.code}; {receipt.protection} nodes may be lost{weak}")
    elif options.command == "get":
        if not _fetch(cache, options.key, options.file):
            print(f"{options.key} is not in the cache.", file=sys.stderr)
            return 1
    elif options.command == "delete":
        return 0 if cache.delete(options.key) else 1
    elif options.command == "stat":
        stat = cache.stat(options.key)
        if stat is None:
            return 1
        print(json.dumps(msgspec.to_builtins(stat, str_keys=True)))
    else:
        print(json.dumps(cache.summary(), indent=1))
    return 0


def _fetch(cache: Cache, key: str, path: str | None) -> bool:
    """Write an object to a file, or to the standard output. Return whether the object exists. The
    file keeps its old content until the whole object has been read.
    """
    if path is None or (os.path.exists(path) and not os.path.isfile(path)):
        with open(path, "wb") if path is not None else sys.stdout.buffer as file:
            return _write(cache, key, file)
    target = os.path.realpath(path)
    part = f"{target}.part-{os.getpid()}"
    try:
        with open(part, "xb") as file:
            hit = _write(cache, key, file)
        if hit:
            os.replace(part, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
    return hit


def _write(cache: Cache, key: str, file: BinaryIO) -> bool:
    hit = False
    for part in cache.get_stream(key):
        hit = True
        file.write(part)
    return hit


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Return the exit code: 0 done, 1 a miss or a refusal, 2 wrong usage."""
    parser = argparse.ArgumentParser(
        prog="infinicache", description="Objects in the memory of idle nodes."
    )
    parser.add_argument(
        "--job",
        help="name or id of the service job; its members and its key are requested from MalleTrain",
    )
    parser.add_argument(
        "--at",
        default="",
        metavar="HOST:PORT,…",
        help="members of the cache; the key is in MALLETRAIN_JOB_KEY",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("put", "get", "delete", "stat"):
        command = commands.add_parser(name)
        command.add_argument("key")
        if name in ("put", "get"):
            command.add_argument("file", nargs=None if name == "put" else "?")
    commands.add_parser("summary")
    options: Any = parser.parse_args(arguments)
    if not (options.job or options.at):
        parser.error("name the cache: --job NAME, or --at HOST:PORT")
    try:
        addresses, key = _where(options)
        if not addresses:
            raise CacheError(f"The cache {options.job or options.at} has no members now.")
        with Cache(addresses, key) as cache:
            return _run(cache, options)
    except (CacheError, OSError, ValueError, RuntimeError) as error:
        print(f"infinicache: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
