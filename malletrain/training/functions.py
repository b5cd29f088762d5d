"""Functions as jobs: the files that carry a function to the nodes and its result back.

Decides the files of the job's folder and the format of an outcome. Every rank calls the function.
The value that rank 0 returns is the result, unless a rank of that round fails. File names contain
the job's id, because a job that is submitted again uses the same folder. Only the owner can access
the folder, because its content is executed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from malletrain.protocol import env
from malletrain.training.ranks import rank_and_world

FUNCTION, RESULT, ERROR = "function.pkl", "result{job}.pkl", "error{job}-{rank}.pkl"
SETTINGS = "settings.json"
"""Search path for modules, and maximum number of calls of the function."""
BEGUN = "begun{job}-{generation}"
"""Marks a round in which the function was called."""
SCRIPT = '''\
"""Calls the function that was packed beside this file. Written by malletrain."""

from malletrain.training.functions import call

if __name__ == "__main__":
    call(__file__)
'''
EACH_SCRIPT = '''\
"""Calls the function that was packed beside this file for each item of a file: arguments ITEMS
RESULTS. Written by malletrain."""

import sys

from malletrain.training.functions import call_for_each

if __name__ == "__main__":
    call_for_each(__file__, *sys.argv[1:])
'''


class FunctionTraceback(Exception):
    """Traceback of a function on its node; the ``__cause__`` of the exception that is raised
    here.
    """

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class FunctionLost(RuntimeError):
    """The function ended without a result: its process died, or its job was cancelled."""


class FunctionFailed(RuntimeError):
    """The function raised an exception that cannot be unpickled in this process, or that would end
    it or an iteration; the message describes it.
    """


@dataclass(frozen=True)
class FunctionOutcome:
    """Outcome of a function in one process."""

    value: Any = None
    """Return value; None if it raised."""
    error: BaseException | None = None
    """Exception that it raised; None if it returned."""
    trace: str = ""
    """Traceback of that exception, as text."""
    generation: int = 0
    """Number of its round."""
    time: float = 0.0
    """Time of the outcome, seconds since the epoch."""

    def result(self) -> Any:
        """Return the value, or raise the error with the traceback on its node as the cause."""
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
    text: str = SCRIPT,
) -> Path:
    """Write the function and its arguments into a new folder.

    Args:
        folder: the folder to create.
        name: file name of the script, without ``.py``.
        function: the function.
        args: its positional arguments.
        named: its keyword arguments.
        tries: maximum number of rounds of the job in which the function is called; 0 for no limit.
        text: the script that calls it.

    Returns:
        The script that calls the function.

    Raises:
        ImportError: cloudpickle is not installed.
        TypeError: the function or an argument cannot be pickled; the message says so.
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
    path = [os.path.abspath(entry) for entry in sys.path]
    (folder / FUNCTION).write_bytes(pickle.dumps((path, data)))
    settings = {"first": _entries_before_python(path), "tries": tries}
    (folder / SETTINGS).write_text(json.dumps(settings))
    script = folder / f"{name}.py"
    script.write_text(text)
    return script


