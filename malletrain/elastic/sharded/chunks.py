"""Boxes of a tensor's elements: what one rank holds of it.

Decides nothing; arithmetic only. A tensor without dimensions has one element, the box of no
offsets. Empty boxes are left out wherever boxes are listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, order=True)
class Chunk:
    """A box: from ``offsets`` on, so long as ``sizes`` in each dimension."""

    offsets: tuple[int, ...]
    """The first element, in the whole tensor."""
    sizes: tuple[int, ...]
    """Elements in each dimension."""

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return prod(self.sizes)

    def common(self, other: Chunk) -> Chunk | None:
        """What both have, None if nothing."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self._ends(), other._ends())
        sizes = tuple(end - at for end, at in zip(ends, offsets, strict=True))
        return Chunk(offsets, sizes) if all(size > 0 for size in sizes) else None

    def without(self, other: Chunk) -> list[Chunk]:
        """What this one has and ``other`` has not, as boxes that do not overlap."""
        shared = self.common(other)
        if shared is None:
            return [self] if self.elements else []
        rest: list[Chunk] = []
        offsets, sizes = list(self.offsets), list(self.sizes)
        for dim, (at, size) in enumerate(zip(shared.offsets, shared.sizes, strict=True)):
            before, end = at - offsets[dim], offsets[dim] + sizes[dim]
            after = end - (at + size)
            for start, length in ((offsets[dim], before), (at + size, after)):
                if length:
                    rest.append(
                        Chunk(
                            (*offsets[:dim], start, *offsets[dim + 1 :]),
                            (*sizes[:dim], length, *sizes[dim + 1 :]),
                        )
                    )
            offsets[dim], sizes[dim] = at, size
        return rest

    def within(self, outer: Chunk) -> tuple[slice, ...]:
        """Where it is in a tensor that holds ``outer``."""
        return tuple(
            slice(at - base, at - base + size)
            for at, base, size in zip(self.offsets, outer.offsets, self.sizes, strict=True)
        )

    def split(self, most: int) -> Iterator[Chunk]:
        """Boxes of at most ``most`` elements (one at least), in order."""
        if self.elements <= max(1, most):
            if self.elements:
                yield self
            return
        dim = next(d for d, size in enumerate(self.sizes) if size > 1)
        row = self.elements // self.sizes[dim]
        step = max(1, most // row)
        for start in range(0, self.sizes[dim], step):
            length = min(step, self.sizes[dim] - start)
            part = Chunk(
                (*self.offsets[:dim], self.offsets[dim] + start, *self.offsets[dim + 1 :]),
                (*self.sizes[:dim], length, *self.sizes[dim + 1 :]),
            )
            if part.elements > most and length == 1:
                yield from part.split(most)
            else:
                yield part

    def _ends(self) -> tuple[int, ...]:
        return tuple(at + size for at, size in zip(self.offsets, self.sizes, strict=True))


def share(length: int, ranks: int, rank: int) -> tuple[int, int]:
    """(first, number) of the rows that ``rank`` of ``ranks`` holds of ``length``, as DTensor deals
    them: equal parts, rounded up, from the front; the last ranks have fewer or none.
    """
    each = -(-length // ranks)
    first = min(length, rank * each)
    return first, min(length, first + each) - first
