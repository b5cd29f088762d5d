"""Programs of tests that import torch, as forks of a process that has imported it. That import is
most of what such a program costs.

A program is the text of ``python -c`` and ends as an interpreter does (:mod:`tests.forks`). Its
torch computes with one thread. What a fork cannot show is the import of torch itself, or what is
imported before torch: such a program is a new interpreter.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.forks import Forked, Server, serve
from tests.waiting import PATIENCE_S

_PRELOADED = (
    *("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "torch.utils.data"),
    *("msgspec", "zmq"),
)
"""Nothing of MalleTrain, whose modules read variables when they are imported, nor
torch.distributed.elastic, which imports MalleTrain's entry point.
"""
_servers: list[Server] = []
"""That of this process, once a program was started."""


@dataclass(frozen=True)
class Ended:
    """A program that has ended."""

    code: int
    """Exit code, negative for a signal."""
    output: str
    """What it wrote to standard output."""
    errors: str
    """What it wrote to standard error."""


def start(
    program: str,
    *arguments: str,
    folder: Path,
    output: Path,
    errors: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Forked:
    """Start ``python -c PROGRAM ARGUMENTS``, without input. The caller kills a program that may not
    end.

    Args:
        program: the text of the program.
        arguments: what it has in ``sys.argv``, after ``-c``.
        folder: its working folder.
        output: file to which its standard output is appended.
        errors: the same for its standard error; None: that of the output.
        environment: variables that it has beside those of this process.
    """
    if not _servers or _servers[0].closed:
        _servers[:] = [Server(__name__)]
    variables = {**os.environ, **(environment or {})}
    with (
        open(os.devnull, "rb") as nothing,
        output.open("ab") as out,
        (errors or output).open("ab") as err,
    ):
        streams = (nothing.fileno(), out.fileno(), err.fileno())
        return _servers[0].start([program, *arguments], streams, variables, str(folder))


def run(
    program: str,
    *arguments: str,
    folder: Path,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run ``python -c PROGRAM ARGUMENTS`` to its end, without input. A program that does not end is
    killed.

    Args:
        program: the text of the program.
        arguments: what it has in ``sys.argv``, after ``-c``.
        folder: its working folder.
        environment: variables that it has beside those of this process.
    """
    with tempfile.TemporaryDirectory() as streams:
        output, errors = Path(streams, "output"), Path(streams, "errors")
        process = start(
            *(program, *arguments),
            folder=folder,
            output=output,
            errors=errors,
            environment=environment,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_S)
        finally:
            process.kill()
        return Ended(process.wait(), output.read_text(), errors.read_text())


def _run(argv: list[str]) -> None:
    import torch

    torch.set_num_threads(1)
    program, *arguments = argv
    sys.argv = ["-c", *arguments]
    sys.path[0] = ""  # that of the server is the folder of this tree
    exec(compile(program, "<string>", "exec"), sys.modules["__main__"].__dict__)


if __name__ == "__main__":
    serve(_PRELOADED, _run)
