"""Runs a script as ``python SCRIPT`` or ``python -m MODULE`` does, and ends the process without
destroying C++ libraries. Every worker and every process of a service runs this file: forks of a
fork server import it, the others run it by its path, standard library only:

    python -u script.py SCRIPT [ARGS]...
    python -u script.py -m MODULE [ARGS]...

If a thread waits in torch's C++ code (a store, a group) while the interpreter shuts down, the
interpreter ends the thread at a place where C++ does not allow that, and the process is aborted:
"terminate called without an active exception", signal 6, after a complete training. So this file
does everything on which a script can rely, as Python does it (it joins threads, runs exit handlers
and ``__del__`` of the script's objects, flushes files), and leaves the rest to the kernel.

A crash after the script and its threads have ended, for example in an exit handler of a library,
does not change the exit code: the fork server sees to that for its forks, and
:func:`outlive_crashes` for the others.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import gc
import importlib.machinery
import io
import os
import runpy
import signal
import sys
import threading
import traceback
import types
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

MODULE_OPTION = "-m"
INTERRUPTED = -signal.SIGINT
"""Code of a script that ended by a KeyboardInterrupt. The process then ends by SIGINT."""
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals by which a process crashes."""
_c_functions: list[Any] = []
"""C functions that must not be freed."""
_FILE: Any = io.IOBase.__mro__[1]
"""Base class of all file objects. A check against ``io.IOBase`` would call the hooks of an abstract
class.
"""
_C10D = "torch.distributed.distributed_c10d"
_groups: deque[Any] = deque(maxlen=32)
"""Process groups that the script has destroyed, see :func:`_keep_groups`."""
_PLAIN_FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.FileIO)


class Runnable(Protocol):
    """The part of a job specification that says what to run."""

    @property
    def script(self) -> str:
        """Path of the script, or of the module's file."""

    @property
    def module(self) -> str:
        """Name of the module to run, as ``python -m`` takes it; empty to run the script."""

    @property
    def args(self) -> tuple[str, ...]:
        """Arguments of the script or module."""


def script_command(spec: Runnable) -> list[str]:
    """Return the command that runs a job's script in a new process."""
    program = [MODULE_OPTION, spec.module] if spec.module else [spec.script]
    return [sys.executable, "-u", os.path.abspath(__file__), *program, *spec.args]


def process_name(argv: Sequence[str]) -> str:
    """Return the name of a process that runs ``argv``: the file name of its script, or the name of
    its module.
    """
    if argv[0] == MODULE_OPTION:
        return argv[1]
    return os.path.basename(argv[0])


def run(argv: Sequence[str]) -> int:
    """Run ``argv`` (a script or ``-m MODULE``, and its arguments) as ``__main__``.

    Returns:
        The exit code that Python would end with; INTERRUPTED after a KeyboardInterrupt.
    """
    _keep_groups()
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __spec__=None)
    sys.modules["__main__"] = main
    script = argv[0]
    try:
        if script == MODULE_OPTION:
            sys.argv = [MODULE_OPTION, *argv[2:]]
            sys.path.insert(0, os.getcwd())
            _run_module(argv[1])
        else:
            sys.argv = list(argv)
            # Python follows links: a script that is linked into the folder of an experiment
            # imports the modules beside the original.
            sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
            main.__dict__.update(
                __file__=script,
                __cached__=None,
                __loader__=importlib.machinery.SourceFileLoader("__main__", script),
            )
            with open(script, "rb") as file:
                source = file.read()
            exec(compile(source, script, "exec"), main.__dict__)
    except SystemExit as end:
        code = _exit_code(end)
        if code:
            sys.last_value = end  # for exit handlers: the script has not come to its end
        return code
    except BaseException as error:
        if isinstance(error, OSError) and error.filename == script:
            print(f"The script cannot be read: {script}: {error.strerror}.", file=sys.stderr)
            return 2
        # Remove the frames of this file, so that the traceback is that of ``python SCRIPT``.
        script_traceback = error.__traceback__ and error.__traceback__.tb_next
        if script == MODULE_OPTION:
            script_traceback = script_traceback and script_traceback.tb_next
        error = error.with_traceback(script_traceback)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, script_traceback
        sys.excepthook(type(error), error, error.__traceback__)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _keep_groups() -> None:
    """Keep the process groups that the script destroys alive until its process ends.

    A model in DistributedDataParallel that outlives ``destroy_process_group()`` has the last
    reference to its group. Its destructor then waits for a thread of gloo without releasing the
    interpreter lock, for which that thread may be waiting: the script would never end. torch
    releases the lock only if Python has the last reference. Nothing is changed if torch is not
    imported before the script, as without a warm interpreter, nor in live mode, which keeps its
    groups itself (:mod:`malletrain.elastic.group`).
    """
    c10d: Any = sys.modules.get(_C10D)
    if c10d is None or hasattr(c10d.destroy_process_group, "keeps_groups"):
        return
    destroy = c10d.destroy_process_group

    @functools.wraps(destroy)
    def destroy_and_keep(*args: Any, **kwargs: Any) -> None:
        if "malletrain.elastic" not in sys.modules:
            groups = getattr(getattr(c10d, "_world", None), "pg_map", ())
            _groups.extend(group for group in groups if group not in _groups)
        destroy(*args, **kwargs)

    destroy_and_keep.keeps_groups = True  # type: ignore[attr-defined]
    distributed: Any = sys.modules["torch.distributed"]
    c10d.destroy_process_group = distributed.destroy_process_group = destroy_and_keep


