"""Lets the agent see where this process stands when it hangs: at a signal its stacks are written
into a file of the job's directory.

Decides nothing else. It is Python's own faulthandler, which needs neither the interpreter's lock
nor a thread of Python: a worker that is stuck in a collective or a system call answers too.
Standard library only.
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


def offer() -> None:
    """From now on the agent may ask. Never raises; does nothing outside MalleTrain, or where the
    script has the signal for itself.
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


def withdraw() -> None:
    """This process, a child of the one that offered, is not a worker."""
    global _file
    if _file is not None:
        faulthandler.unregister(STACKS_SIGNAL)
        signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
        _file.close()
        _file = None
