"""Random days of the controller: whatever happens, its promises hold; and when quiet returns,
everybody gets a turn.
"""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from allocator import ScalingCurve
from malletrain.core.events import (
    CurveChanged,
    JobCancelled,
    JobCompleted,
    JobSubmitted,
    LayoutDue,
    NodeLeaving,
    NodeRejected,
    RescaleFinished,
    RoundInterrupted,
    WorkersFailed,
)
from malletrain.core.settings import ControllerSettings, PlanningSettings
from tests.malletrain.core.controller_world import WORTHLESS, World

NODES = {f"n{i}": "gpu" if i >= 6 else "default" for i in range(9)}
STARVATION = 60.0
NEWS = [
    "finished",
    "finished",
    "finished",
    "broke",
    "interrupted",
    "curve",
    "worthless",
    "completed",
    "cancelled",
    "layout",
]


class ControllerMachine(RuleBasedStateMachine):
    """Each rule is something that happens; :class:`World` checks after each."""

    @initialize(
        max_running=st.integers(1, 4),
        interval=st.sampled_from([0.0, 7.0]),
        give_back=st.sampled_from([0.0, 3.0, 30.0]),
        horizon=st.sampled_from([0.0, 20.0]),
        owners=st.sampled_from([("",), ("alice", "bob"), ("", "alice", "bob")]),
    )
    def begin(self, max_running, interval, give_back, horizon, owners):
        self.owners = owners
        self.world = World(
            ControllerSettings(
                PlanningSettings(max_running=max_running, t_fwd_s=60.0),
                min_interval_s=interval,
                starvation_s=STARVATION,
                release_after_s=give_back,
                min_horizon_s=horizon,
                lease_wait_s=20.0,
                rejected_s=30.0,
                retry_window_s=50.0,
                reclaim_s=15.0,
                reclaim_every_s=20.0,
            ),
            NODES,
        )

    # --- time, the main scheduler ---

    @rule(seconds=st.sampled_from([0.0, 0.3, 1.0, 2.5, 10.0, 40.0]))
    def time_passes(self, seconds):
        self.world.run_until(self.world.now + seconds)

    @rule(
        nodes=st.sets(st.sampled_from(sorted(NODES))), horizon=st.sampled_from([None, 5.0, 500.0])
    )
    def gaps_change(self, nodes, horizon):
        w = self.world
        w.gaps = {n: (horizon, NODES[n]) for n in nodes}
        w.poll()

    @precondition(lambda self: self.world.pending)
    @rule(data=st.data(), up=st.integers(0, 4), put_off=st.booleans())
    def leases_come_up(self, data, up, put_off):
        w = self.world
        for node in data.draw(st.permutations(sorted(w.pending)))[: up or 1]:
            if up:
                w.come_up(node)
            elif put_off:
                w.put_off(node)
            else:
                w.refuse(node)

    @precondition(lambda self: self.world.leased)
    @rule(data=st.data(), in_s=st.sampled_from([0.0, 2.0, 30.0]))
    def node_leaves(self, data, in_s):
        w = self.world
        node = data.draw(st.sampled_from(sorted(w.leased)))
        if node not in w.leaving:
            w.leaving[node] = w.now + in_s
            w.do(NodeLeaving(node, in_s))

    @precondition(lambda self: self.world.leased)
    @rule(data=st.data(), leaver=st.booleans())
    def node_is_lost(self, data, leaver):
        w = self.world
        w.lose(data.draw(st.sampled_from(sorted(w.leaving if leaver and w.leaving else w.leased))))

    @precondition(lambda self: self.world.leased)
    @rule(data=st.data())
    def node_is_unfit(self, data):
        w = self.world
        node = data.draw(st.sampled_from(sorted(set(w.leased))))
        if node in w.leaving:
            return
        w.unfit_until[node, w.owner[node]] = w.now + w.settings.rejected_s
        for nodes in w.running.values():
            nodes.discard(node)
        w.do(NodeRejected(node))

    @rule()
    def daemon_is_killed(self):
        self.world.restart()

    # --- the jobs ---

    @precondition(lambda self: len(self.world.unfinished()) < 6)
    @rule(
        low=st.integers(1, 5),
        more=st.integers(0, 4),
        weight=st.sampled_from([1.0, 5.0]),
        sizes=st.sampled_from([None, None, (1, 2, 4, 8)]),
        profile=st.booleans(),
        data=st.data(),
    )
    def submit(self, low, more, weight, sizes, profile, data):
        w = self.world
        if sizes and not any(low <= k <= low + more for k in sizes):
            sizes = None
        owner = data.draw(st.sampled_from(self.owners))
        w.do(
            JobSubmitted(
                f"j{len(w.specs)}",
                low,
                low + more,
                weight=weight,
                sizes=sizes,
                profile=profile,
                owner=owner,
            )
        )

    @precondition(lambda self: self.world.specs)
    @rule(data=st.data(), what=st.sampled_from(NEWS))
    def job_news(self, data, what):
        """News of any job, late news of ended ones included."""
        w = self.world
        job = data.draw(st.sampled_from(sorted(w.specs)))
        if what == "finished":
            w.rescaling.pop(job, None)
            w.do(RescaleFinished(job))
        elif what == "broke":
            w.breaks[job] += 1
            w.do(WorkersFailed(job, "its script crashed"))
        elif what == "interrupted":
            w.do(RoundInterrupted(job))
        elif what == "layout":
            w.do(LayoutDue(job))
        elif what == "worthless":
            w.worthless.add(job)
            w.do(CurveChanged(job, WORTHLESS))
        elif what == "curve":
            w.worthless.discard(job)
            w.do(
                CurveChanged(
                    job,
                    ScalingCurve.of({1: 10.0, 2: data.draw(st.sampled_from([5.0, 19.0])), 4: 30.0}),
                )
            )
        elif what == "completed":
            w.do(JobCompleted(job))
        else:
            w.do(JobCancelled(job))

    # --- quiet returns ---

    def teardown(self):
        if not hasattr(self, "world"):
            return
        w = self.world
        w.gaps = {n: (None, c) for n, c in NODES.items()}
        reach = Counter(NODES.values())
        placed = w.placed(reach)
        began = w.now
        window = (len(placed) + 2) * (STARVATION + 40.0) + 60.0
        while w.now < began + window:
            self.quiet_step()
        for job in placed:
            assert w.controller.jobs[job].nodes or w.served.get(job, 0) > began, f"{job} starves"

    def quiet_step(self):
        w = self.world
        w.poll()
        w.run_until(w.now + 4.0)
        for node in list(w.leaving):
            w.lose(node)
        for node in list(w.pending):
            w.come_up(node)
        for job, since in list(w.rescaling.items()):
            if w.now - since > 6.0:
                w.finish(job)
        w.run_until(w.now + 14.0)


ControllerMachine.TestCase.settings = settings(
    max_examples=6, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestController = ControllerMachine.TestCase
