"""Plans which bytes move between which ranks when the layout of a state changes.

Decides it from the metadata alone, so that every process computes the same plan. Elements that a
process already has are copied locally. All others come from a process that has them; if several do,
they take turns. Pieces have a maximum size, and are ordered so that all links are busy at the same
time. Moves nothing (:mod:`malletrain.elastic.sharded.moving`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from malletrain.elastic.sharded.chunks import Chunk

PIECE_BYTES = 8 << 20
Layout = Mapping[str, Sequence[Chunk]]
"""The boxes of each tensor that one process has, or needs, by the tensor's key."""


class IncompleteStateError(RuntimeError):
    """No process has a part of the state that is needed."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor that is moved. If ``source`` and ``target`` are equal, it is copied within
    one process. Both are ranks of the new group.
    """

    source: int
    """Rank that has it."""
    target: int
    """Rank that needs it."""
    key: str
    """Key of the tensor."""
    chunk: Chunk
    """The box, in the whole tensor."""


@dataclass(frozen=True)
class TransferPlan:
    """All pieces of a change."""

    copies: tuple[Piece, ...]
    """Pieces that are copied within one process."""
    moves: tuple[Piece, ...]
    """Pieces that move to another process, in the order in which all processes send and receive."""

    def moved_bytes(self, item_bytes: Mapping[str, int]) -> int:
        """Return the number of bytes sent between processes. ``item_bytes``: bytes of one element,
        by key.
        """
        return sum(piece.chunk.elements * item_bytes[piece.key] for piece in self.moves)

    def received_bytes(self, rank: int, item_bytes: Mapping[str, int]) -> int:
        """Return the number of bytes that ``rank`` receives from other processes."""
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
    """Return the plan that fills ``targets`` from ``holders``. Both are indexed by rank of the new
    group.

    Args:
        holders: boxes of the old state that each process has. Those of different processes may
            overlap (replicas).
        targets: boxes that each process needs.
        item_bytes: bytes of one element, by key.
        piece_bytes: maximum size of a piece, bytes, unless one element is larger.

    Raises:
        IncompleteStateError: a process needs elements that no process has.
    """
    copies: list[Piece] = []
    moves: list[tuple[tuple[int, int, int], Piece]] = []
    routes_of: dict[object, list[tuple[int, int, Chunk]]] = {}
    last_turn: dict[tuple[int, int], int] = {}
    for key in sorted({key for layout in targets for key in layout}):
        old = tuple(tuple(layout.get(key, ())) for layout in holders)
        new = tuple(tuple(layout.get(key, ())) for layout in targets)
        routes = routes_of.get((old, new))  # many tensors of a model have the same layout
        if routes is None:
            routes = routes_of[old, new] = _routes(key, old, new)
        max_elements = max(1, piece_bytes // item_bytes[key])
        for source, target, chunk in routes:
            if source == target:
                copies.append(Piece(source, target, key, chunk))
                continue
            for part in chunk.split(max_elements):
                turn = last_turn[source, target] = last_turn.get((source, target), -1) + 1
                distance = (target - source) % len(targets)
                moves.append(((turn, distance, source), Piece(source, target, key, part)))
    moves.sort(key=lambda item: item[0])
    return TransferPlan(tuple(copies), tuple(piece for _, piece in moves))


def _routes(
    key: str, old: tuple[tuple[Chunk, ...], ...], new: tuple[tuple[Chunk, ...], ...]
) -> list[tuple[int, int, Chunk]]:
    owners: dict[Chunk, list[int]] = {}
    for rank, chunks in enumerate(old):
        for chunk in chunks:
            if chunk.elements:
                owners.setdefault(chunk, []).append(rank)
    turns: dict[Chunk, int] = {}
    routes: list[tuple[int, int, Chunk]] = []
    for target, chunks in enumerate(new):
        for chunk in chunks:
            remaining = [chunk] if chunk.elements else []
            own = [(box, [target]) for box in (old[target] if target < len(old) else ())]
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
