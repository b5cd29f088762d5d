"""Groups within one process: what a group that came to nothing leaves behind, and what a rehearsal
does.
"""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from malletrain.elastic import group as groups
from malletrain.elastic.checkin import CheckIn, RoundStore
from malletrain.elastic.errors import Interrupted
from malletrain.elastic.group import Group, rehearse
from malletrain.elastic.link import Place
from tests.waiting import PATIENCE_S

ENDS_WHILE_GLOO_CONNECTS = """
import threading, time
import torch.distributed as dist
from malletrain.elastic.checkin import RoundStore
from malletrain.elastic.errors import Interrupted
from malletrain.elastic.group import Group
from malletrain.elastic.link import Place

def connecting(*_):
    void.set()
    threading.main_thread().join()
    time.sleep(0.5)  # gloo is not done at once either
    print("gloo came back", flush=True)

void, dist.ProcessGroupGloo = threading.Event(), connecting
try:
    Group(Place(1, 0, 2), RoundStore(dist.HashStore(), void.is_set), cuda=False)
except Interrupted:
    print("given up", flush=True)
"""


def groups_counted() -> int:
    """How many groups torch counts; it has no public function for that."""
    return dist.distributed_c10d._world.group_count  # noqa: SLF001


def test_a_group_that_came_to_nothing_leaves_no_trace():
    hook = sys.excepthook
    for generation in (1, 2):
        with pytest.raises(Interrupted):
            Group(Place(generation, 0, 2), RoundStore(dist.HashStore(), lambda: True), cuda=False)
        assert not dist.is_initialized()
        assert groups_counted() == 0, "the peers' next group would look for other keys"
    group = Group(Place(3, 0, 1), RoundStore(dist.HashStore(), lambda: False), cuda=False)
    try:
        assert dist.get_world_size() == 1
        tensor = torch.ones(3)
        group.average(tensor).wait()
        assert tensor.tolist() == [1.0, 1.0, 1.0]
        assert sys.excepthook is hook
    finally:
        group.leave()
        group.close()
    assert not dist.is_initialized()


def test_a_rehearsal_leaves_no_trace():
    rehearse()
    assert not dist.is_initialized()
    assert groups_counted() == 0


def test_connecting_to_a_peer_that_never_comes_is_given_up(monkeypatch):
    """gloo's own connecting cannot be interrupted; here it lasts until the test lets it end."""
    void, end = threading.Event(), threading.Event()
    monkeypatch.setattr(dist, "ProcessGroupGloo", lambda *_: void.set() or end.wait(PATIENCE_S))
    try:
        with pytest.raises(Interrupted):
            Group(Place(1, 0, 2), RoundStore(dist.HashStore(), void.is_set), cuda=False)
    finally:
        end.set()
    assert not dist.is_initialized()
    assert groups_counted() == 0


@pytest.mark.thorough
def test_a_process_does_not_end_under_a_connecting_that_was_given_up():
    """It would be aborted when gloo comes back to an interpreter that ends."""
    argv = [sys.executable, "-c", ENDS_WHILE_GLOO_CONNECTS]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (0, "given up\ngloo came back\n"), done.stderr


class _Nothing:
    """A member that checks in and has no state."""

    def for_joiners(self) -> str:
        return "[]"

    def make_room(self, data: str) -> None:
        pass


def test_a_group_that_is_given_up_leaves_the_next_rounds_store_alone(monkeypatch):
    """The next round may come while a group is formed; no rank would ever come to it again."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    failed, next_ones, set_timeout = [], [], groups.set_timeout

    def next_round_comes(*arguments: object) -> None:
        place = Place(2, 0, 1, store.port)
        next_ones.append(CheckIn(place, "", _Nothing(), lambda: failed.append(place)))
        next_ones[0].store(lambda: bool(failed))
        set_timeout(*arguments)

    monkeypatch.setattr(groups, "set_timeout", next_round_comes)
    group = Group(Place(1, 0, 1), RoundStore(dist.HashStore(), lambda: False), cuda=False)
    try:
        group.abort()
        connected = next_ones[0].store(lambda: False)
        connected.set("said", "all is well")
        assert connected.get("said") == b"all is well"
    finally:
        group.leave()
        group.close()
    assert not failed
