"""The owner of jobs and nodes: whatever its verbs are told, its invariants hold."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from malletrain.core.commands import Rescale, Start, Suspend
from malletrain.core.events import JobState, JobSubmitted, NodeJoined
from malletrain.core.state import ControllerState
from tests.draws import cases


def state(*nodes, jobs=("a", "b")):
    state = ControllerState(release_after_s=30.0)
    for name in jobs:
        state.submit(JobSubmitted(name, 1, 4))
    for name in nodes:
        state.node_joined(NodeJoined(name), 0.0)
    return state


def test_assigning_says_what_is_to_be_done_in_order():
    s = state("n0", "n1", "n2")
    assert s.assign({"a": ("n0", "n1"), "b": ("n2",)}, 1.0) == [
        Start("a", ("n0", "n1")),
        Start("b", ("n2",)),
    ]
    assert s.idle == set()
    assert s.assign({"a": ("n0",)}, 2.0) == [Rescale("a", ("n0",))]
    assert (s.idle, s.nodes["n1"].review_at) == ({"n1"}, 32.0)
    assert s.assign({"b": ()}, 3.0) == [Suspend("b")]
    assert (s.jobs["b"].state, s.jobs["b"].idle_since) == (JobState.SUSPENDED, 3.0)


def test_a_node_that_is_given_up_has_nothing_that_would_be_lost_with_it():
    s = state("n0", "n1")
    s.assign({"a": ("n0", "n1")}, 1.0)
    s.nodes_busy(s.jobs["a"], {"n0"})
    s.data_cached(s.jobs["a"], {"n1": 60.0})
    assert [(n.info.busy, n.info.reread_s) for n in s.nodes.values()] == [(True, 0), (False, 60)]
    s.assign({"a": ()}, 2.0)
    assert [(n.busy, n.reread_s) for n in s.usable.values()] == [(False, 0), (False, 0)]


def test_nodes_change_hands_at_one_instant():
    s = state("n0", "n1")
    s.assign({"a": ("n0",), "b": ("n1",)}, 1.0)
    s.assign({"a": ("n1",), "b": ("n0",)}, 2.0)
    assert {name: node.job for name, node in s.nodes.items()} == {"n0": "b", "n1": "a"}
    assert s.idle == set()


@pytest.mark.parametrize("node", ["n0", "n1", "n9"])
def test_a_node_of_another_job_that_leaves_or_that_is_not_there_is_not_given(node):
    s = state("n0", "n1")
    s.assign({"b": ("n0",)}, 1.0)
    s.node_leaving("n1", 20.0)
    with pytest.raises(ValueError, match=f"Node {node} cannot be given to job a"):
        s.assign({"a": (node,)}, 2.0)


def test_a_move_off_a_node_that_leaves_has_a_deadline_and_was_not_chosen():
    s = state("n0", "n1")
    s.assign({"a": ("n0", "n1")}, 1.0)
    assert s.node_leaving("n1", 20.0), "a job has it"
    assert s.assign({"a": ("n0",)}, 5.0) == [Rescale("a", ("n0",), within_s=15.0)]
    assert "n1" not in s.idle
    assert s.rescaled(s.jobs["a"], 8.0)
    assert s.jobs["a"].rescaled_at < 0, "only what was chosen counts"
    assert not s.rescaled(s.jobs["a"], 9.0), "that is no news"


@pytest.mark.parametrize("breaks", [True, False])
def test_who_loses_a_node_is_broken_unless_its_rounds_go_on(breaks):
    s = state("n0", "n1")
    s.assign({"a": ("n0", "n1")}, 1.0)
    assert s.node_gone("n0", breaks=breaks) is s.jobs["a"]
    assert (s.jobs["a"].nodes, s.jobs["a"].broken) == (("n1",), breaks)
    assert s.node_gone("n0") is None, "late news"


def test_a_node_that_comes_with_its_job_is_that_jobs_if_it_is_its_owners():
    s = state()
    s.node_joined(NodeJoined("n0", job="a"), 0.0)
    s.node_joined(NodeJoined("n1", job="a", owner="bob"), 0.0)
    s.node_joined(NodeJoined("n2", job="never heard of"), 0.0)
    assert s.jobs["a"].nodes == ("n0",)
    assert s.idle == {"n1", "n2"}
    assert s.jobs["a"].broken, "it was queued: its start is carried out again"
    assert s.at_work["a"] is s.jobs["a"]


def test_the_earliest_plan_counts():
    s = state()
    for at in (5.0, 3.0, 4.0):
        s.plan_soon(at)
    assert s.plan_at == 3.0


def test_failures_far_apart_do_not_add_up_and_some_do_not_count():
    s = state()
    job = s.jobs["a"]
    for now, counts, tries in ((0.0, True, 1), (50.0, False, 1), (90.0, True, 2), (191.0, True, 1)):
        s.workers_failed(job, now, 100.0, counts=counts)
        assert job.tries == tries


NODES = [f"n{k}" for k in range(6)]
JOBS = ["a", "b", "c"]


class StateMachine(RuleBasedStateMachine):
    """Verbs in any order."""

    def __init__(self):
        super().__init__()
        self.s = state(jobs=JOBS)
        self.now = 0.0

    @rule(
        node=st.sampled_from(NODES),
        owner=st.sampled_from(["", "bob"]),
        job=st.sampled_from([None, *JOBS]),
    )
    def joins(self, node, owner, job):
        self.s.node_gone(node)
        self.s.node_joined(NodeJoined(node, job=job, owner=owner), self.now)

    @precondition(lambda self: self.s.nodes)
    @rule(data=st.data(), leaves=st.booleans())
    def goes(self, data, leaves):
        node = data.draw(st.sampled_from(sorted(self.s.nodes)))
        if leaves:
            self.s.node_leaving(node, self.now + 10.0)
        else:
            self.s.node_gone(node)

    @precondition(lambda self: self.s.unfinished)
    @rule(data=st.data())
    def is_assigned(self, data):
        """Some of the jobs divide their own and the idle nodes among themselves."""
        s = self.s
        jobs = data.draw(st.lists(st.sampled_from(sorted(s.unfinished)), min_size=1, unique=True))
        free = s.idle | {n for job in jobs for n in s.jobs[job].nodes if n in s.usable}
        owner = st.sampled_from([None, *jobs])
        owner_of = {node: data.draw(owner) for node in sorted(free)}
        self.now += 1.0
        s.plan_made()
        s.assign({job: tuple(n for n in owner_of if owner_of[n] == job) for job in jobs}, self.now)

    @precondition(lambda self: self.s.unfinished)
    @rule(data=st.data())
    def ends(self, data):
        self.s.end(
            data.draw(st.sampled_from(sorted(self.s.unfinished))), JobState.COMPLETED, self.now
        )

    @invariant()
    def job_and_node_agree(self):
        pairs = [(node, name) for name, job in self.s.jobs.items() for node in job.nodes]
        assert len({node for node, _ in pairs}) == len(pairs), "a node belongs to two jobs"
        assert dict(pairs) == {n: node.job for n, node in self.s.nodes.items() if node.job}

    @invariant()
    def sets_and_counts_are_true(self):
        s = self.s
        stays = {name: node for name, node in s.nodes.items() if node.gone_at is None}
        assert set(s.usable) == set(stays)
        assert s.idle == {name for name, node in stays.items() if node.job is None}
        assert +s.usable_by_pool == Counter(node.pool for node in stays.values())
        assert all(s.usable[name].pool == node.pool for name, node in stays.items())

    @invariant()
    def who_has_nodes_is_at_work_and_not_over(self):
        for name, job in self.s.jobs.items():
            assert not job.nodes or (self.s.at_work[name] is job and not job.state.ended)
            assert (name in self.s.unfinished) == (not job.state.ended)


StateMachine.TestCase.settings = settings(
    max_examples=cases(40), stateful_step_count=30, deadline=None
)
TestState = StateMachine.TestCase
