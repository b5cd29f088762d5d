"""When the work that is due after a step is done, for loops of every shape."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.distributed import HashStore
from torch.utils.data import DataLoader, TensorDataset

import malletrain
from malletrain.training import step_end
from malletrain.training.step_end import EpochEnds, StepEnd
from tests.malletrain.training.worker_side import as_plain_script

SAMPLES, BATCH = 8, 2


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    with as_plain_script(monkeypatch):
        yield


class Loop:
    """A sampler, its loader, and what happens: steps ``sN``, work ``w`` with the state then."""

    def __init__(self, kind: str = "sampler", **options: object) -> None:
        self.events: list[object] = []
        if kind == "stream":
            self.sampler = malletrain.ElasticStream(
                *(["a", "b"], lambda _: range(SAMPLES // 2)),
                global_batch_size=BATCH,
                shuffle=False,
                rank=0,
                world_size=1,
            )
            self.loader = self.sampler
        else:
            self.sampler = malletrain.ElasticSampler(
                SAMPLES, global_batch_size=BATCH, rank=0, world_size=1
            )
            data = TensorDataset(torch.arange(SAMPLES))
            self.loader = DataLoader(data, batch_sampler=self.sampler, **options)
        self.end = StepEnd(self._work)
        self.end.watch(self.sampler)
        self.sampler.on_epoch_closed(self.end.epoch_closed)

    def state(self) -> tuple[int, int]:
        state = self.sampler.state_dict()
        return state["epoch"], state.get("position", state.get("samples"))

    def _work(self) -> None:
        self.events.append(self.state())

    def step(self) -> None:
        self.sampler.advance()
        self.events.append("step")
        self.end.step_done(self.sampler)

    def note(self, word: str) -> None:
        self.events.append(word)


@pytest.mark.parametrize("kind", ["sampler", "stream"])
def test_work_is_done_at_the_request_of_the_next_batch(kind):
    loop = Loop(kind)
    for _ in loop.sampler.epochs(1):
        for _ in loop.loader:
            loop.step()
            loop.note("row")
        loop.note("tail")
    each = [event for at in (2, 4, 6) for event in ("step", "row", (0, at))]
    assert loop.events == [*each, "step", "row", "tail", (1, 0)]


@pytest.mark.parametrize("kind", ["sampler", "stream"])
def test_after_a_break_work_is_done_when_the_epoch_is_closed(kind):
    loop = Loop(kind)
    for _ in loop.sampler.epochs(2):
        for taken, _ in enumerate(loop.loader):
            loop.step()
            if taken == 1:
                break
        assert loop.sampler.between_epochs
        loop.events.append(("tail", *loop.state()))
    one = ["step", (0, 2), "step", ("tail", 1, 0), (1, 0)]
    other = ["step", (1, 2), "step", ("tail", 2, 0), (2, 0)]
    assert loop.events == one + other


@pytest.mark.parametrize("workers", [0, 1])
def test_a_break_is_seen_whether_or_not_the_loader_has_workers(workers):
    options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    loop = Loop(**options)
    for _ in loop.sampler.epochs(1):
        for _ in loop.loader:
            loop.step()
            break
        loop.events.append(("tail", *loop.state()))
    assert loop.events == ["step", ("tail", 1, 0), (1, 0)]


def test_workers_that_stay_hide_a_break_until_the_next_epoch():
    loop = Loop(num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    for _ in loop.sampler.epochs(1):
        for _ in loop.loader:
            loop.step()
            break
        loop.events.append(("tail", *loop.state()))
    assert loop.events == ["step", ("tail", 0, 2), (1, 0)]


def test_an_epoch_that_is_iterated_again_goes_on():
    """An evaluation in the middle of an epoch, between two loops over its batches."""
    loop = Loop()
    for _ in loop.sampler.epochs(1):
        for _ in loop.loader:
            loop.step()
            break
        loop.note("evaluation")
        for _ in loop.loader:
            loop.step()
    expected = ["step", "evaluation", (0, 2), "step", (0, 4), "step", (0, 6), "step", (1, 0)]
    assert loop.events == expected


def test_a_loop_over_epochs_that_is_left_does_no_work():
    """A run that resumed from after the last step would make one more."""
    loop = Loop()
    for _ in loop.sampler.epochs(2):
        for _ in loop.loader:
            loop.step()
            if loop.sampler.position == 4:
                break
        break
    assert loop.events == ["step", (0, 2), "step"]
    assert loop.sampler.between_epochs
    assert loop.state() == (0, 4)


def test_a_loop_without_epochs_does_its_work_when_it_is_left():
    loop = Loop()
    for _ in loop.loader:
        loop.step()
        loop.note("row")
        break
    assert loop.events == ["step", "row", (0, 2)]
    assert not loop.sampler.between_epochs


def test_an_iterator_for_each_step():
    loop = Loop()
    for _ in loop.sampler.epochs(1):
        for _ in range(4):
            next(iter(loop.loader))
            loop.step()
        loop.note("tail")
    assert loop.events == ["step", (0, 2), "step", (0, 4), "step", (0, 6), "step", "tail", (1, 0)]


def test_a_loop_that_reads_ahead_does_its_work_at_once():
    loop = Loop()
    for _ in loop.sampler.epochs(1):
        batches = iter(loop.loader)
        batch = next(batches)
        while batch is not None:
            following = next(batches, None)
            loop.step()
            loop.note("row")
            batch = following
    assert loop.events[:6] == ["step", (0, 2), "row", "step", (0, 4), "row"]


def test_a_loop_that_reads_in_another_thread_does_its_work_at_once():
    loop = Loop()
    batches = iter(loop.loader)

    def take() -> None:
        thread = threading.Thread(target=next, args=(batches,))
        thread.start()
        thread.join()

    for _ in range(2):
        take()
        loop.step()
        loop.note("row")
    assert loop.events == ["step", (0, 2), "row", "step", (0, 4), "row"]


def test_the_batches_of_another_loader_end_no_step():
    loop = Loop()
    other = malletrain.ElasticSampler(SAMPLES, global_batch_size=BATCH, rank=0, world_size=1)
    loop.end.watch(other)
    for _ in loop.loader:
        loop.step()
        list(DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_sampler=other))
        loop.note("row")
        if loop.sampler.position == 4:
            break
    assert loop.events == ["step", "row", (0, 2), "step", "row", (0, 4)]


def test_a_process_says_at_its_first_step_that_it_saves_on_request(monkeypatch, tmp_path):
    """A request before the second batch is requested would be refused otherwise, and the step be
    lost.
    """
    sampler = malletrain.ElasticSampler(SAMPLES, global_batch_size=BATCH, rank=0, world_size=1)
    snapshot = malletrain.Snapshot(tmp_path / "x.pt", sampler=sampler)
    announced = []
    monkeypatch.setattr(snapshot, "_announce", lambda: announced.append(sampler.position))
    loader = DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_sampler=sampler)
    for _ in loader:
        sampler.advance()
        snapshot.step()
        assert announced[:1] == [BATCH]
        break


def test_an_iterator_that_is_freed_at_the_end_of_the_script_is_not_left(monkeypatch):
    """A request for a snapshot would be answered, and the ended script run again."""
    loop = Loop()
    batches = iter(loop.loader)
    next(batches)
    loop.step()
    exiting = threading.Event()
    exiting.set()
    monkeypatch.setattr(step_end, "_exiting", exiting)
    del batches
    assert loop.events == ["step"]


@pytest.fixture
def store(monkeypatch):
    store = HashStore()
    monkeypatch.setattr(step_end, "group_store", lambda: store)
    monkeypatch.setattr(step_end, "rank_and_world", lambda: (0, 2))
    return store


def test_a_slower_rank_is_waited_for(store, monkeypatch):
    monkeypatch.setattr(step_end, "WAIT_S", 60.0)
    first, second = EpochEnds(0), EpochEnds(0)
    first.closed()
    waiting = threading.Thread(target=first.wait_for_all)
    waiting.start()
    assert waiting.is_alive()
    second.closed()
    waiting.join()


def test_a_rank_that_does_not_come_is_not_waited_for_without_end(store, monkeypatch):
    monkeypatch.setattr(step_end, "WAIT_S", 0.02)
    first = EpochEnds(0)
    first.closed()
    first.wait_for_all()


def test_within_an_epoch_nobody_is_waited_for(store, monkeypatch):
    monkeypatch.setattr(step_end, "WAIT_S", 1e9)
    first = EpochEnds(0)
    first.wait_for_all()
    first.closed()
    first.over()
    first.wait_for_all()


def test_a_lost_store_and_a_single_rank_stop_nothing(monkeypatch):
    questions = []

    class Lost:
        def add(self, key, count):
            questions.append(key)
            raise RuntimeError("connection reset")

    monkeypatch.setattr(step_end, "WAIT_S", 1e9)
    monkeypatch.setattr(step_end, "group_store", Lost)
    for world in (1, 2):
        monkeypatch.setattr(step_end, "rank_and_world", lambda world=world: (0, world))
        ends = EpochEnds(0)
        ends.closed()
        ends.wait_for_all()
        ends.closed()
    assert len(questions) == 1  # each further one would be a warning of torch's
