"""One SIGTERM that is not for this worker.

Slurm's ``scancel`` sends SIGTERM to every process of a lease at once. The agent answers it: it has
the job saved and moved. A worker that died of it first could save nothing. So a worker that takes
snapshots on demand lets the first SIGTERM pass; the launcher, which knows of it, sends another
(:mod:`malletrain.launch.fork_client`). Scripts with a handler of their own, and their child
processes, are as they were.
"""

from __future__ import annotations

import ctypes
import os
import signal

from malletrain.protocol import env

_installed = False


def bear_one_sigterm() -> None:
    """Let the first SIGTERM pass, where the launcher knows how to stop this process all the same
    and the script has no handler of its own. Calling it again does nothing.
    """
    global _installed
    if _installed or env.FORK_SERVER not in os.environ:
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    libc = ctypes.CDLL(None)
    install = getattr(libc, "sysv_signal", None)
    if install is None:
        return
    # A handler in C, gone after the first signal, that does nothing: abs(3) has the form of one.
    # One in Python would wait for the end of a collective, in which a worker must be stoppable.
    install.argtypes, install.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    install(signal.SIGTERM, ctypes.cast(libc.abs, ctypes.c_void_p))
    signal.siginterrupt(signal.SIGTERM, False)
    os.register_at_fork(after_in_child=_as_usual)
    _installed = True


def bear_again() -> None:
    """Take a handler back that stood in for a while, and let the first SIGTERM pass as before."""
    global _installed
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if _installed:
        _installed = False
        bear_one_sigterm()


def _as_usual() -> None:
    """In a child process, which its parent may want to stop with one SIGTERM."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