def _entries_before_python(path: Sequence[str]) -> list[str]:
    """Return the entries of ``path`` that precede Python's own folders: the folder of the
    submitting script, and those of PYTHONPATH.
    """
    python_folders = {
        sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
    end = next((n for n, entry in enumerate(path) if entry in python_folders), len(path))
    packed = f"python{sys.version_info[0]}{sys.version_info[1]}.zip"
    return [entry for entry in path[:end] if os.path.basename(entry) != packed]


def _find_modules(folder: Path, path: Sequence[str], first: Sequence[str]) -> None:
    """Set ``sys.path`` so that modules are found in the same order as in the submitting process.
    ``folder``, the folder of this script, is left out: it has no modules.
    """
    current = [entry for entry in sys.path if Path(entry or ".").resolve() != folder]
    before = list(first)
    remaining = [entry for entry in current if entry not in before]
    sys.path[:] = [
        *before,
        *remaining,
        *(entry for entry in path if entry not in {*before, *remaining}),
    ]


def call(script: str) -> None:
    """Call the function that is packed beside ``script``, and write its outcome."""
    folder = Path(script).resolve().parent
    rank, _ = rank_and_world()
    job = os.environ.get(env.JOB, "")
    generation = int(os.environ.get(env.GENERATION, "0"))
    result = folder / RESULT.format(job=_suffix(job))
    settings = json.loads((folder / SETTINGS).read_text())
    try:
        _count_call(folder, job, generation, settings["tries"])
    except FunctionLost as lost:
        if outcome(folder, job, completed=False) is None:  # else that outcome says what happened
            _write(folder / ERROR.format(job=_suffix(job), rank=rank), generation, error=lost)
        raise
    try:
        path, data = pickle.loads((folder / FUNCTION).read_bytes())
        _find_modules(folder, path, settings["first"])
        function, args, named = pickle.loads(data)
        with _ending_forks():
            value = function(*args, **named)
        if rank == 0:
            _write(result, generation, value=value)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            if rank == 0:
                _write(result, generation)
            raise
        error_path = folder / ERROR.format(job=_suffix(job), rank=rank)
        _write(error_path, generation, error=error, trace=traceback.format_exc())
        raise


def call_for_each(script: str, items: str, results: str) -> None:
    """Call the function that is packed beside ``script`` for each item, and write the outcomes. An
    exception is the outcome of its item; the others are called all the same.

    Args:
        script: path of the script.
        items: file with the pickled items.
        results: file that is written when all items have been handled.
    """
    folder = Path(script).resolve().parent
    settings = json.loads((folder / SETTINGS).read_text())
    path, data = pickle.loads((folder / FUNCTION).read_bytes())
    _find_modules(folder, path, settings["first"])
    function, args, named = pickle.loads(data)
    records = []
    for item in pickle.loads(Path(items).read_bytes()):
        try:
            with _ending_forks():
                value = function(item, *args, **named)
            records.append(_record(0, value=value))
        except BaseException as error:
            records.append(_record(0, error=error, trace=traceback.format_exc()))
    Path(results).write_bytes(pickle.dumps(records))


@contextlib.contextmanager
def _ending_forks() -> Iterator[None]:
    """End every other process in which this context ends: a fork that the function has made and
    not ended. Otherwise its outcome, such as that its command does not exist, would replace the
    function's, and it would call the function for all further items.
    """
    process = os.getpid()
    code = 0
    try:
        yield
    except BaseException as error:
        if os.getpid() == process:
            raise
        code = 1
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        else:
            traceback.print_exc()
    finally:
        if os.getpid() != process:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def outcomes(results: Path) -> list[FunctionOutcome]:
    """Return the outcomes that :func:`call_for_each` has written, in the order of the items."""
    return [_outcome_of(record) for record in pickle.loads(results.read_bytes())]


def _suffix(job: str) -> str:
    return f"-{job}" if job else ""


def _count_call(folder: Path, job: str, generation: int, tries: int) -> None:
    """Record that the function is called in this round. Raises FunctionLost if it was already
    called in ``tries`` rounds.
    """
    marker = folder / BEGUN.format(job=_suffix(job), generation=generation)
    markers = set(folder.glob(BEGUN.format(job=_suffix(job), generation="*"))) - {marker}
    if tries and len(markers) >= tries:
        raise FunctionLost(
            f"The function was called {'once' if tries == 1 else f'{tries} times'} and did not "
            "come to its end: its nodes changed, or it failed. It is not called again, as tries="
            f"{tries} says."
        )
    marker.touch()


def outcome(folder: Path, job: str = "", completed: bool = True) -> FunctionOutcome | None:
    """Read the outcome of the function in ``folder``.

    Args:
        folder: folder of the function.
        job: id of the job. A job that is submitted again uses the same folder.
        completed: whether the job has completed. Then the outcome exists only when rank 0's result
            does. Without completion there is no result, even if rank 0 returned one: the outcome is
            the first error of the last round.

    Returns:
        The outcome; None if there is none yet.
    """
    errors = [_read(path) for path in folder.glob(ERROR.format(job=_suffix(job), rank="[0-9]*"))]
    result = None
    if completed:
        file = folder / RESULT.format(job=_suffix(job))
        if not file.exists():
            return None
        result = _read(file)
        errors = [error for error in errors if error.generation >= result.generation]
    last = max((error.generation for error in errors), default=0)
    return min((e for e in errors if e.generation == last), key=lambda e: e.time, default=result)


def _read(path: Path) -> FunctionOutcome:
    return _outcome_of(pickle.loads(path.read_bytes()))


def _outcome_of(record: Mapping[str, Any]) -> FunctionOutcome:
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
        pass  # the record has its message
    # SystemExit would end the caller's process, StopIteration its loop over the results.
    if not isinstance(raised, Exception) or isinstance(raised, (StopIteration, StopAsyncIteration)):
        raised = FunctionFailed(record["words"].rstrip(": "))
    return FunctionOutcome(None, raised, trace, generation, time)


def _write(
    path: Path,
    generation: int,
    value: Any = None,
    error: BaseException | None = None,
    trace: str = "",
) -> None:
    """Write an outcome atomically."""
    record = _record(generation, value, error, trace)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(pickle.dumps(record))
    os.replace(temporary, path)


def _record(
    generation: int, value: Any = None, error: BaseException | None = None, trace: str = ""
) -> dict[str, Any]:
    """Return an outcome as it is stored."""
    import cloudpickle

    packed = b""
    if error is not None:
        try:
            packed = cloudpickle.dumps(error)
        except Exception:
            pass  # its message can be
    return {
        "value": cloudpickle.dumps(value),
        "error": None if error is None else packed,
        "words": "" if error is None else f"{type(error).__name__}: {error}",
        "trace": trace,
        "generation": generation,
        "time": time.time(),
    }
