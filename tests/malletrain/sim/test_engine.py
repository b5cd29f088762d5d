"""The virtual world: small scenes by hand, and what must hold in any."""

from __future__ import annotations

import math
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest

from allocator import RescaleCost, ScalingCurve
from malletrain.core.commands import Rescale
from malletrain.core.events import JobCompleted
from malletrain.core.settings import ControllerSettings, PlanningSettings
from malletrain.sim.engine import Simulation, simulate
from malletrain.sim.model_jobs import CostModel
from malletrain.sim.policies import POLICIES
from malletrain.sim.settings import SimSettings
from malletrain.sim.workload_files import read_curves
from malletrain.sim.workloads import SimJob, WorkloadError, hpo
from scavenger.trace import synthesis
from scavenger.trace.files import read, read_names
from scavenger.trace.trace import Trace
from tests.malletrain.sim.conftest import job, shared, trace_of

pytestmark = pytest.mark.slow

FOUR = {f"n{k}": [(0.0, 1000.0)] for k in range(4)}


def play(gaps, jobs, duration=1000.0, policy="malletrain", semantics="real", **more):
    costs = CostModel(
        semantics, **{k: more.pop(k) for k in list(more) if k in CostModel.__dataclass_fields__}
    )
    return simulate(trace_of(gaps, duration), jobs, SimSettings(POLICIES[policy], costs, **more))


def honest(name, points, most=4):
    curve = ScalingCurve.of(points)
    return SimJob(name, 1, most, 1e9, curve, stated_curve=curve)


