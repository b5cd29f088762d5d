"""Click's runner of commands in this process, by every click that setup.cfg admits as by click 8.2:
a result has standard output, standard error, and both as ``output``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click.testing

_BEFORE_8_2 = "mix_stderr" in inspect.signature(click.testing.CliRunner).parameters


class _Result(click.testing.Result):
    @property
    def output(self) -> str:
        return self.stdout + self.stderr


class CliRunner(click.testing.CliRunner):
    """The runner with its defaults."""

    def __init__(self) -> None:
        apart: dict[str, Any] = {"mix_stderr": False} if _BEFORE_8_2 else {}
        super().__init__(**apart)

    @contextmanager
    def isolation(self, *args: Any, **options: Any) -> Iterator[Any]:
        """Give a command streams of its own."""
        with super().isolation(*args, **options) as streams:
            if _BEFORE_8_2:
                sys.stderr.reconfigure(line_buffering=True)  # its end is not flushed
            yield streams

    def invoke(self, *args: Any, **options: Any) -> click.testing.Result:
        """Run a command."""
        result = super().invoke(*args, **options)
        if _BEFORE_8_2:
            result.__class__ = _Result
        return result
