"""Boxes of the elements of a tensor: the parts that ranks have of it.

Decides nothing; arithmetic only. A tensor without dimensions has one element, whose box has empty
offsets. Lists of boxes never contain empty boxes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from malletrain.elastic.peer_pickles import exchanged


@exchanged
@dataclass(frozen=True, order=True)
class Chunk:
    """A box of elements."""

    offsets: tuple[int, ...]
    """Index of its first element in the whole tensor."""
    sizes: tuple[int, ...]
    """Number of elements in each dimension."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    def common(self, other: Chunk) -> Chunk | None:
        """Return the intersection of both boxes; None if it is empty."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self._ends(), other._ends())
        sizes = tuple(end - at for end, at in zip(ends, offsets, strict=True))
        return Chunk(offsets, sizes) if all(size > 0 for size in sizes) else None

    def without(self, other: Chunk) -> list[Chunk]:
        """Return the elements that are not in ``other``, as boxes that do not overlap."""
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
        """Return the slices of this box in a tensor that contains the box ``outer``."""
        return tuple(
            slice(at - base, at - base + size)
            for at, base, size in zip(self.offsets, outer.offsets, self.sizes, strict=True)
        )

    def split(self, max_elements: int) -> Iterator[Chunk]:
        """Yield boxes of at most ``max_elements`` elements (at least one), in order."""
        if self.elements <= max(1, max_elements):
            if self.elements:
                yield self
            return
        dim = next(d for d, size in enumerate(self.sizes) if size > 1)
        row = self.elements // self.sizes[dim]
        step = max(1, max_elements // row)
        for start in range(0, self.sizes[dim], step):
            length = min(step, self.sizes[dim] - start)
            part = Chunk(
                (*self.offsets[:dim], self.offsets[dim] + start, *self.offsets[dim + 1 :]),
                (*self.sizes[:dim], length, *self.sizes[dim + 1 :]),
            )
            if part.elements > max_elements and length == 1:
                yield from part.split(max_elements)
            else:
                yield part

    def _ends(self) -> tuple[int, ...]:
        return tuple(at + size for at, size in zip(self.offsets, self.sizes, strict=True))


def share(length: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return (first, number) of the rows of one rank, as DTensor distributes them: equal parts,
    rounded up, from the front. The last ranks have fewer or none.

    Args:
        length: number of rows.
        ranks: number of ranks.
        rank: the rank, from 0.
    """
    rows_per_rank = -(-length // ranks)
    first = min(length, rank * rows_per_rank)
    return first, min(length, first + rows_per_rank) - first
