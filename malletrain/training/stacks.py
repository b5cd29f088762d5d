"""Lets the agent see the stacks of a hanging worker: on a signal, they are written to a file in the
job's directory.

Uses Python's faulthandler, which needs neither the interpreter's lock nor a Python thread, so it
works in a worker that is stuck in a collective or a system call. Decides nothing else. Standard
library only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from typing import IO

from malletrain.protocol import env
from malletrain.protocol.stacks_file import STACKS_FILE, STACKS_SIGNAL

_file: IO[bytes] | None = None


def install() -> None:
    """Install the signal handler. Never raises. Does nothing outside MalleTrain, or if the script
    uses the signal itself.
    """
    global _file
    flags = os.environ.get(env.FLAGS)
    if not flags or _file is not None:
        return
    path = os.path.join(os.path.dirname(flags), f"{STACKS_FILE}{os.getpid()}")
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        if signal.getsignal(STACKS_SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN, None):
            return
        flags_of_file = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        _file = os.fdopen(os.open(path, flags_of_file, 0o600), "wb", buffering=0)
        faulthandler.register(STACKS_SIGNAL, file=_file, all_threads=True, chain=False)


def remove() -> None:
    """Remove the handler in a forked child of the worker."""
    global _file
    if _file is not None:
        faulthandler.unregister(STACKS_SIGNAL)
        signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
        _file.close()
        _file = None
