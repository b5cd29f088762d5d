"""The jobs of a sweep are one entry of the queue: one place, one turn of its owner's, one wait."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from malletrain.core.events import JobState, NodeJoined
from malletrain.core.gaps import Gaps
from malletrain.core.planning import Candidate
from malletrain.core.queueing import AdmissionQueue
from malletrain.core.state import SWEEP_END_S, ControllerState
from tests.malletrain.core.test_queueing import job


class ByWeight:
    """All parties weigh the same and none has had anything: shares are counted."""

    def weight(self, party):
        return 1.0

    def load(self, party, begun):
        return 0.0

    def patience(self, party):
        return 1.0


def queue(*jobs, max_running=2, turns=None):
    state = ControllerState()
    for spec in jobs:
        state.submit(spec)
    return state, AdmissionQueue(state, Gaps(), max_running, 100.0, turns)


def names(q, nodes=9):
    return [j.submitted.job for j in q.admitted({"default": nodes}, shared=True)]


def trial(name, owner="ann", sweep="ann:s", most=1):
    return job(name, 1, most, owner=owner, sweep=sweep)


def test_a_sweep_has_one_place_and_keeps_it():
    state, q = queue(
        trial("t0"), trial("t1"), job("b", owner="ann"), job("c", owner="ann"), max_running=2
    )
    assert names(q) == ["t0", "t1", "b"]
    state.end("t0", JobState.COMPLETED, 1.0)
    state.submit(trial("t2"))
    assert names(q) == ["t1", "t2", "b"], "the next trial stands where its sweep does"
    for name in ("t1", "t2"):
        state.end(name, JobState.COMPLETED, 2.0)
    assert names(q) == ["b", "c"]


def test_a_sweep_is_forgotten_a_while_after_its_last_trial():
    state, q = queue(trial("t0"), trial("u0", sweep="ann:r"), job("b", owner="ann"))
    state.end("t0", JobState.COMPLETED, 1.0)
    state.submit(trial("t1"))  # one after the other: the sweep stands where it stood
    assert names(q, 9)[0] == "t1"
    state.end("t1", JobState.CANCELLED, 2.0)
    state.end("b", JobState.COMPLETED, 2.0 + SWEEP_END_S - 1.0)
    assert set(state.sweeps) == {"ann:s", "ann:r"}
    state.end("u0", JobState.COMPLETED, 2.0 + SWEEP_END_S)
    assert set(state.sweeps) == {"ann:r"}
    state.submit(job("c", owner="ann"))
    state.submit(trial("u1", sweep="ann:r"))
    state.end("c", JobState.COMPLETED, 1e6)
    assert set(state.sweeps) == {"ann:r"}, "one of its jobs is there"
    state.end("u1", JobState.COMPLETED, 1e6)
    state.submit(job("d", owner="ann"))
    state.end("d", JobState.COMPLETED, 2e6)
    assert not state.sweeps


def test_no_more_trials_of_a_sweep_than_jobs_at_all():
    _, q = queue(*(trial(f"t{n}") for n in range(5)), job("b", owner="ann"), max_running=3)
    assert names(q) == ["t0", "t1", "t2", "b"]


@pytest.mark.parametrize("turns", [None, ByWeight()], ids=["in turn", "by shares"])
def test_all_trials_are_one_turn_of_their_owner(turns):
    _, q = queue(
        *(trial(f"t{n}") for n in range(3)),
        job("a", owner="ann"),
        job("b", 1, 3, owner="bob"),
        job("c", owner="bob"),
        max_running=3,
        turns=turns,
    )
    assert names(q) == ["t0", "t1", "t2", "b", "a"]


def test_sweeps_of_two_owners_are_two_entries():
    _, q = queue(trial("t0"), trial("u0", "bob", "bob:s"), trial("t1"), trial("u1", "bob", "bob:s"))
    assert names(q) == ["t0", "t1", "u0", "u1"]


def test_a_trial_does_not_starve_while_another_of_its_sweep_has_nodes():
    state, q = queue(trial("t0"), trial("t1"), trial("t2"), max_running=3)
    state.node_joined(NodeJoined("n0"), 0.0)
    q.notice(0.0)
    assert q.wakeups() == [100.0] * 3
    state.assign({"t0": ("n0",)}, 0.0)
    q.notice(500.0)
    assert not any(job.starving for job in state.jobs.values())
    assert q.wakeups() == []
    state.assign({"t0": ()}, 500.0)
    q.notice(1699.0)
    assert not any(job.starving for job in state.jobs.values()), "the sweep has had nodes"
    q.notice(1700.0)
    bidding = {name: Candidate(name, 1, 1, ()) for name in ("t0", "t1", "t2")}
    assert [c.job for c in q.starving(bidding, 1700.0)] == ["t0"], "one guarantee for all"
    state.assign({"t1": ("n0",)}, 1700.0)
    q.notice(1701.0)
    assert not any(job.starving for job in state.jobs.values())


OWNERS = ("ann", "bob")
JOBS = st.lists(
    st.tuples(st.sampled_from(OWNERS), st.sampled_from(["", "s", "r"])), min_size=1, max_size=12
)


@given(JOBS, st.integers(1, 6), st.booleans())
@settings(deadline=None)
def test_entries_keep_their_order_and_their_number(pairs, most, shares):
    jobs = [
        job(f"j{n}", owner=owner, sweep=f"{owner}:{sweep}" if sweep else "")
        for n, (owner, sweep) in enumerate(pairs)
    ]
    state, q = queue(*jobs, max_running=most, turns=ByWeight() if shares else None)
    admitted_jobs = [state.jobs[name] for name in names(q)]
    places = list(dict.fromkeys(j.place for j in admitted_jobs))
    entries = {j.place for j in state.unfinished.values()}
    assert len(places) == min(most, len(entries)), "no place is left empty"
    for place in places:
        mine = [j.order for j in state.unfinished.values() if j.place == place]
        assert [j.order for j in admitted_jobs if j.place == place] == mine[:most]
    for owner in OWNERS:
        mine = [p for p in places if pairs[p][0] == owner]
        assert mine == sorted(mine), "an owner's entries come in order"
