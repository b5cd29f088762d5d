"""The records of a proxy: nodes, objects, and chunks to move. Decides only how many losses an
object survives.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from infinicache.objects import Shape
from infinicache.placement import NO_PROSPECT, Prospect


@dataclass
class PoolNode:
    """A node of the cache.

    ``reserved``: size of the chunks that are assigned to it, bytes. ``chunks``: key → indices of
    its chunks on this node.
    """

    capacity: int
    reserved: int = 0
    leaving: bool = False
    chunks: dict[str, set[int]] = field(default_factory=dict)
    prospect: Prospect = NO_PROSPECT

    @property
    def free(self) -> int:
        """Size of the chunks that can still be assigned to it, bytes."""
        return self.capacity - self.reserved


@dataclass
class Entry:
    """An object.

    ``at``: index of a chunk → its node. ``spare``: index of a lost chunk → node with its backup.
    ``committed_at``: when this proxy committed it (time.monotonic); -inf: another one has.
    ``touched``: the reference bit of CLOCK. ``reads``: number of reads.
    """

    key: str
    version: int
    shape: Shape
    at: dict[int, str] = field(default_factory=dict)
    spare: dict[int, str] = field(default_factory=dict)
    committed: bool = False
    committed_at: float = -math.inf
    touched: bool = True
    reads: int = 0

    @property
    def protection(self) -> int:
        """Number of nodes whose loss the object survives, whichever they are; below 0 if the object
        cannot be read.
        """
        spare = len(self.at) - self.shape.d
        if spare <= 0:
            return spare
        nodes = 0
        for chunks in sorted(Counter(self.at.values()).values(), reverse=True):
            spare -= chunks
            if spare < 0:
                break
            nodes += 1
        return nodes

    @property
    def unrecoverable(self) -> bool:
        """Whether the object is lost for good: even with the backups there are fewer than d
        chunks.
        """
        return len(self.at) + len(self.spare.keys() - self.at.keys()) < self.shape.d


@dataclass(frozen=True)
class Move:
    """Chunk ``index`` of an object is to be moved to ``target``, from ``source``; None: it is
    rebuilt from the other chunks.
    """

    key: str
    version: int
    index: int
    source: str | None
    target: str
    bytes: int
