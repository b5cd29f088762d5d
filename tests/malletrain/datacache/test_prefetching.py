"""What is fetched in advance: in the order of the sampler, once, and never more than is planned."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malletrain import ElasticSampler
from malletrain.datacache.cache import SamplePrefetcher
from malletrain.training.epoch_plan import EpochPlan, UpcomingBatch, upcoming_batches
from tests.waiting import PATIENCE_S, until

# --- the plan ---


def test_a_known_answer_over_the_end_of_an_epoch():
    plan = EpochPlan(10, 4, 2, 2)
    orders = {0: list(range(10)), 1: list(range(9, -1, -1))}
    assert upcoming_batches(plan, orders.__getitem__, 1, 0, 4, 3) == [
        UpcomingBatch(0, 4, (6, 7)),
        UpcomingBatch(0, 8, (9,)),
        UpcomingBatch(1, 0, (7, 6)),
    ]
    assert upcoming_batches(plan, orders.__getitem__, 0, 0, 0, 0) == []


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 4), st.booleans(), st.integers(0, 3))
def test_the_plan_is_what_the_sampler_yields(samples, batch, ranks, drop_last, seed):
    if samples < ranks or batch < ranks or (drop_last and samples < batch):
        return
    for rank in range(ranks):
        sampler = ElasticSampler(
            samples,
            global_batch_size=batch,
            rank=rank,
            world_size=ranks,
            drop_last=drop_last,
            seed=seed,
        )
        planned = [list(ahead.samples) for ahead in sampler.unread_batches(50)]
        yielded = []
        while len(yielded) < 50:
            for indices in sampler:
                yielded.append(indices)
                sampler.advance()
        assert planned == yielded[:50]


def test_the_plan_begins_behind_what_the_loader_has_requested():
    sampler = ElasticSampler(12, global_batch_size=2, shuffle=False, rank=0, world_size=1)
    batches = iter(sampler)
    next(batches)
    next(batches)
    assert [b.samples for b in sampler.unread_batches(2)] == [(4, 5), (6, 7)]
    sampler.set_position(0, 2)  # as after a restore
    assert [b.samples for b in sampler.unread_batches(1)] == [(2, 3)]
    sampler = ElasticSampler(
        12, global_batch_size=4, shuffle=False, rank=0, world_size=1, max_world_size=2
    )
    sampler.resize(1, 2)
    assert [b.samples for b in sampler.unread_batches(1)] == [(2, 3)]


@pytest.mark.parametrize(("drop_last", "coverage"), [(False, 1.0), (True, 0.8)])
def test_the_coverage_of_an_epoch(drop_last, coverage):
    sampler = ElasticSampler(10, global_batch_size=4, drop_last=drop_last, rank=0, world_size=1)
    assert sampler.coverage == pytest.approx(coverage)


# --- the thread ---


class Fetches:
    """A fetch that a test lets go on."""

    def __init__(self):
        self.requests, self.gate = [], threading.Semaphore(0)
        self.prefetcher = SamplePrefetcher(self)

    def __call__(self, samples):
        self.requests.append(tuple(samples))
        assert self.gate.acquire(timeout=PATIENCE_S)
        return {sample: f"data {sample}" for sample in samples if sample < 100}

    def close(self):
        for _ in range(100):
            self.gate.release()
        self.prefetcher.close()


@pytest.fixture
def fetches():
    made = Fetches()
    yield made
    made.close()


def test_batches_are_fetched_in_order_and_each_sample_once(fetches):
    fetches.prefetcher.plan([(1, 2), (2, 3), (4,)])
    until(lambda: fetches.requests == [(1, 2)], "the first batch is requested")
    fetches.prefetcher.plan([(1, 2), (2, 3), (4,)])
    for _ in range(3):
        fetches.gate.release()
    until(lambda: len(fetches.requests) == 3, "all are requested")
    assert fetches.requests == [(1, 2), (3,), (4,)]
    assert fetches.prefetcher.take([4, 2]) == {2: "data 2", 4: "data 4"}
    assert fetches.prefetcher.take([2]) == {}  # it is the caller's


def test_the_caller_waits_for_a_sample_in_flight_and_not_for_one_that_is_only_planned(fetches):
    fetches.prefetcher.plan([(1, 2), (3,)])
    until(lambda: fetches.requests == [(1, 2)], "the first batch is requested")
    assert fetches.prefetcher.take([3]) == {}
    taken = []
    caller = threading.Thread(target=lambda: taken.append(fetches.prefetcher.take([1])))
    caller.start()
    fetches.gate.release()
    caller.join(PATIENCE_S)
    assert taken == [{1: "data 1"}]
    assert fetches.requests == [(1, 2)]  # nobody fetches sample 3 any more


def test_what_is_no_longer_planned_is_dropped_and_what_is_absent_is_not_asked_again(fetches):
    fetches.prefetcher.plan([(1, 200)])
    fetches.gate.release()
    until(lambda: fetches.prefetcher.idle, "the sample is there")
    fetches.prefetcher.plan([(200,), (5,)])
    until(lambda: len(fetches.requests) == 2, "the next is requested")
    assert fetches.requests == [(1, 200), (5,)]
    assert fetches.prefetcher.take([1]) == {}


def test_a_fetch_that_fails_wakes_the_caller(fetches, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    begun, go = threading.Event(), threading.Event()

    def fail(samples):
        begun.set()
        assert go.wait(PATIENCE_S)
        raise RuntimeError("a defect")

    prefetcher = SamplePrefetcher(fail)
    prefetcher.plan([(1,)])
    assert begun.wait(PATIENCE_S)
    taken = []
    caller = threading.Thread(target=lambda: taken.append(prefetcher.take([1])))
    caller.start()
    go.set()
    caller.join(PATIENCE_S)
    assert taken == [{}]
