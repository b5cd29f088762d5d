"""Which bytes go from whom to whom when the layout of a state changes.

Decides it from the metadata alone, so that every process comes to the same plan: what a process
holds already stays; everything else comes from one that holds it, and where several do, the targets
take turns; pieces are bounded, and in such an order that all links work at once. It moves nothing
(:mod:`malletrain.elastic.sharded.moving`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from malletrain.elastic.sharded.chunks import Chunk

PIECE_BYTES = 8 << 20
Layout = Mapping[str, Sequence[Chunk]]
"""What one process holds, or is to hold: boxes of each tensor, by its key."""


class IncompleteStateError(RuntimeError):
    """Nobody holds a part of the state."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor on its way. ``source`` and ``target`` are ranks of the new group; where
    they are the same it is a copy within one process.
    """

    source: int
    """The rank that holds it."""
    target: int
    """The rank that is to hold it."""
    key: str
    """The tensor's."""
    chunk: Chunk
    """The box, in the whole tensor."""


@dataclass(frozen=True)
class TransferPlan:
    """All pieces of a change."""

    copies: tuple[Piece, ...]
    """What stays where it is."""
    moves: tuple[Piece, ...]
    """What goes to another process, in the order in which every process sends and receives."""

    def moved_bytes(self, item_bytes: Mapping[str, int]) -> int:
        """Bytes that go over the network; ``item_bytes``: of one element, by key."""
        return sum(piece.chunk.elements * item_bytes[piece.key] for piece in self.moves)

    def received_bytes(self, rank: int, item_bytes: Mapping[str, int]) -> int:
        """Those of them that go to ``rank``."""
        return sum(
            piece.chunk.elements * item_bytes[piece.key]
            for piece in self.moves
            if piece.target == rank
        )


def make_plan(
    holders: Sequence[Layout],
    targets: Sequence[Layout],
    item_bytes: Mapping[str, int],
    piece_bytes: int = PIECE_BYTES,
) -> TransferPlan:
    """The plan for ``targets``, by what ``holders`` have; both by rank of the new group.

    Args:
        holders: boxes that each process holds of the old state; they may overlap between processes
            (replicas).
        targets: boxes that each process is to hold.
        item_bytes: bytes of one element, by key.
        piece_bytes: the most that one piece has, unless an element is larger.

    Raises:
        IncompleteStateError: somebody wants what nobody holds.
    """
    copies: list[Piece] = []
    moves: list[tuple[tuple[int, int, int], Piece]] = []
    routes_of: dict[object, list[tuple[int, int, Chunk]]] = {}
    of_pair: dict[tuple[int, int], int] = {}
    for key in sorted({key for layout in targets for key in layout}):
        had = tuple(tuple(layout.get(key, ())) for layout in holders)
        want = tuple(tuple(layout.get(key, ())) for layout in targets)
        routes = routes_of.get((had, want))  # most tensors of a model are laid out like others
        if routes is None:
            routes = routes_of[had, want] = _routes(key, had, want)
        most = max(1, piece_bytes // item_bytes[key])
        for source, target, chunk in routes:
            if source == target:
                copies.append(Piece(source, target, key, chunk))
                continue
            for part in chunk.split(most):
                turn = of_pair[source, target] = of_pair.get((source, target), -1) + 1
                apart = (target - source) % len(targets)
                moves.append(((turn, apart, source), Piece(source, target, key, part)))
    moves.sort(key=lambda item: item[0])
    return TransferPlan(tuple(copies), tuple(piece for _, piece in moves))


def _routes(
    key: str, had: tuple[tuple[Chunk, ...], ...], want: tuple[tuple[Chunk, ...], ...]
) -> list[tuple[int, int, Chunk]]:
    owners: dict[Chunk, list[int]] = {}
    for rank, chunks in enumerate(had):
        for chunk in chunks:
            if chunk.elements:
                owners.setdefault(chunk, []).append(rank)
    turns: dict[Chunk, int] = {}
    routes: list[tuple[int, int, Chunk]] = []
    for target, chunks in enumerate(want):
        for chunk in chunks:
            remaining = [chunk] if chunk.elements else []
            own = [(mine, [target]) for mine in (had[target] if target < len(had) else ())]
            for offer, ranks in (*own, *owners.items()):
                rest: list[Chunk] = []
                for box in remaining:
                    common = box.common(offer)
                    if common is None:
                        rest.append(box)
                        continue
                    rest += box.without(offer)
                    source = target
                    if target not in ranks:
                        turn = turns.get(offer, 0)
                        turns[offer] = turn + 1
                        source = ranks[turn % len(ranks)]
                    routes.append((source, target, common))
                remaining = rest
            if remaining:
                raise IncompleteStateError(
                    f"Nobody holds {key} from {remaining[0].offsets} on, "
                    f"{remaining[0].sizes} elements."
                )
    return routes