class TestScenes:
    def test_one_job_on_four_nodes_that_stay(self):
        """Nodes are there at 0, the plan is made one settle time later, and the job trains when it
        has started.
        """
        r = play(FOUR, [job()], start_s=20.0)
        assert r.samples == pytest.approx((1000 - 1 - 20) * 40)
        assert r.start_loss == pytest.approx(20 * 40)
        assert r.ideal_samples == pytest.approx(1000 * 40)
        assert (r.starts, r.rescales, r.preemptions, r.equivalent_nodes) == (1, 0, 0, 4.0)
        assert r.harvested_fraction == pytest.approx(0.979)
        assert r.start_fraction == pytest.approx(0.02)

    @pytest.mark.parametrize(
        ("rules", "foresight", "nodes"),
        [
            ({}, "none", 4),
            ({"max_leases_per_owner": 3}, "none", 3),
            ({"min_charge_s": 100.0}, "age", 4),
            ({"min_charge_s": 36_000.0}, "age", 0),
        ],
    )
    def test_the_sites_rules_about_leases_hold_here_too(self, rules, foresight, nodes):
        """Gaps are expected to last about 20 minutes, as long as none was seen to end."""
        settings = {"site": ControllerSettings(**rules), "sample_s": 100.0, "foresight": foresight}
        one = Simulation(trace_of(FOUR, 1000.0), [job()], SimSettings(**settings))
        one.run()
        assert {busy for _, _, busy in one.series[1:]} == {nodes}

    def test_starting_is_free_in_freetrains_world(self):
        assert play(FOUR, [job()], semantics="freetrain").samples == pytest.approx(40000, abs=1)

    def test_a_node_lost_without_notice(self):
        """At 500 one of four nodes is taken: work since the snapshot at 481 (20 + 1 + 60k) is lost,
        and the pause is 12 s and the time until a loss is planned for.
        """
        gaps = {**FOUR, "n3": [(0.0, 500.0)]}
        r = play(gaps, [job()], start_s=20.0, snapshot_every_s=60.0, down_s=12.0)
        trained = (500 - 21) - (500 - 21) % 60
        pause = 12 + ControllerSettings.idle_debounce_s
        assert r.samples == pytest.approx(trained * 40 + (500 - pause) * 30)
        assert r.preemption_loss == pytest.approx(((500 - 21) % 60) * 40 + pause * 30)
        assert (r.preemptions, r.rescales) == (1, 0)

    def test_a_node_lost_with_notice(self):
        gaps = {**FOUR, "n3": [(0.0, 500.0)]}
        r = play(gaps, [job()], start_s=20.0, notice_s=30.0, down_s=12.0)
        wait = ControllerSettings.notice_debounce_s
        assert r.samples == pytest.approx((500 + wait - 21) * 40 + (500 - wait - 12) * 30)
        assert r.preemption_loss == pytest.approx(12 * 40)
        assert r.harvested_fraction * r.equivalent_nodes * 1000 == pytest.approx(
            (500 - 21) * 4 + wait * 3 + (500 - wait - 12) * 3
        )

    def test_live_mode_loses_a_step(self):
        gaps = {**FOUR, "n3": [(0.0, 500.0)]}
        r = play(gaps, [job()], start_s=20.0, mode="live", step_s=0.5, down_s=2.0)
        pause = 2 + ControllerSettings.idle_debounce_s
        assert r.samples == pytest.approx((500 - 21 - 0.5) * 40 + (500 - pause) * 30)

    def test_a_node_that_comes_back_before_it_has_left(self):
        """Taken at 500 with 30 s of notice and idle again at 510: it is a gap again when it has
        left, at 530.
        """
        gaps = {"n0": [(0.0, 500.0), (510.0, 1000.0)]}
        r = play(gaps, [job()], start_s=0.0, notice_s=30.0)
        assert r.preemptions == 1
        assert r.starts == 2
        wait = ControllerSettings.notice_debounce_s
        assert r.samples == pytest.approx((500 + wait - 1) * 10 + (1000 - 531) * 10)

    def test_a_lease_takes_its_time(self):
        r = play(FOUR, [job()], start_s=0.0, lease_delay_s=100.0)
        assert r.samples == pytest.approx((1000 - 101) * 40)

    def test_a_gap_that_is_over_before_the_lease_is_there(self):
        r = play({"n0": [(0.0, 50.0), (300.0, 1000.0)]}, [job()], start_s=0.0, lease_delay_s=100.0)
        assert r.samples == pytest.approx((1000 - 401) * 10)

    def test_jobs_come_when_they_are_submitted_and_end_when_they_are_done(self):
        jobs = [job("a", samples=4000.0), job("b", samples=4000.0, submit_s=300.0)]
        r = play(FOUR, jobs, start_s=0.0)
        assert (r.jobs_completed, r.samples) == (2, 8000.0)
        assert r.hours * 3600 == pytest.approx(300 + 1 + 100)
        assert r.mean_job_hours * 3600 == pytest.approx(100.0)
        assert r.mean_wait_hours * 3600 == pytest.approx(1.0)

    def test_no_more_jobs_at_a_time_than_allowed(self):
        jobs = [job(k, samples=4000.0, most=1) for k in "abcd"]
        assert play(FOUR, jobs, start_s=0.0, max_running=2).hours * 3600 == pytest.approx(
            2 * (400 + 1)
        )

    def test_equal_shares_ignore_curves(self):
        flat, steep = honest("flat", {1: 10.0, 4: 10.0}), honest("steep", {1: 10.0, 4: 40.0})
        fair = play(FOUR, [flat, steep], policy="equal", semantics="freetrain").samples
        best = play(FOUR, [flat, steep], semantics="freetrain").samples
        first = play(FOUR, [flat, steep], policy="fcfs", semantics="freetrain").samples
        assert [fair, best, first] == pytest.approx([30000, 40000, 10000], abs=1)

    def test_freetrain_believes_what_owners_say(self):
        lied = SimJob(
            "lied",
            1,
            4,
            1e9,
            ScalingCurve.of({1: 10.0, 4: 10.0}),
            stated_curve=ScalingCurve.of({1: 10.0, 4: 400.0}),
        )
        deceived = play(
            FOUR, [lied, job("honest", most=4)], policy="freetrain", semantics="freetrain"
        )
        assert deceived.samples == pytest.approx(10000, abs=1)
        measured = play(
            FOUR, [lied, job("honest", most=4)], policy="profiled", semantics="freetrain"
        )
        assert measured.samples > 30000
        assert deceived.profiles == 0 < measured.profiles

    def test_a_starving_job_gets_its_minimum(self):
        slow = honest("slow", {1: 1.0, 2: 1.0}, most=1)
        crowd = [slow, *(job(f"fast{k}", most=4) for k in range(1))]
        waits = play(FOUR, crowd, starvation_s=math.inf, semantics="freetrain")
        gets = play(FOUR, crowd, starvation_s=300.0, semantics="freetrain")
        assert waits.starts == 1
        assert gets.starts == 2
        assert gets.samples < waits.samples
        assert waits.longest_wait_hours * 3600 == pytest.approx(1000.0, abs=2)
        assert gets.longest_wait_hours * 3600 == pytest.approx(400.0, abs=2), "after its turn"

    def test_a_job_that_never_fits_waits(self):
        big = job("big", min_nodes=5)
        r = play({**FOUR, "n9": []}, [big, job("small")], semantics="freetrain")
        assert r.samples == pytest.approx(40000, abs=1)
        assert r.jobs_completed == 0
        assert r.ideal_samples == pytest.approx(40000)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"jobs": []}, "no job to simulate"),
        ({"jobs": [job("x"), job("x")]}, "same name"),
        ({"jobs": [job("x", most=9, min_nodes=9)]}, "more than the 4 nodes"),
        ({"trace": trace_of({"n0": []}, 10.0)}, "never idle|ever idle"),
        ({"trace": Trace.validated([], [], [], [], 0.0)}, "ever idle"),
    ],
)
def test_nothing_to_simulate_is_said(change, says):
    with pytest.raises(WorkloadError, match=says):
        simulate(change.get("trace", trace_of(FOUR, 1000.0)), change.get("jobs", [job()]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_running": 0},
        {"t_fwd_s": 0.0},
        {"t_fwd_s": math.nan},
        {"lease_delay_s": -1.0},
        {"hours": 0.0},
        {"starvation_s": 0.0},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(WorkloadError):
        SimSettings(**wrong)


class Checked(Simulation):
    """A simulation that compares the controller's books with its own after every step."""

    def _tell(self, events):
        super()._tell(events)
        leased = self._leased - self._leaving
        assert set(self.controller.nodes) - set(self._leaving) == leased
        jobs_per_node = Counter(name for run in self.runs.values() for name in run.nodes)
        assert all(number == 1 for number in jobs_per_node.values()), "a node runs two jobs"
        assert set(jobs_per_node) == set(self._holder)
        assert set(jobs_per_node) <= self._leased
        assert all(name in self._idle_since or name in self._leaving for name in jobs_per_node), (
            "a node that is not idle trains"
        )
        assert not (set(self._gaps) & self._leased)
        for name, run in self.unfinished.items():
            record = self.controller.jobs[name]
            assert set(record.nodes) == run.nodes
            assert len(run.nodes) <= run.job.max_nodes
            assert run.rate == (run.rates[len(run.nodes)])


WORLDS = [
    {"policy": "malletrain"},
    {"policy": "malletrain", "notice": 30.0},
    {"policy": "malletrain", "notice": 30.0, "lease_delay": 40.0, "foresight": "age"},
    {"policy": "malletrain", "mode": "live", "lease_delay": 7.0},
    {"policy": "malletrain", "semantics": "freetrain"},
    {"policy": "freetrain"},
    {"policy": "freetrain", "semantics": "freetrain"},
    {"policy": "equal"},
    {"policy": "fcfs", "notice": 5.0},
    {"policy": "ideal"},
]


@pytest.mark.parametrize("world", WORLDS, ids=lambda w: " ".join(map(str, w.values())))
def test_what_must_hold_in_any_world(world):
    model = synthesis.MachineModel(
        0.4,
        synthesis.lognormal(200.0, 500.0),
        batch_median=2.0,
        batch_mean=5.0,
        block_mean=3.0,
        swing=1.0,
    )
    for seed in range(2):
        rng = np.random.default_rng(seed)
        trace = synthesis.synthesise(model, 24, 5000.0, seed=seed)
        jobs = []
        for k in range(10):
            curve = ScalingCurve.of(
                {
                    1: float(rng.uniform(1, 20)),
                    4: float(rng.uniform(1, 80)),
                    12: float(rng.uniform(1, 200)),
                }
            )
            low = int(rng.integers(1, 4))
            sizes = (2, 4, 8) if rng.random() < 0.3 else None
            work = float(rng.uniform(1e3, 2e5))
            jobs.append(
                SimJob(
                    f"j{k}",
                    low,
                    12,
                    work,
                    curve,
                    stated_curve=curve,
                    submit_s=float(rng.uniform(0, 2500)),
                    sizes=sizes,
                )
            )
        costs = CostModel(
            world.get("semantics", "real"),
            notice_s=world.get("notice", 0.0),
            mode=world.get("mode", "restart"),
        )
        policy = POLICIES[world["policy"]]
        settings = SimSettings(
            policy,
            costs,
            max_running=5,
            lease_delay_s=world.get("lease_delay", 0.0),
            foresight=world.get("foresight", "none"),
        )
        sim = Checked(trace, jobs, settings)
        r = sim.run()
        books = r.harvested_fraction + r.start_fraction + r.rescale_fraction + r.preemption_fraction
        assert 0 < books <= 1 + 1e-9
        # With notice a job goes on for a moment on nodes that are not idle any more.
        assert r.samples <= r.ideal_samples * (1 + 1e-9) + (
            r.preemptions * 200 if world.get("notice") else 0
        )
        assert r.jobs_completed == sum(run.ended_at is not None for run in sim.runs.values())
        assert all(run.done <= run.job.samples * (1 + 1e-9) for run in sim.runs.values())
        again = simulate(trace, jobs, settings).to_dict()
        same = {k: v for k, v in r.to_dict().items() if not k.endswith(("_ms", "wall_s"))}
        assert {k: again[k] for k in same} == same
        if world["policy"] == "ideal":
            assert r.fraction_of_ideal > 0.97
        assert r.starts > 0


@pytest.mark.parametrize(
    ("policy", "published"),
    [("freetrain", 0.979), ("equal", 0.879)],
)
@pytest.mark.thorough
def test_agreement_with_an_independent_replay(policy, published):
    """Three days of a real machine, 1,024 of its nodes, ten jobs at a time of one measured curve,
    FreeTrain's costs.

    Published for the week (see the data's README); the whole week is :mod:`benchmarks.simulation`.
    """
    trace = read(
        shared("summit_idle_week1.csv.gz"), names=read_names(shared("summit_nodes.txt"))
    ).sample(1024, 1)
    curves = read_curves(shared("dnn_scaling_summit.csv"))
    costs = CostModel("freetrain", up_s=18.0, down_s=12.0)
    settings = SimSettings(POLICIES[policy], costs, max_running=10, hours=72)
    r = simulate(trace, hpo({"shufflenet": curves["shufflenet"]}, 1200), settings)
    assert r.fraction_of_ideal == pytest.approx(published, abs=0.01)


def test_a_site_is_simulated_with_its_own_settings():
    """One job on four nodes: it starts after the debounce of 2 s and the 9 s that a start costs."""
    planning = PlanningSettings(t_fwd_s=60.0, cost=RescaleCost(7.0, 5.0, 9.0), max_running=2)
    site = ControllerSettings(planning, debounce_s=2.0, min_interval_s=50.0)
    settings = SimSettings(
        costs=CostModel("real", 7.0, 5.0, 9.0),
        max_running=2,
        t_fwd_s=60.0,
        starvation_s=site.starvation_s,
        hours=0.2,
        site=site,
    )
    assert settings.controller() == site
    world = Simulation(trace_of(FOUR, 1000.0), [job()], settings)
    assert world.controller.settings == site
    r = world.run()
    assert r.samples == pytest.approx((720 - 2 - 9) * 40)


class TestForesight:
    """Six nodes of which two are taken every ten minutes, after 100 s."""

    GAPS: ClassVar = {f"n{k}": [(0.0, 7200.0)] for k in range(4)} | {
        f"x{k}": [(t, t + 100.0) for t in range(60, 7200, 600)] for k in range(2)
    }

    @pytest.mark.parametrize("foresight", ["age", "known"])
    def test_less_work_is_done_again_where_losses_are_foretold(self, foresight):
        blind, warned = (
            play(self.GAPS, [job(most=6)], 7200.0, snapshot_s=0.5, foresight=kind)
            for kind in ("none", foresight)
        )
        assert warned.preemption_loss <= blind.preemption_loss
        if foresight == "known":
            assert warned.redone_fraction < 0.5 * blind.redone_fraction
            assert warned.samples > blind.samples

    def test_it_is_the_same_every_time(self):
        a, b = (play(self.GAPS, [job(most=6)], 7200.0, foresight="age").to_dict() for _ in range(2))
        for wall in ("wall_s", "mean_decision_ms", "p95_decision_ms", "max_decision_ms"):
            del a[wall], b[wall]
        assert a == b


def test_a_command_for_a_job_that_ends_at_the_same_instant_comes_to_nothing():
    """Another event of that instant may move the job before the simulation looks at its end."""
    scene = Simulation(
        trace_of(FOUR, 1000.0), [job("short", samples=400.0, most=4), job("long", most=4)]
    )
    handle = scene.controller.handle_all
    moved = []

    def handling(events, now):
        ends = [e for e in events if isinstance(e, JobCompleted) and e.job == "short"]
        nodes = scene.controller.jobs["short"].nodes if ends else ()
        moved.extend(Rescale(e.job, nodes[:1]) for e in ends)
        return [*(Rescale(e.job, nodes[:1]) for e in ends), *handle(events, now)]

    scene.controller.handle_all = handling
    result = scene.run()
    assert len(moved) == 1
    assert scene.runs["short"].done == 400.0
    assert not scene.runs["short"].nodes
    assert len(scene.runs["long"].nodes) == 4
    assert result.jobs_completed == 1
