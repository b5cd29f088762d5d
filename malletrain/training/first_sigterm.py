"""Makes a worker ignore the first SIGTERM.

Slurm's ``scancel`` sends SIGTERM to every process of a lease at once. The agent reacts to it by
saving and moving the job. A worker that SIGTERM ended first could not save. So a worker that takes
snapshots on demand ignores the first SIGTERM. The launcher knows this and sends a second one
(:mod:`malletrain.launch.fork_client`). Scripts with a handler of their own, and child processes,
are not affected.
"""

from __future__ import annotations

import ctypes
import os
import signal

from malletrain.protocol import env

_installed = False


def ignore_first_sigterm() -> None:
    """Ignore the first SIGTERM, if the launcher can stop this process nevertheless and the script
    has no handler of its own. Further calls do nothing.
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
    # A C handler that does nothing and is removed after the first signal: abs(3) has a fitting
    # signature. A Python handler would run only after a collective, and a worker must be stoppable
    # in a collective.
    install.argtypes, install.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    install(signal.SIGTERM, ctypes.cast(libc.abs, ctypes.c_void_p))
    signal.siginterrupt(signal.SIGTERM, False)
    os.register_at_fork(after_in_child=_reset_in_child)
    _installed = True


def restore_sigterm_handling() -> None:
    """Remove a temporary handler, and ignore the first SIGTERM again if that was installed
    before.
    """
    global _installed
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if _installed:
        _installed = False
        ignore_first_sigterm()


def _reset_in_child() -> None:
    """Reset the handler in a child process, so that its parent can stop it with one SIGTERM."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
