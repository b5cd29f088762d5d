"""The policy that is told no curve: the same controller profiles model jobs, and the simulation pays for it."""

from __future__ import annotations

import pytest

from allocator import ScalingCurve
from malletrain.events import Announce
from malletrain.sim.engine import SimSettings, Simulation
from malletrain.sim.policies import POLICIES
from malletrain.sim.reports import Reports
from malletrain.sim.workloads import SimJob
from tests.malletrain.sim.conftest import trace_of

CURVE = ScalingCurve.of({1: 100.0, 2: 190.0, 4: 350.0, 6: 420.0})


class Listening(Simulation):
    """A simulation that remembers what the controller announced."""

    def __init__(self, *args):
        super().__init__(*args)
        self.said = []

    def _carry_out(self, command):
        if isinstance(command, Announce):
            self.said.append(command)
        return super()._carry_out(command)


def simulated(policy, jobs=1, samples=500_000.0):
    work = [SimJob(f"j{i}", 1, 6, samples, CURVE) for i in range(jobs)]
    trace = trace_of({f"n{k}": [(0.0, 7200.0)] for k in range(6)}, 7200.0)
    made = Listening(trace, work, SimSettings(policy=POLICIES[policy]))
    return made, made.run()


def test_a_job_is_profiled_once_and_its_curve_is_the_true_one():
    world, _ = simulated("profiled")
    assert [a.data["nodes"] for a in world.said if a.kind == "profile-point"] == [6, 5, 4, 3, 2, 1]
    learned = world.controller.jobs["j0"].learned
    for k in (1, 2, 4, 6):
        assert learned.curve.estimate(k)[0] == pytest.approx(CURVE.at(k), rel=0.06)
    assert world.runs["j0"].ended_at is not None


def test_the_profile_is_paid_for_in_time():
    told, _ = simulated("malletrain")
    profiled, _ = simulated("profiled")
    extra = profiled.runs["j0"].ended_at - told.runs["j0"].ended_at
    assert 60 < extra < 240, "six sizes of five seconds and as many rescales of 12 to 18 s"
    assert not told.said


def test_several_jobs_are_profiled_one_after_the_other_and_all_is_repeatable():
    one, _ = simulated("profiled", jobs=2)
    two, _ = simulated("profiled", jobs=2)
    assert [(a.job, a.kind) for a in one.said] == [(a.job, a.kind) for a in two.said]
    assert {name: run.ended_at for name, run in one.runs.items()} == {name: run.ended_at for name, run in two.runs.items()}
    assert {a.job for a in one.said if a.kind == "profile-finished"} == {"j0", "j1"}


def test_reports_scatter_about_the_true_rate():
    reports = Reports()
    assert reports.begin("a", 1, 0.0)
    assert not reports.begin("a", 1, 0.0)
    last = None
    for k in range(1, 401):
        last = reports.progress("a", 2, 100.0, 0.5 * k)
    assert last.samples == pytest.approx(20_000, rel=0.05)
    assert last.nodes == 2
    reports.end("a")
    assert reports.begin("a", 1, 200.0)
