"""The policy that is told no curve: the same controller profiles model jobs, and the simulation
pays for it.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import mean, stdev

import pytest

from allocator import ScalingCurve
from jpa import MeasuredCurve
from malletrain.core.commands import Announce, KeepScalingModel
from malletrain.core.scaling_model import ScalingModel
from malletrain.core.settings import ControllerSettings, ProfilingSettings
from malletrain.sim.engine import Simulation
from malletrain.sim.model_jobs import NOISE, CostModel, Reports, SimRun
from malletrain.sim.nas import nas
from malletrain.sim.policies import POLICIES
from malletrain.sim.settings import SimSettings
from malletrain.sim.workloads import SimJob
from tests.malletrain.sim.conftest import trace_of

ALWAYS = ControllerSettings(profiling=ProfilingSettings(when_worth=False))
CURVE = ScalingCurve.of({1: 100.0, 2: 190.0, 4: 350.0, 6: 420.0})


class Listening(Simulation):
    """A simulation that remembers what the controller announced."""

    def __init__(self, *args):
        super().__init__(*args)
        self.announcements = []

    def _carry_out(self, command):
        if isinstance(command, Announce):
            self.announcements.append(command)
        return super()._carry_out(command)


def simulated(policy, jobs=1, samples=500_000.0):
    work = [
        SimJob(f"j{i}", 1, 6, samples, CURVE, stated_curve=CURVE, model=f"m{i}")
        for i in range(jobs)
    ]
    trace = trace_of({f"n{k}": [(0.0, 7200.0)] for k in range(6)}, 7200.0)
    simulation = Listening(trace, work, SimSettings(policy=POLICIES[policy], site=ALWAYS))
    return simulation, simulation.run()


def test_a_job_is_profiled_once_and_its_curve_is_the_true_one():
    world, _ = simulated("profiled")
    points = [a for a in world.announcements if a.kind == "profile-point"]
    assert [point.data["nodes"] for point in points] == [6, 5, 4, 3, 2, 1]
    learned = world.controller.jobs["j0"].scaling
    for k in (1, 2, 4, 6):
        assert learned.curve.estimate(k)[0] == pytest.approx(CURVE.at(k), rel=0.06)
    assert world.runs["j0"].ended_at is not None


def test_the_profile_is_paid_for_in_time():
    stated, _ = simulated("malletrain")
    profiled, _ = simulated("profiled")
    extra = profiled.runs["j0"].ended_at - stated.runs["j0"].ended_at
    assert 60 < extra < 240, "six sizes of five seconds and as many rescales of 12 to 18 s"
    assert not stated.announcements


def test_several_jobs_are_profiled_one_after_the_other_and_all_is_repeatable():
    one, _ = simulated("profiled", jobs=2)
    two, _ = simulated("profiled", jobs=2)
    first, second = ([(a.job, a.kind) for a in run.announcements] for run in (one, two))
    assert first == second
    assert {name: run.ended_at for name, run in one.runs.items()} == {
        name: run.ended_at for name, run in two.runs.items()
    }
    assert {a.job for a in one.announcements if a.kind == "profile-finished"} == {"j0", "j1"}


def test_reports_scatter_about_the_true_rate():
    job = SimJob("j", 1, 6, 1e9, CURVE)
    run, reports = SimRun(job, job.rates(), CostModel("freetrain")), Reports(seed=1)
    run.start(("a", "b"), 10.0)
    batches = [reports.report(run, 10.0 + 0.5 * k) for k in range(1, 401)]
    assert (batches[0][0].time, batches[0][0].samples) == (10.0, 0.0), "a round begins with nothing"
    last = [events[-1] for events in batches]
    assert last[-1].samples == pytest.approx(200 * 190.0, rel=0.01)
    assert {e.nodes for e in last} == {2}
    steps = [b.samples - a.samples for a, b in pairwise(last)]
    assert stdev(steps) / mean(steps) == pytest.approx(NOISE, rel=0.2)
    run.rescale(("a", "b", "c"), 300.0)
    assert reports.report(run, 300.5)[0].samples == 0.0, "and the next one again"


def test_an_undisturbed_job_reports_once_a_size():
    job = SimJob("j", 1, 6, 1e9, CURVE)
    run, reports = SimRun(job, job.rates(), CostModel("freetrain")), Reports(seed=1)
    run.start(("a", "b"), 0.0)
    due = reports.due(run, 0.0, profiled=False)
    assert reports.report(run, due)
    assert reports.due(run, due, profiled=False) is None
    run.rescale(("a", "b", "c"), due)
    assert reports.due(run, due, profiled=False) is not None
    assert reports.due(run, due, profiled=True) < reports.due(run, due, profiled=False)


def test_a_job_inherits_from_one_of_its_kind():
    """The second job of a model starts with the curve of the first, and is measured at fewer
    sizes.
    """
    trace = trace_of({f"n{k}": [(0.0, 7200.0)] for k in range(6)}, 7200.0)
    jobs = [
        SimJob(f"j{i}", 1, 6, 200_000.0, CURVE, model="m", submit_s=1000.0 * i) for i in range(2)
    ]
    world = Listening(
        trace, jobs, SimSettings(policy=POLICIES["malletrain"], max_running=1, site=ALWAYS)
    )
    r = world.run()
    points = [a.job for a in world.announcements if a.kind == "profile-point"]
    assert points.count("j0") == 6
    assert points.count("j1") < 6
    assert r.jobs_completed == 2


def test_a_job_believes_models_of_similar_size():
    jobs = nas(2, seed=1, samples=1e6, max_nodes=6)
    reports = Reports(seed=0)
    assert reports.described(jobs[0]) is None
    curve = MeasuredCurve()
    for k in (1, 2, 4, 6):
        curve = curve.with_measurement(k, jobs[0].curve.at(k), 1.0, 0.0)
    reports.keep(jobs[0], KeepScalingModel(jobs[0].name, ScalingModel(curve=curve, profiled=True)))
    suggested = reports.described(jobs[1])
    assert suggested.scaling.curve.estimate(6)[0] == pytest.approx(jobs[1].curve.at(6), rel=0.3)
    assert reports.described(jobs[1]) is None, "said once"
    assert reports.starts_with(jobs[1]) is None
    assert reports.starts_with(jobs[0]).curve.estimate(4)[0] == pytest.approx(
        jobs[0].curve.at(4), rel=0.01
    )


def test_a_curve_that_is_revealed_is_the_true_one_from_when_the_job_first_runs():
    job = SimJob("a", 1, 6, 1e6, CURVE, stated_curve=None)
    reports = Reports(0, revealed=True)
    suggested = reports.described(job)
    assert suggested is not None
    for nodes, rate in CURVE.points:
        estimate, std = suggested.scaling.curve.estimate(nodes)
        assert estimate == pytest.approx(rate, rel=1e-6)
        assert std == pytest.approx(0.0, abs=0.01 * rate)
    assert reports.described(job) is None, "said once"
    assert Reports(0).described(job) is None


def test_who_says_its_models_size_beforehand_begins_with_what_similar_ones_did():
    """The second of two alike jobs waits while the first trains, and is told before it runs."""
    jobs = nas(3, seed=1, samples=1e6, max_nodes=6)
    trace = trace_of({f"n{k}": [(0.0, 40000.0)] for k in range(6)}, 40000.0)
    began = {}
    for sized in (False, True):
        world = Simulation(
            trace,
            jobs,
            SimSettings(policy=POLICIES["profiled"], max_running=1, site=ALWAYS, sized=sized),
        )
        handled, first = world.controller.handle_all, {}

        def handle_all(events, now, handled=handled, world=world, first=first):
            commands = handled(events, now)
            for name, job in world.controller.jobs.items():
                if job.nodes:
                    first.setdefault(name, job.scaling.curve.current.prior is not None)
            return commands

        world.controller.handle_all = handle_all
        world.run()
        began[sized] = list(first.values())
    assert began == {False: [False] * 3, True: [False, True, True]}
