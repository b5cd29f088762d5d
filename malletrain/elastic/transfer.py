"""State from one rank to those that lack it, over the group itself: a chain in which every receiver
passes on what it gets, piece by piece.

Decides the order and the size of the pieces, and how many are on the way at once: with one at a
time each would wait for an answer of the peer's threads, which on a busy machine takes longer than
the piece. A chain of n receivers moves the state in about the time of one copy, whatever n is;
beyond the tensors themselves no memory is in use. Ranks that neither send nor receive take no part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
import torch.distributed as dist

from malletrain.elastic.group import Group

PIECE_BYTES = 8 << 20
ON_THE_WAY = 32
"""Pieces that a rank is ready to receive, and those that it sends, at once."""


def pieces(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors as flat pieces of at most PIECE_BYTES, as views of them: writing to a piece
    writes to its tensor.
    """
    for tensor in tensors:
        if tensor.numel():
            flat = tensor.reshape(-1).view(torch.uint8)
            yield from flat.split(PIECE_BYTES)


def move(group: Group, chain: list[int], tensors: list[torch.Tensor]) -> None:
    """Send ``tensors`` along ``chain`` (source first); in place on the receivers. Call on the ranks
    of the chain only.

    All must pass tensors of the same shapes and types in the same order. Raises what the
    collectives raise when a peer is lost.
    """
    gpus = {tensor.device for tensor in tensors if tensor.is_cuda}
    passed = tensors
    if group.by_host:
        source = group.place.rank == chain[0]
        passed = [
            (t.cpu() if source else torch.empty_like(t, device="cpu")) if t.is_cuda else t
            for t in tensors
        ]

    def pass_on() -> None:
        pass_along(group.place.rank, chain, passed)
        # NCCL's copies are only queued by now, and the state counts once this returns.
        for gpu in gpus:
            torch.cuda.synchronize(gpu)

    group.apart(pass_on)
    for tensor, copy in zip(tensors, passed, strict=True):
        if tensor is not copy and group.place.rank != chain[0]:
            tensor.copy_(copy)


def _done(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def pass_along(rank: int, chain: list[int], tensors: list[torch.Tensor]) -> None:
    """What :func:`move` does on ``rank``, in this thread."""
    at = chain.index(rank)
    staged: list[tuple[torch.Tensor, torch.Tensor]] = []
    flat_tensors = []
    for tensor in tensors:
        if tensor.is_contiguous():
            flat_tensors.append(tensor)
        else:
            copy = tensor.contiguous()
            staged.append((tensor, copy))
            flat_tensors.append(copy)
    coming: deque[tuple[torch.Tensor, dist.Work | None]] = deque()
    sending: deque[dist.Work | None] = deque()

    def pass_on(piece: torch.Tensor) -> None:
        if at + 1 < len(chain):
            sending.append(dist.isend(piece, chain[at + 1]))
            if len(sending) > ON_THE_WAY:
                _done(sending.popleft())

    def arrived() -> None:
        piece, work = coming.popleft()
        _done(work)
        pass_on(piece)

    for piece in pieces(flat_tensors):
        if at == 0:
            pass_on(piece)
            continue
        coming.append((piece, dist.irecv(piece, chain[at - 1])))
        if len(coming) > ON_THE_WAY:
            arrived()
    while coming:
        arrived()
    for work in sending:
        _done(work)
    for tensor, copy in staged:
        if at > 0:
            tensor.copy_(copy)


def send_bytes(group: Group, chain: list[int], data: bytes) -> bytes:
    """A short message along ``chain``; returns it on every rank of the chain."""
    size = torch.tensor([len(data)])
    move(group, chain, [size])
    source = chain[0] == group.place.rank
    body = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if source
        else torch.empty(int(size), dtype=torch.uint8)
    )
    move(group, chain, [body])
    return bytes(body.numpy().tobytes())
