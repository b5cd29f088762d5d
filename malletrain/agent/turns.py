"""Whose turn it is to import PyTorch, where several nodes are one machine (an embedded cluster).

As many agents of one daemon at a time as there are processors: the first nodes are of use then
while the others still wait, instead of all at the same, late moment. Decides nothing where every
agent has a machine of its own. A turn is a lock on a file, which the kernel takes back from the
dead.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import time

PATIENCE_S = 20.0
"""After which it is one's turn all the same: one whose turn it is may stand still."""


class Turns:
    """Those of one agent.

    Args:
        daemon: whose agents take turns with each other.
        at_once: how many have theirs at a time; None: as many as this process may use processors.
        place: a folder of the machine's; None: that for temporary files.
    """

    def __init__(self, daemon: str, at_once: int | None = None, place: str | None = None) -> None:
        whose = hashlib.sha256(daemon.encode()).hexdigest()[:12]
        stem = f"malletrain-{os.geteuid()}-turn-{whose}"
        count = at_once or len(os.sched_getaffinity(0))
        base = place or tempfile.gettempdir()
        self._paths = [os.path.join(base, f"{stem}-{number}") for number in range(count)]
        self._held: tuple[str, int] | None = None
        self._since: float | None = None

    def take(self) -> bool:
        """Whether it is this agent's turn, until :meth:`give`; asked again and again."""
        if self._held is not None:
            return True
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if now - self._since < PATIENCE_S and not any(map(self._lock, self._paths)):
            return False
        self._since = None
        return True

    def _lock(self, path: str) -> bool:
        """Whether nobody else has this one; a file that cannot be ours keeps nobody waiting."""
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            return True
        try:
            if os.fstat(file).st_uid == os.geteuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.path.samestat(os.fstat(file), os.lstat(path)):
                    raise BlockingIOError  # who had it has just given it back, and the file with it
                self._held = path, file
                return True
        except OSError as error:
            os.close(file)
            return not isinstance(error, BlockingIOError | FileNotFoundError)
        os.close(file)
        return True

    def give(self) -> None:
        """Let another have it. Without a turn nothing is done."""
        held, self._held, self._since = self._held, None, None
        if held is not None:
            os.unlink(held[0])
            os.close(held[1])
