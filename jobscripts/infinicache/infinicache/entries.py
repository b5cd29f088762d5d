"""What a proxy's memory is made of: nodes, objects, and chunks on their way. Decides nothing but
what an object's chunks are worth together.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from infinicache.objects import Shape
from infinicache.placement import NO_PROSPECT, Prospect


@dataclass
class PoolNode:
    """One cache node. ``reserved``: bytes placed there; ``chunks``: key → indices of its chunks
    there.
    """

    capacity: int
    reserved: int = 0
    leaving: bool = False
    chunks: dict[str, set[int]] = field(default_factory=dict)
    prospect: Prospect = NO_PROSPECT

    @property
    def free(self) -> int:
        """Bytes that may still be placed there."""
        return self.capacity - self.reserved


@dataclass
class Entry:
    """One object. ``at``: index → node; ``spare``: index → node with a backup of a lost chunk.
    ``touched``: CLOCK's bit; ``reads``: for telling what is most valuable.
    """

    key: str
    version: int
    shape: Shape
    at: dict[int, str] = field(default_factory=dict)
    spare: dict[int, str] = field(default_factory=dict)
    committed: bool = False
    touched: bool = True
    reads: int = 0

    @property
    def protection(self) -> int:
        """Nodes that may be lost, whichever they are; below 0 when the object cannot be read."""
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
    def hopeless(self) -> bool:
        """Whether it is lost for good: the backups of its lost chunks do not make up for them."""
        return len(self.at) + len(self.spare.keys() - self.at.keys()) < self.shape.d


@dataclass(frozen=True)
class Move:
    """Chunk ``index`` of an object to ``target``: from ``source``, or rebuilt from the others where
    there is none.
    """

    key: str
    version: int
    index: int
    source: str | None
    target: str
    bytes: int
