"""Programs of tests that import torch, as forks of the process of :mod:`tests.forked`, which has
imported it. That import is most of what such a program costs.

A fork has the working folder, the variables and the two streams that the test chooses, and its
``__main__`` is its own. What it cannot show is the import of torch itself, or what is imported
before torch: such a program is a new interpreter.
"""

from __future__ import annotations

import os
import sys
import tempfile
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests import forked
from tests.waiting import PATIENCE_S


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
    program: Callable[..., None],
    *arguments: Any,
    folder: Path,
    output: Path,
    errors: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> BaseProcess:
    """Start a program.

    Args:
        program: a function of a module.
        arguments: its arguments.
        folder: its working folder.
        output: file for its standard output.
        errors: file for its standard error; None: that of the output.
        environment: variables that it has beside those of this process.
    """
    variables = {**os.environ, **(environment or {})}
    process = forked.CONTEXT.Process(
        target=forked.work,
        args=(
            *(_run, {}, str(output)),
            (program, str(folder), str(errors or output), variables, arguments),
        ),
    )
    process.start()
    return process


def run(
    program: Callable[..., None],
    *arguments: Any,
    folder: Path,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run a program to its end. One that does not end is killed.

    Args:
        program: a function of a module.
        arguments: its arguments.
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
        process.join(PATIENCE_S)
        if process.exitcode is None:
            process.kill()
            process.join()
        assert process.exitcode is not None
        return Ended(process.exitcode, output.read_text(), errors.read_text())


def execute(program: str, *arguments: str) -> None:
    """Run the text of a program, as ``python -c`` does. What :func:`start` and :func:`run` run.

    Args:
        program: the text.
        arguments: what the program has in ``sys.argv``, after ``-c``.
    """
    sys.argv = ["-c", *arguments]
    try:
        exec(compile(program, "<string>", "exec"), sys.modules["__main__"].__dict__)
    except Exception as error:  # what Python sets before it prints it
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        raise


def _run(
    program: Callable[..., None],
    folder: str,
    errors: str,
    variables: dict[str, str],
    arguments: tuple[Any, ...],
) -> None:
    # The server has the variables of the test with which it began, which modules of MalleTrain read
    # when they are imported.
    os.environ.clear()
    os.environ.update(variables)
    for name in [name for name in sys.modules if name.partition(".")[0] == "malletrain"]:
        del sys.modules[name]
    descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.chdir(folder)
    sys.modules["__main__"] = types.ModuleType("__main__")
    program(*arguments)
