"""Run a command that dies with its parent: ``python -S -E supervisor.py PARENT_PID COMMAND
[ARGS]...``.

Used for the processes of a lease: if the embedded cluster is killed without a chance to clean up,
the kernel sends them SIGKILL (PR_SET_PDEATHSIG, prctl(2)). The setting survives exec. Children of
the command do not inherit it. Uses the standard library only and imports no package, because it is
run by its path and replaced by the command at once. ``malletrain.launch`` has its own copy for the
workers of a job, because the scavenger may not import malletrain.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, argv = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"The process could not be tied to its parent: {os.strerror(ctypes.get_errno())}.")
    # The parent may have died before the setting took effect.
    if os.getppid() != parent:
        sys.exit("The cluster that started this lease is gone; nothing is started.")
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(
            f"The command of the lease cannot be run: {argv[0]}: {error.strerror}.", file=sys.stderr
        )
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
