"""A function as a job: what runs on the nodes, and the files that carry it there and its result
back.

Decides the files of the job's folder and how an outcome is written. Every rank calls the function;
what rank 0 returns is the result, unless a rank of that round fails. Files name their job: one that
is submitted once more has the same folder. The folder is its owner's alone: what is in it is
executed.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from malletrain.protocol import env
from malletrain.training.ranks import rank_and_world

FUNCTION, RESULT, ERROR = "function.pkl", "result{job}.pkl", "error{job}-{rank}.pkl"
SETTINGS = "settings.json"
"""Where modules are looked for first, and how often the function may be called."""
BEGUN = "begun{job}-{generation}"
"""Marks a round in which the function was called."""
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


class FunctionFailed(RuntimeError):
    """What a function raised, in words: an exception that cannot be rebuilt in this process."""


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
    tries: int = 0,
) -> Path:
    """Write the function and its arguments into ``folder``; returns the script that calls it. It
    calls the function in at most ``tries`` rounds of its job; 0: in each.

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
    settings = {"first": _before_the_interpreter(path), "tries": tries}
    (folder / SETTINGS).write_text(json.dumps(settings))
    script = folder / f"{name}.py"
    script.write_text(SCRIPT)
    return script


def _before_the_interpreter(path: Sequence[str]) -> list[str]:
    """The places of ``path`` in which modules are found before Python's own: that of the script
    that submits, and what PYTHONPATH names.
    """
    own = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    first = next((n for n, place in enumerate(path) if place in own), len(path))
    packed = f"python{sys.version_info[0]}{sys.version_info[1]}.zip"
    return [place for place in path[:first] if os.path.basename(place) != packed]


def _find_modules(folder: Path, path: Sequence[str], first: Sequence[str]) -> None:
    """Have modules found in the order in which the submitting process finds them. ``folder``, from
    which this script was run, has none.
    """
    here = [place for place in sys.path if Path(place or ".").resolve() != folder]
    before = list(first)
    own = [place for place in here if place not in before]
    sys.path[:] = [*before, *own, *(place for place in path if place not in {*before, *own})]


def call(script: str) -> None:
    """Call the function packed beside ``script`` and write down what comes of it."""
    folder = Path(script).resolve().parent
    rank, _ = rank_and_world()
    job = os.environ.get(env.JOB, "")
    generation = int(os.environ.get(env.GENERATION, "0"))
    result = folder / RESULT.format(job=_of(job))
    settings = json.loads((folder / SETTINGS).read_text())
    try:
        _count(folder, job, generation, settings["tries"])
    except FunctionLost as lost:
        if outcome(folder, job, completed=False) is None:  # else that says what happened
            _write(folder / ERROR.format(job=_of(job), rank=rank), generation, error=lost)
        raise
    try:
        path, data = pickle.loads((folder / FUNCTION).read_bytes())
        _find_modules(folder, path, settings["first"])
        function, args, named = pickle.loads(data)
        value = function(*args, **named)
        if rank == 0:
            _write(result, generation, value=value)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            if rank == 0:
                _write(result, generation)
            raise
        place = folder / ERROR.format(job=_of(job), rank=rank)
        _write(place, generation, error=error, trace=traceback.format_exc())
        raise


def _of(job: str) -> str:
    return f"-{job}" if job else ""


def _count(folder: Path, job: str, generation: int, tries: int) -> None:
    """Note that the function is called in this round. Raises FunctionLost where it was called as
    often as it may be.
    """
    mine = folder / BEGUN.format(job=_of(job), generation=generation)
    begun = set(folder.glob(BEGUN.format(job=_of(job), generation="*"))) - {mine}
    if tries and len(begun) >= tries:
        raise FunctionLost(
            f"The function was called {'once' if tries == 1 else f'{tries} times'} and did not "
            "come to its end: its nodes changed, or it failed. It is not called again, as tries="
            f"{tries} says."
        )
    mine.touch()


def outcome(folder: Path, job: str = "", completed: bool = True) -> FunctionOutcome | None:
    """What came of the function in ``folder``; None: nothing is there yet.

    Args:
        folder: of the function.
        job: whose outcome is meant: a job that was submitted once more has the same folder.
        completed: whether the job has completed: then there is nothing before rank 0's result is.
            One that has not has no result, whatever rank 0 returned; its outcome is the error that
            came first in its last round.
    """
    errors = [_read(path) for path in folder.glob(ERROR.format(job=_of(job), rank="[0-9]*"))]
    result = None
    if completed:
        file = folder / RESULT.format(job=_of(job))
        if not file.exists():
            return None
        result = _read(file)
        errors = [error for error in errors if error.generation >= result.generation]
    last = max((error.generation for error in errors), default=0)
    return min((e for e in errors if e.generation == last), key=lambda e: e.time, default=result)


def _read(path: Path) -> FunctionOutcome:
    record = pickle.loads(path.read_bytes())
    generation, time = record["generation"], record["time"]
    trace: str = record["trace"]
    if record["error"] is None:
        try:
            return FunctionOutcome(pickle.loads(record["value"]), None, "", generation, time)
        except Exception as error:
            unread = FunctionFailed(
                "What the function returned cannot be rebuilt in this process: "
                f"{type(error).__name__}: {error}"
            )
            return FunctionOutcome(None, unread, trace, generation, time)
    raised: BaseException | None = None
    try:
        raised = pickle.loads(record["error"])
    except Exception:
        pass  # its words are there
    if not isinstance(raised, Exception):  # SystemExit would end who asks for the result
        raised = FunctionFailed(record["words"])
    return FunctionOutcome(None, raised, trace, generation, time)


def _write(
    path: Path,
    generation: int,
    value: Any = None,
    error: BaseException | None = None,
    trace: str = "",
) -> None:
    """Whole or not at all."""
    import cloudpickle

    packed = b""
    if error is not None:
        try:
            packed = cloudpickle.dumps(error)
        except Exception:
            pass  # its words can
    record = {
        "value": cloudpickle.dumps(value),
        "error": None if error is None else packed,
        "words": "" if error is None else f"{type(error).__name__}: {error}",
        "trace": trace,
        "generation": generation,
        "time": time.time(),
    }
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(pickle.dumps(record))
    os.replace(part, path)