def _run_module(name: str) -> None:
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # noqa: SLF001 (what -m calls)


def _exit_code(end: SystemExit) -> int:
    """Return the exit code that the interpreter derives from sys.exit(x)."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def leave(code: int, over: Callable[[int], None] = lambda code: None) -> NoReturn:
    """End this process with ``code`` as the interpreter would, without C++ teardown.

    Args:
        code: exit code of the script, or INTERRUPTED.
        over: called with ``code`` when the script and its threads have ended. A later failure of
            the process is not one of the script.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 (no other way)
        over(code)
        atexit._run_exitfuncs()  # noqa: SLF001 (likewise)
    except BaseException:
        traceback.print_exc()
    try:
        _release_objects()
    finally:
        if code == INTERRUPTED:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code if code >= 0 else 1)


def outlive_crashes(code: int) -> None:
    """From now on end this process with ``code`` if it crashes, in whatever thread. Does nothing
    where Python has no ctypes. ``code``: exit code of the script, or INTERRUPTED.
    """
    try:
        import ctypes

        libc = ctypes.CDLL(None)
    except (ImportError, OSError):
        return
    if code < 0:
        return

    def end(number: int) -> None:
        sentence = (
            f"malletrain: this process was killed by signal {number} after its script had ended "
            f"with code {code}; the script's code counts.\n"
        )
        with contextlib.suppress(OSError):
            os.write(2, sentence.encode())
        os._exit(code)

    # A handler of the module signal would wait for the interpreter to go on, and there it does not.
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(end)
    _c_functions.append(handler)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, type(handler)), ctypes.c_void_p
    for number in CRASHES:
        libc.signal(number, handler)


def _release_objects() -> None:
    """Release the objects of the script, in the order of the interpreter, and flush files: the end
    of a file that is not closed would be missing.
    """
    _flush_files((sys.stdout, sys.stderr))
    threading.excepthook = lambda args: None  # daemon threads still run for a moment
    names = sys.modules["__main__"].__dict__
    private = [name for name in names if name.startswith("_") and name != "__builtins__"]
    for name in [*private, *(name for name in list(names) if not name.startswith("_"))]:
        if name in names:
            names[name] = None
    gc.collect()
    _flush_files(value for value in gc.get_objects() if issubclass(type(value), _FILE))
    _flush_files((sys.stdout, sys.stderr))


def _flush_files(files: Any) -> None:
    for file in files:
        try:
            if file is None or file.closed or not file.writable():
                continue
            if isinstance(file, _PLAIN_FILES):
                file.flush()
            else:  # compressed files have an end that only close() writes
                file.close()
        except Exception:  # the other end of a pipe is closed, or a disk is full
            continue


def main(argv: Sequence[str]) -> NoReturn:
    """Run the program; see the module's docstring."""
    package_dir = os.path.dirname(os.path.abspath(__file__))
    if sys.path and os.path.abspath(sys.path[0]) == package_dir:
        del sys.path[0]
    _set_name(process_name(argv))
    leave(run(argv), outlive_crashes)


def _set_name(name: str) -> None:
    """Set the name of this process for ``ps`` and ``top``, as the forks of a fork server do."""
    try:
        with open("/proc/self/comm", "w") as file:
            file.write(name)
    except OSError:
        pass  # there is no /proc


if __name__ == "__main__":
    main(sys.argv[1:])
