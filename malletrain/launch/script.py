"""Runs a script as ``python SCRIPT`` or ``python -m MODULE`` does, and ends its process without
tearing down C++ libraries. Every worker and every process of a service ends here: the forks of a
fork server by import, the others by its path, standard library only:

    python -u script.py SCRIPT [ARGS]...
    python -u script.py -m MODULE [ARGS]...

If a thread waits in torch's C++ code (a store, a group) while the interpreter ends, the interpreter
ends the thread at a place where C++ does not allow that, and the process is aborted: "terminate
called without an active exception", signal 6, after a complete training. So whatever a script may
rely on is done as Python does it (threads joined, exit handlers, ``__del__`` of the script's
objects, files flushed), and the rest is left to the kernel.
"""

from __future__ import annotations

import atexit
import builtins
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
"""The code of a script that ended by a KeyboardInterrupt: the process ends by that signal."""
_FILE: Any = io.IOBase.__mro__[1]
"""What all file objects derive from; asking ``io.IOBase`` would ask an abstract class."""
_C10D = "torch.distributed.distributed_c10d"
_groups: deque[Any] = deque(maxlen=32)
"""Process groups that the script has destroyed, see :func:`_keep_groups`."""
_PLAIN_FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.FileIO)


class Runnable(Protocol):
    """What is run, of a job's specification."""

    @property
    def script(self) -> str:
        """Path of the script, or where the module was found."""

    @property
    def module(self) -> str:
        """Name of the module that is run instead, as ``python -m`` takes it; empty: none."""

    @property
    def args(self) -> tuple[str, ...]:
        """Arguments of either."""


def script_command(spec: Runnable) -> list[str]:
    """The command that runs a job's script in a process of its own."""
    program = [MODULE_OPTION, spec.module] if spec.module else [spec.script]
    return [sys.executable, "-u", os.path.abspath(__file__), *program, *spec.args]


def process_name(argv: Sequence[str]) -> str:
    """The name of a process that runs ``argv``: its script's, or its module's."""
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
            _as_module(argv[1])
        else:
            sys.argv = list(argv)
            sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
            main.__dict__.update(
                __file__=script,
                __cached__=None,
                __loader__=importlib.machinery.SourceFileLoader("__main__", script),
            )
            with open(script, "rb") as file:
                source = file.read()
            exec(compile(source, script, "exec"), main.__dict__)
    except SystemExit as end:
        return _exit_code(end)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename == script:
            print(f"The script cannot be read: {script}: {error.strerror}.", file=sys.stderr)
            return 2
        # Without the frames of this file, as if python had been started for it.
        below = error.__traceback__ and error.__traceback__.tb_next
        if script == MODULE_OPTION:
            below = below and below.tb_next
        error = error.with_traceback(below)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, below
        sys.excepthook(type(error), error, error.__traceback__)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _keep_groups() -> None:
    """Have the groups that the script destroys stay until its process ends.

    A model in DistributedDataParallel that outlives ``destroy_process_group()`` has the last
    reference to its group. Its end then waits for a thread of gloo without releasing the
    interpreter, for which that thread may be waiting: the script would never end. Torch releases
    the interpreter only where the last reference is Python's own. Where torch is not imported
    before the script, as without a warm interpreter, nothing is changed; nor in live mode, which
    keeps its groups itself (:mod:`malletrain.elastic.group`).
    """
    c10d: Any = sys.modules.get(_C10D)
    if c10d is None or hasattr(c10d.destroy_process_group, "keeps_groups"):
        return
    destroy = c10d.destroy_process_group

    @functools.wraps(destroy)
    def keeping(*args: Any, **kwargs: Any) -> None:
        if "malletrain.elastic" not in sys.modules:
            groups = getattr(getattr(c10d, "_world", None), "pg_map", ())
            _groups.extend(group for group in groups if group not in _groups)
        destroy(*args, **kwargs)

    keeping.keeps_groups = True  # type: ignore[attr-defined]
    c10d.destroy_process_group = sys.modules["torch.distributed"].destroy_process_group = keeping  # type: ignore[attr-defined]


def _as_module(name: str) -> None:
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # noqa: SLF001 (what -m calls)


def _exit_code(end: SystemExit) -> int:
    """What the interpreter makes of sys.exit(x)."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def leave(code: int, over: Callable[[int], None] = lambda code: None) -> NoReturn:
    """End this process with ``code`` as the interpreter would, without C++ teardown.

    Args:
        code: The script's exit code, or INTERRUPTED.
        over: Called with ``code`` when script and threads have ended: what happens to the process
            from then on says nothing of the script.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 (no other way)
        over(code)
        atexit._run_exitfuncs()  # noqa: SLF001 (likewise)
    except BaseException:
        traceback.print_exc()
    try:
        _let_go()
    finally:
        if code == INTERRUPTED:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code if code >= 0 else 1)


def _let_go() -> None:
    """Let go of what the script holds, in the interpreter's order, and write files out: a file that
    nobody has closed would be cut off.
    """
    _write_out((sys.stdout, sys.stderr))
    threading.excepthook = lambda args: None  # daemon threads live on for a moment
    names = sys.modules["__main__"].__dict__
    private = [name for name in names if name.startswith("_") and name != "__builtins__"]
    for name in [*private, *(name for name in list(names) if not name.startswith("_"))]:
        if name in names:
            names[name] = None
    gc.collect()
    _write_out(one for one in gc.get_objects() if issubclass(type(one), _FILE))
    _write_out((sys.stdout, sys.stderr))


def _write_out(files: Any) -> None:
    for file in files:
        try:
            if file is None or file.closed or not file.writable():
                continue
            if isinstance(file, _PLAIN_FILES):
                file.flush()
            else:  # compressed ones have an end of their own
                file.close()
        except Exception:  # the other end of a pipe is gone, a disk is full
            continue


def main(argv: Sequence[str]) -> NoReturn:
    """See the module's text."""
    here = os.path.dirname(os.path.abspath(__file__))
    if sys.path and os.path.abspath(sys.path[0]) == here:
        del sys.path[0]
    _take_name(process_name(argv))
    leave(run(argv))


def _take_name(name: str) -> None:
    """Be this in ``ps`` and ``top``, as the forks of a fork server are."""
    try:
        with open("/proc/self/comm", "w") as file:
            file.write(name)
    except OSError:
        pass  # no /proc here


if __name__ == "__main__":
    main(sys.argv[1:])
