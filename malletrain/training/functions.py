"""A function as a job: what runs on the nodes, and the files that carry it there and its result
back.

Decides the files of the job's folder and how an outcome is written. Every rank calls the function;
what rank 0 returns is the result. The folder is its owner's alone: what is in it is executed.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from malletrain.protocol import env
from malletrain.training.ranks import rank_and_world

FUNCTION, RESULT, ERROR = "function.pkl", "result.pkl", "error-{rank}.pkl"
SCRIPT = '''\
"""Calls the function that was packed beside this file. Written by malletrain."""

from malletrain.training.functions import call

if __name__ == "__main__":
    call(__file__)
'''


class FunctionTraceback(Exception):
    """Where a function failed on its node; the cause of the exception that is raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class FunctionLost(RuntimeError):
    """A function ended without a result: its process died, or its job was cancelled."""


@dataclass(frozen=True)
class FunctionOutcome:
    """What came of a function in one process."""

    value: Any = None
    """What it returned."""
    error: BaseException | None = None
    """What it raised."""
    trace: str = ""
    """Where it did."""
    generation: int = 0
    """The round it was in."""
    time: float = 0.0
    """When, in seconds since the epoch."""

    def result(self) -> Any:
        """The value, or raise the error with where it came from."""
        if self.error is not None:
            raise self.error from FunctionTraceback(self.trace)
        return self.value


def pack(
    folder: Path,
    name: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    named: Mapping[str, Any],
) -> Path:
    """Write the function and its arguments into ``folder``; returns the script that calls it.

    Raises:
        ImportError: cloudpickle is not installed.
        TypeError: what is to be packed cannot be; the sentence says so.
    """
    try:
        import cloudpickle
    except ImportError as error:
        raise ImportError(
            "Functions are packed with cloudpickle, which is not installed here. Install it: pip "
            "install cloudpickle."
        ) from error
    try:
        data = cloudpickle.dumps((function, tuple(args), dict(named)))
    except Exception as error:
        raise TypeError(
            f"The function or its arguments cannot be sent to another process: {error}. Open "
            "files, connections and locks inside the function."
        ) from error
    folder.mkdir(mode=0o700, parents=True)
    path = [os.path.abspath(place) for place in sys.path]
    (folder / FUNCTION).write_bytes(pickle.dumps((path, data)))
    script = folder / f"{name}.py"
    script.write_text(SCRIPT)
    return script


def call(script: str) -> None:
    """Call the function packed beside ``script`` and write down what comes of it."""
    folder = Path(script).resolve().parent
    rank, _ = rank_and_world()
    generation = int(os.environ.get(env.GENERATION, "0"))
    try:
        path, data = pickle.loads((folder / FUNCTION).read_bytes())
        sys.path += [place for place in path if place not in sys.path]  # modules of one's own
        function, args, named = pickle.loads(data)
        value = function(*args, **named)
        if rank == 0:
            _write(folder / RESULT, FunctionOutcome(value, generation=generation, time=time.time()))
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            if rank == 0:
                _write(folder / RESULT, FunctionOutcome(generation=generation, time=time.time()))
            raise
        trace = traceback.format_exc()
        failed = FunctionOutcome(None, error, trace, generation, time.time())
        try:
            _write(folder / ERROR.format(rank=rank), failed)
        except Exception:  # it cannot be packed: its words can
            told = RuntimeError(f"{type(error).__name__}: {error}")
            _write(
                folder / ERROR.format(rank=rank),
                FunctionOutcome(None, told, trace, generation, time.time()),
            )
        raise


def outcome(folder: Path) -> FunctionOutcome | None:
    """What came of the function in ``folder``: its result, else the error that came first in its
    last round. None: nothing is there.
    """
    try:
        made: FunctionOutcome = pickle.loads((folder / RESULT).read_bytes())
        return made
    except FileNotFoundError:
        pass
    errors: list[FunctionOutcome] = [
        pickle.loads(path.read_bytes()) for path in folder.glob(ERROR.format(rank="*"))
    ]
    last = max((error.generation for error in errors), default=0)
    return min((e for e in errors if e.generation == last), key=lambda e: e.time, default=None)


def _write(path: Path, made: FunctionOutcome) -> None:
    """Whole or not at all."""
    import cloudpickle

    data = cloudpickle.dumps(made)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(data)
    os.replace(part, path)
