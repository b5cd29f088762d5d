"""No plan gives the jobs under one limit more nodes than it, and little of a limit is wasted."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from allocator import ScalingCurve
from malletrain.core.controller import Controller
from malletrain.core.events import (
    JobCompleted,
    JobSubmitted,
    NodeJoined,
    NodeLost,
    Quota,
    RescaleFinished,
    Tick,
)
from malletrain.core.settings import ControllerSettings, PlanningSettings, ProfilingSettings
from tests.draws import cases

ANN, BOB, LAB = Quota("user ann", 4), Quota("user bob", 6), Quota("account lab", 7)
UNDER = {"ann": (ANN, LAB), "bob": (BOB, LAB), "eve": ()}


class Machine:
    """A controller of nodes that are never preempted, whose jobs train at once."""

    def __init__(self, nodes=12, **more):
        planning = PlanningSettings(t_fwd_s=600.0)
        self.controller = Controller(ControllerSettings(planning, min_interval_s=0.0, **more))
        self.now = 0.0
        for k in range(nodes):
            self.do(NodeJoined(f"n{k}"))

    def do(self, event):
        for command in self.controller.handle(event, self.now):
            if hasattr(command, "nodes") and hasattr(command, "job"):
                self.controller.handle(RescaleFinished(command.job), self.now)

    def submit(self, job, user, least=1, most=8, **more):
        curve = ScalingCurve.of((k, 10.0 * k) for k in range(1, most + 1))
        more.setdefault("curve", curve)
        self.do(JobSubmitted(job, least, most, quotas=UNDER[user], **more))

    def settle(self, seconds=10.0):
        end = self.now + seconds
        while (due := self.controller.next_wakeup()) is not None and due <= end:
            self.now = max(self.now, due)
            self.do(Tick())
        self.now = end

    def used(self):
        """Nodes of all jobs under each limit, and of those under none."""
        counts = Counter()
        for job in self.controller.state.unfinished.values():
            for quota in job.submitted.quotas or (None,):
                counts[quota] += len(job.nodes)
        return counts


def test_one_users_jobs_share_the_limit():
    m = Machine()
    m.submit("a", "ann")
    m.settle()
    assert m.used() == {ANN: 4, LAB: 4}
    m.submit("b", "ann")
    m.settle()
    assert [len(j.nodes) for j in m.controller.jobs.values()] == [2, 2]
    m.do(JobCompleted("a"))
    m.settle()
    assert m.used() == {ANN: 4, LAB: 4}


def test_an_account_bounds_its_users_together_and_nobody_else():
    m = Machine()
    m.submit("a", "ann")
    m.submit("b", "bob")
    m.submit("e", "eve")
    m.settle()
    used = m.used()
    assert used[LAB] == 7
    assert used[ANN] <= 4
    assert used[None] == 5, "what is left of twelve"


def test_a_job_that_the_limit_has_no_room_for_waits_and_says_why():
    m = Machine()
    m.submit("a", "ann", least=3)
    m.submit("b", "ann", least=3)
    m.settle()
    assert [len(j.nodes) for j in m.controller.jobs.values()] == [4, 0]
    assert m.controller.quotas.full(m.controller.jobs["b"]) == ANN
    m.settle(700.0)
    assert len(m.controller.jobs["b"].nodes) >= 3, "it starved, and its turn came"
    assert m.used()[ANN] <= 4


def test_a_profile_waits_until_its_largest_size_fits_beside_the_others():
    m = Machine(profiling=ProfilingSettings(when_worth=False))
    m.submit("a", "ann", most=2)
    m.settle()
    m.submit("b", "ann", most=4, curve=None, profile=True)
    m.settle()
    assert m.used()[ANN] <= 4
    assert not m.controller.profiles.holds(m.controller.jobs["b"])
    m.do(JobCompleted("a"))
    m.settle(120.0)
    assert m.controller.profiles.holds(m.controller.jobs["b"])


steps = st.lists(
    st.tuples(
        st.sampled_from(["submit", "end", "lose", "join", "wait"]),
        st.sampled_from(["ann", "bob", "eve"]),
        st.integers(1, 5),
        st.integers(0, 6),
    ),
    max_size=25,
)


@settings(max_examples=cases(60), deadline=None)
@given(steps)
def test_no_limit_is_ever_exceeded(steps):
    m = Machine()
    for number, (what, user, least, more) in enumerate(steps):
        if what == "submit":
            m.submit(f"j{number}", user, least, least + more)
        elif what == "end" and m.controller.state.unfinished:
            m.do(JobCompleted(next(iter(m.controller.state.unfinished))))
        elif what == "lose":
            m.do(NodeLost(f"n{more}"))
        elif what == "join":
            m.do(NodeJoined(f"n{more}"))
        m.settle(400.0 if what == "wait" else 10.0)
        for quota, used in m.used().items():
            assert quota is None or used <= quota.nodes
