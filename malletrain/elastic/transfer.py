"""Moves state from one rank to those that lack it, over the process group: in a chain in which
every receiver forwards each piece that it gets.

Decides the order and the size of the pieces, and how many are in flight at once. With one at a time
each piece would wait for a response of the peer's threads, which on a busy machine takes longer
than sending the piece. A chain of n receivers moves the state in about the time of one copy, for
every n. No memory is needed besides the tensors. Ranks that neither send nor receive do not take
part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
import torch.distributed as dist

from malletrain.elastic.group import Group

PIECE_BYTES = 8 << 20
MAX_PIECES_IN_FLIGHT = 32
"""Maximum number of outstanding receives of a rank, and of outstanding sends."""


def pieces(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors as flat pieces of at most PIECE_BYTES. Pieces are views: writing to a
    piece writes to its tensor.
    """
    for tensor in tensors:
        if tensor.numel():
            flat = tensor.reshape(-1).view(torch.uint8)
            yield from flat.split(PIECE_BYTES)


def move(group: Group, chain: list[int], tensors: list[torch.Tensor]) -> None:
    """Send ``tensors`` along ``chain``. Receivers get them in place. Call it on the ranks of the
    chain only. Raises what collectives raise when a peer is lost.

    Args:
        group: the process group.
        chain: ranks, the source first.
        tensors: tensors with the same shapes and dtypes, in the same order, on all these ranks.
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
        # NCCL has only queued its copies so far, but the state must be complete on return.
        for gpu in gpus:
            torch.cuda.synchronize(gpu)

    group.call_abandonable(pass_on)
    for tensor, copy in zip(tensors, passed, strict=True):
        if tensor is not copy and group.place.rank != chain[0]:
            tensor.copy_(copy)


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def pass_along(rank: int, chain: list[int], tensors: list[torch.Tensor]) -> None:
    """Do the part of :func:`move` on ``rank``, in this thread.

    Args:
        rank: rank of this process.
        chain: ranks, the source first.
        tensors: tensors to send, or to receive in place.
    """
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
    receiving: deque[tuple[torch.Tensor, dist.Work | None]] = deque()
    sending: deque[dist.Work | None] = deque()

    def pass_on(piece: torch.Tensor) -> None:
        if at + 1 < len(chain):
            sending.append(dist.isend(piece, chain[at + 1]))
            if len(sending) > MAX_PIECES_IN_FLIGHT:
                _wait(sending.popleft())

    def receive_next() -> None:
        piece, work = receiving.popleft()
        _wait(work)
        pass_on(piece)

    for piece in pieces(flat_tensors):
        if at == 0:
            pass_on(piece)
            continue
        receiving.append((piece, dist.irecv(piece, chain[at - 1])))
        if len(receiving) > MAX_PIECES_IN_FLIGHT:
            receive_next()
    while receiving:
        receive_next()
    for work in sending:
        _wait(work)
    for tensor, copy in staged:
        if at > 0:
            tensor.copy_(copy)


def send_bytes(group: Group, chain: list[int], data: bytes) -> bytes:
    """Send a short message along ``chain``. Return it on every rank of the chain.

    Args:
        group: the process group.
        chain: ranks, the source first.
        data: the message; ignored on receivers.
    """
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
