"""Random days of a controller that profiles its jobs: what holds without profiles holds with them,
and one profile disturbs one job.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, precondition, rule

from malletrain.core.commands import Announce, KeepScalingModel, Rescale
from malletrain.core.events import (
    JobState,
    JobSubmitted,
    Progressed,
    RescaleCostMeasured,
    RescaleFinished,
    WorkersStarted,
)
from malletrain.core.scaling_model import ScalingModel
from malletrain.core.settings import (
    ControllerSettings,
    PlanningSettings,
    ProfilingSettings,
    advisor_config,
)
from tests.draws import cases
from tests.malletrain.core.controller_world import World
from tests.malletrain.core.test_controller_machine import NODES, STARVATION, ControllerMachine


class ProfilingWorld(World):
    """As :class:`World`; of the curves a restarted daemon has those that were stored."""

    def __init__(self, config, classes):
        super().__init__(config, classes)
        self.scaling_models = {}
        self.interrupted = {}

    def carry_out(self, command):
        if isinstance(command, KeepScalingModel):
            again = ScalingModel.from_dict(command.scaling.to_dict(), command.scaling.costs)
            assert again.to_dict() == command.scaling.to_dict()
            self.scaling_models[command.job] = again
        elif isinstance(command, Announce) and command.kind == "nodes-donated":
            before = len(self.running[command.job])
            assert command.data["before"] == before
            assert max(1, self.specs[command.job].min_nodes) <= command.data["nodes"] < before
            quiet = self.settings.profiling.advisor.donor_quiet_s
            assert self.now - self.interrupted.get(command.job, -1e9) >= quiet, (
                "it was interrupted a moment ago"
            )
            self.interrupted[command.job] = self.now
        else:
            super().carry_out(command)

    def restart(self):
        super().restart()
        self.interrupted.clear()

    def check(self, commands):
        super().check(commands)
        controller = self.controller
        active = controller.profiles.profiler.profiling
        profiling = [
            name for name, record in controller.jobs.items() if record.state is JobState.PROFILING
        ]
        assert profiling in ([], [active])
        interrupted = [c for c in commands if isinstance(c, Announce) and c.kind == "nodes-donated"]
        assert len(interrupted) <= 1, "one donor at a time"
        for record in controller.jobs.values():
            assert not (
                record.nodes
                and not record.rescaling
                and len(record.nodes) in record.scaling.curve.unusable
                and record.sizes
            ), "a job stays at a size it cannot use"


class ProfilingMachine(ControllerMachine):
    """The controller's machine with profiles, and jobs that make progress."""

    @initialize(
        max_running=st.integers(1, 4),
        interval=st.sampled_from([0.0, 7.0]),
        give_back=st.sampled_from([0.0, 3.0, 30.0]),
        horizon=st.sampled_from([0.0, 20.0]),
        owners=st.sampled_from([("",), ("alice", "bob")]),
    )
    def begin(self, max_running, interval, give_back, horizon, owners):
        self.owners = owners
        advisor = advisor_config(
            max_profile_s=30.0,
            rescale_timeout_s=8.0,
            max_time_s=6.0,
            min_time_s=2.0,
            max_wait_for_nodes_s=5.0,
            donor_quiet_s=9.0,
        )
        self.world = ProfilingWorld(
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
                profiling=ProfilingSettings(
                    advisor, window_s=5.0, lease_patience_s=1.0, silence_s=4.0, again_s=20.0
                ),
            ),
            NODES,
        )

    @precondition(lambda self: len(self.world.unfinished()) < 6)
    @rule(
        low=st.integers(1, 5),
        more=st.integers(0, 4),
        sizes=st.sampled_from([None, None, (1, 2, 4, 8)]),
        profile=st.sampled_from([True, True, False]),
        data=st.data(),
    )
    def submit(self, low, more, sizes, profile, data):
        w = self.world
        if sizes and not any(low <= k <= low + more for k in sizes):
            sizes = None
        owner = data.draw(st.sampled_from(self.owners))
        w.do(
            JobSubmitted(
                f"j{len(w.specs)}", low, low + more, sizes=sizes, profile=profile, owner=owner
            )
        )

    @precondition(lambda self: any(self.world.running.values()))
    @rule(
        data=st.data(),
        reports=st.sampled_from([1, 12, 40]),
        rate=st.sampled_from([0.0, 30.0, 90.0]),
        every=st.sampled_from([0.2, 0.5, 2.0]),
        batch=st.sampled_from([8.0, 8.0, 16.0]),
    )
    def job_trains(self, data, reports, rate, every, batch):
        """The job comes up at its scale and reports for a while, at a steady rate."""
        w = self.world
        running = sorted(name for name, job_nodes in w.running.items() if job_nodes)
        job = data.draw(st.sampled_from(running))
        w.do(WorkersStarted(job))
        w.rescaling.pop(job, None)
        w.do(RescaleFinished(job))
        w.do(
            RescaleCostMeasured(
                job, data.draw(st.sampled_from(["up", "down", "start", "loss"])), 2.0
            )
        )
        began = w.now
        for k in range(1, reports + 1):
            w.run_until(w.now + every)
            nodes = len(w.running.get(job, ()))
            if w.log and any(isinstance(c, Rescale) and c.job == job for c in w.log[-1][2]):
                return  # a report of the round before does not count in the next
            w.do(Progressed(job, nodes, w.now, rate * (w.now - began) + 1e-6 * k, batch))


ProfilingMachine.TestCase.settings = settings(
    max_examples=cases(25),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestProfiling = ProfilingMachine.TestCase
del ControllerMachine
