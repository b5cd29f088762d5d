"""State on its way along a chain of ranks: bit for bit, with a bounded number of pieces under way.
The ranks are threads here, and what they send goes by queues.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections import defaultdict

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from malletrain.elastic import transfer
from malletrain.elastic.state import MIN_BYTES, Holder, Rooms, describe_tensors, keep_freed
from tests import waiting
from tests.draws import cases
from tests.waiting import PATIENCE_S


class Mail:
    """Point-to-point messages between threads, as torch.distributed has them between processes."""

    def __init__(self):
        self.boxes = {(a, b): queue.Queue() for a in range(4) for b in range(4)}
        self.mine = threading.local()
        self.most = defaultdict(int)
        self.under_way = defaultdict(int)

    def _begin(self, what):
        key = (self.mine.rank, what)
        self.under_way[key] += 1
        self.most[key] = max(self.most[key], self.under_way[key])
        return key

    def isend(self, piece, to):
        self.boxes[self.mine.rank, to].put(piece.clone())
        return Work(self, self._begin("send"), lambda: None)

    def irecv(self, piece, source):
        box = self.boxes[source, self.mine.rank]
        wait = lambda: piece.copy_(box.get(timeout=PATIENCE_S))  # noqa: E731
        return Work(self, self._begin("receive"), wait)


class Work:
    def __init__(self, mail, key, wait):
        self.mail, self.key, self.done = mail, key, wait

    def wait(self):
        self.done()
        self.mail.under_way[self.key] -= 1


def moved(mail, chain, tensors_of):
    def run(rank):
        mail.mine.rank = rank
        transfer.pass_along(rank, chain, tensors_of[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in chain]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@settings(deadline=None, max_examples=cases(25))
@given(
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=3), max_size=60),
    chain=st.permutations([0, 1, 2, 3]).flatmap(lambda r: st.just(r[:3])),
)
def test_every_rank_of_a_chain_holds_what_the_first_sent(shapes, chain):
    mail = Mail()
    sent = [torch.randn(shape) for shape in shapes]
    if sent and sent[0].dim() == 2:
        sent[0] = sent[0].t()  # not contiguous
    got = {rank: [torch.full_like(t, -1.0) for t in sent] for rank in chain}
    got[chain[0]] = sent
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer.dist, "isend", mail.isend)
        patch.setattr(transfer.dist, "irecv", mail.irecv)
        patch.setattr(transfer, "PIECE_BYTES", 256)
        moved(mail, chain, got)
    for rank in chain:
        assert all(torch.equal(a, b) for a, b in zip(sent, got[rank], strict=True))
    assert all(most <= transfer.MAX_PIECES_IN_FLIGHT + 1 for most in mail.most.values())
    assert not any(mail.under_way.values()), "all that was begun was waited for"


def test_a_receiver_is_ready_for_many_pieces_before_the_first_is_sent(monkeypatch):
    """Known answer: with one at a time each piece waits for an answer of the peer."""
    mail = Mail()
    monkeypatch.setattr(transfer.dist, "irecv", mail.irecv)
    tensors = [torch.zeros(4) for _ in range(2 * transfer.MAX_PIECES_IN_FLIGHT)]
    receiver = threading.Thread(
        target=lambda: (setattr(mail.mine, "rank", 1), transfer.pass_along(1, [0, 1], tensors))
    )
    receiver.start()
    box = mail.boxes[0, 1]
    waiting.until(
        lambda: mail.under_way[1, "receive"] == transfer.MAX_PIECES_IN_FLIGHT + 1,
        "it is ready for many",
    )
    for k in range(len(tensors)):
        box.put(torch.full((4,), float(k)).view(torch.uint8))
    receiver.join(PATIENCE_S)
    assert [t[0].item() for t in tensors] == [float(k) for k in range(len(tensors))]


def a_training():
    torch.manual_seed(1)
    model = torch.nn.Linear(200, 200)
    return model, torch.optim.AdamW(model.parameters())


def test_a_joiner_takes_the_state_into_memory_that_was_made_ready(monkeypatch):
    model, optimizer = a_training()
    model(torch.ones(1, 200)).sum().backward()
    optimizer.step()
    source = Holder({"model": model, "optimizer": optimizer}, torch.device("cpu"))
    packed, tensors = source.pack({})

    mine, its = a_training()
    joiner = Holder({"model": mine, "optimizer": its}, torch.device("cpu"))
    joiner.rooms.make(describe_tensors([optimizer]))
    joiner.rooms.make(describe_tensors([optimizer]))  # the next round: nothing is made twice
    ready, take = set(), joiner.rooms.take

    def seen(*kind):
        if (taken := take(*kind)) is not None:
            ready.add(taken.data_ptr())
        return taken

    monkeypatch.setattr(joiner.rooms, "take", seen)
    skeleton, taken = joiner.destinations(packed)
    assert len(ready) == 2  # exp_avg and exp_avg_sq of the weight; the bias is not worth it
    assert take((200, 200), torch.float32, False) is None
    for room, tensor in zip(taken, tensors, strict=True):
        room.copy_(tensor)
    joiner.restore(skeleton, taken)
    assert joiner.digest() == source.digest()
    assert {its.state[mine.weight][name].data_ptr() for name in ("exp_avg", "exp_avg_sq")} == ready


def test_memory_for_what_does_not_come_is_given_back():
    one = Rooms(torch.device("cpu"))
    side = MIN_BYTES // 4
    one.make(f'[[[{side}], "float32", false]]')
    assert one.take((side,), torch.float64, False) is None
    assert one.take((side,), torch.float32, False).shape == (side,)
    assert one.take((side,), torch.float32, False) is None
    one.make(f'[[[{side}], "float32", false]]')
    one.clear()
    assert one.take((side,), torch.float32, False) is None


def test_an_optimizer_before_its_first_step_needs_no_memory():
    _, optimizer = a_training()
    assert describe_tensors([optimizer]) == "[]"


FAULTS = """
import ctypes, resource, sys
if sys.argv[1] == "keep":
    from malletrain.elastic.state import keep_freed
    assert keep_freed()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pieces = [libc.malloc(1 << 20) for _ in range(40)]
    for piece in pieces:
        ctypes.memset(piece, 1, 1 << 20)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    for piece in pieces:
        libc.free(piece)
print(faults)
"""


def _faults_of_a_second_use(what):
    """Page faults when 40 MB are allocated that were freed before."""
    argv = [sys.executable, "-c", FAULTS, what]
    return int(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)


def test_freed_memory_is_kept_for_what_comes_next(monkeypatch):
    """Known answer: 40 MB are some ten thousand pages."""
    for name in [n for n in os.environ if n.startswith(("MALLOC_", "GLIBC_", "LD_PRELOAD"))]:
        monkeypatch.delenv(name)
    assert _faults_of_a_second_use("keep") < 1000
    assert _faults_of_a_second_use("give back") > 5000


def test_a_user_who_manages_memory_is_left_to_it(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    assert not keep_freed()
