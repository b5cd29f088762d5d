"""How long nodes have been silent that are no members, such as those that MalleTrain has lost.
Decides which of them are to be asked whether they are alive. Pure: no sockets, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_SILENCE_S = 10.0
"""Time after which a node that is no member and does not register is asked, seconds."""
MAX_STEP_S = 1.0
"""Maximum time that counts between two looks, seconds: the proxy itself may have been stopped."""


class Silence:
    """The silence of a proxy's nodes."""

    def __init__(self) -> None:
        self._silent_s: dict[str, float] = {}
        """Node → time since it was last heard of, seconds."""
        self._suspects: set[str] = set()
        """Nodes that are asked now and have not been heard of since."""
        self._looked_at = 0.0

    def end(self, address: str) -> None:
        """Record that a node is heard of, or is forgotten."""
        self._silent_s.pop(address, None)
        self._suspects.discard(address)

    def overdue(self, addresses: Iterable[str], now: float) -> list[str]:
        """Return those of these nodes that are to be asked now; each one once in its silence.

        Args:
            addresses: nodes that are no members.
            now: time, seconds.
        """
        elapsed_s, self._looked_at = min(now - self._looked_at, MAX_STEP_S), now
        for address in addresses:
            self._silent_s[address] = self._silent_s.get(address, 0.0) + elapsed_s
        overdue = [
            a for a, s in self._silent_s.items() if s > MAX_SILENCE_S and a not in self._suspects
        ]
        self._suspects.update(overdue)
        return overdue

    def lasts(self, address: str) -> bool:
        """Return whether a node that is asked has not been heard of since."""
        return address in self._suspects
