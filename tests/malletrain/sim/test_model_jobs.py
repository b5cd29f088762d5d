"""What a change of scale costs: tables of what happens and what is counted."""

from __future__ import annotations

import math

import pytest

from malletrain.sim.model_jobs import Cause, CostModel, SimRun
from malletrain.sim.workloads import WorkloadError
from tests.malletrain.sim.conftest import job

UP, DOWN, START = 18.0, 12.0, 20.0


def run_of(**costs):
    values = {"up_s": UP, "down_s": DOWN, "start_s": START, **costs}
    model = job()
    return SimRun(model, model.rates(), CostModel(**values))


def nodes(k):
    return [f"n{i}" for i in range(k)]


def training(k, at=0.0, **costs):
    """A run that trains on k nodes since time ``at``."""
    run = run_of(**costs)
    run.start(nodes(k), at - (START if run.costs.semantics == "real" else 0.0))
    run.resumed(at)
    return run


def test_it_waits_from_when_it_has_a_place_or_lost_its_last_node():
    run = run_of()
    run.waited(None, 50.0)
    assert run.longest_wait_s == 0.0, "it has no place yet"
    run.waited(20.0, 100.0)
    run.start(nodes(2), 100.0)
    assert run.longest_wait_s == 80.0
    run.loses(nodes(2), 500.0)
    run.waited(20.0, 510.0)
    assert run.longest_wait_s == 80.0, "ten seconds, though it has had its place for longer"
    run.suspend(600.0)
    run.waited(600.0, 700.0)
    assert run.longest_wait_s == 100.0


class TestReal:
    def test_starting_takes_its_time(self):
        run = run_of()
        run.start(nodes(4), 100.0)
        assert (run.training, run.resumes_at, run.done_at()) == (False, 120.0, math.inf)
        run.resumed(120.0)
        run.accrue(130.0)
        assert run.done == 10.0 * 40
        assert run.lost[Cause.START] == START * 40
        assert run.node_s == {
            None: 40.0,
            Cause.START: 80.0,
            Cause.RESCALE: 0.0,
            Cause.PREEMPTION: 0.0,
            Cause.SNAPSHOT: 0.0,
        }

    @pytest.mark.parametrize(("to", "pause"), [(6, UP), (2, DOWN)])
    def test_a_wanted_rescale_loses_only_its_pause(self, to, pause):
        run = training(4)
        run.rescale(nodes(to), 100.0)
        assert run.resumes_at == 100.0 + pause
        run.resumed(run.resumes_at)
        assert run.done == 100 * 40
        assert run.lost[Cause.RESCALE] == pause * 40
        assert run.rate == to * 10

    def test_without_notice_the_work_since_the_last_snapshot_is_lost(self):
        run = training(4, snapshot_every_s=60.0)
        run.loses(["n3"], 150.0)
        assert run.done == 120 * 40
        assert run.lost[Cause.PREEMPTION] == 30 * 40
        assert not run.training
        run.rescale(nodes(3), 151.0)
        assert run.resumes_at == 151.0 + DOWN
        run.resumed(run.resumes_at)
        assert run.lost[Cause.PREEMPTION] == 30 * 40 + (1 + DOWN) * 30
        assert run.lost[Cause.RESCALE] == 0
        assert run.preemptions == 1

    @pytest.mark.parametrize(("every", "saved_s"), [(math.inf, 0.0), (0.0, 150.0)])
    def test_no_snapshot_and_a_snapshot_at_every_step(self, every, saved_s):
        run = training(4, snapshot_every_s=every)
        run.loses(["n3"], 150.0)
        assert run.done == saved_s * 40

    def test_live_mode_loses_one_step_while_a_node_survives(self):
        run = training(4, mode="live", step_s=0.5)
        run.loses(["n1", "n2", "n3"], 150.0)
        assert run.done == 149.5 * 40
        alone = training(1, mode="live", step_s=0.5, snapshot_every_s=60.0)
        alone.loses(["n0"], 150.0)
        assert alone.done == 120 * 10

    def test_with_notice_nothing_but_the_pause_is_lost(self):
        run = training(4)
        run.leaves(150.0)
        run.leaves(150.0)
        run.rescale(nodes(2), 151.0)
        assert run.done == 151 * 40
        run.resumed(run.resumes_at)
        assert run.lost[Cause.PREEMPTION] == DOWN * 40
        assert run.preemptions == 1
        assert run.node_s[None] == 150 * 4 + 1 * 2, (
            "nodes that the main scheduler wants back are not harvested"
        )

    def test_workers_lost_before_they_were_up_start_again(self):
        run = run_of()
        run.start(nodes(4), 0.0)
        run.loses(["n3"], 10.0)
        run.rescale(nodes(3), 11.0)
        assert run.resumes_at == 11.0 + START
        assert run.lost[Cause.START] == 10 * 40

    def test_suspended_it_keeps_its_work(self):
        run = training(4)
        run.suspend(100.0)
        run.accrue(500.0)
        assert (run.done, run.training, run.nodes) == (4000.0, False, set())
        assert sum(run.lost.values()) == START * 40

    def test_a_completion_foreseen_is_out_of_date_after_any_change(self):
        run = training(4)
        seen = run.version
        run.loses(["n3"], 10.0)
        assert run.version != seen

    def test_done_when_the_work_is_done(self):
        model = job(samples=400.0)
        run = SimRun(model, model.rates(), CostModel(start_s=0.0))
        run.start(nodes(4), 0.0)
        run.resumed(0.0)
        assert run.done_at() == 10.0
        run.ended(10.0)
        assert (run.done, run.ended_at, run.nodes) == (400.0, 10.0, set())


class TestFreeTrain:
    def test_starting_is_free(self):
        run = run_of(semantics="freetrain")
        run.start(nodes(4), 100.0)
        assert run.training
        run.accrue(110.0)
        assert run.done == 400.0

    @pytest.mark.parametrize(("to", "seconds"), [(6, UP), (2, DOWN)])
    def test_a_rescale_costs_the_old_rate_at_once(self, to, seconds):
        run = training(4, semantics="freetrain")
        run.rescale(nodes(to), 100.0)
        assert run.training
        assert run.done == 100 * 40 - seconds * 40
        assert run.lost[Cause.RESCALE] == seconds * 40
        assert run.node_s[Cause.RESCALE] == seconds * 4
        assert run.node_s[None] == 400 - seconds * 4

    def test_a_preemption_costs_what_is_left_once_however_many_nodes(self):
        run = training(8, semantics="freetrain")
        run.loses(["n5", "n6", "n7"], 100.0)
        assert run.training
        assert run.done == 100 * 80 - DOWN * 50
        run.rescale(nodes(5), 100.0)
        assert run.done == 100 * 80 - DOWN * 50, (
            "staying at the size that the loss left costs nothing more"
        )
        assert (run.preemptions, run.rescales) == (1, 0)

    def test_losing_all_nodes_stops_it(self):
        run = training(2, semantics="freetrain")
        run.loses(["n0", "n1"], 100.0)
        assert not run.training
        assert run.done == 2000.0


@pytest.mark.parametrize(
    "wrong",
    [{"up_s": -1.0}, {"down_s": math.nan}, {"notice_s": math.inf}, {"snapshot_every_s": -1.0}],
)
def test_costs_that_make_no_sense_are_refused(wrong):
    with pytest.raises(WorkloadError, match="seconds, 0 or more"):
        CostModel(**wrong)


class TestSnapshots:
    def test_taking_them_costs_time(self):
        run = training(4, snapshot_s=6.0, snapshot_every_s=60.0)
        run.accrue(600.0)
        assert run.done == pytest.approx(0.9 * 600 * 40)
        assert run.node_s[Cause.SNAPSHOT] == pytest.approx(0.1 * 600 * 4)
        assert run.lost[Cause.SNAPSHOT] == pytest.approx(0.1 * 600 * 40)

    def test_a_loss_that_is_expected_makes_them_more_frequent(self):
        run = training(4, snapshot_s=1.0, snapshot_every_s=60.0)
        run.accrue(130.0)
        run.expects_loss(200.0, 130.0)  # every 20 s, the last one at 120
        run.loses(nodes(4)[:1], 155.0)
        assert run.redone_node_s == pytest.approx(15.0 * 4)

    def test_the_script_says_how_long_it_waits_at_most(self):
        run = training(4, snapshot_s=1.0, snapshot_every_s=60.0)
        run.expects_loss(1e9, 10.0)
        assert run.snapshot_every_s == 60.0

    def test_more_time_for_snapshots_than_for_training_is_refused(self):
        with pytest.raises(WorkloadError, match="take them more rarely"):
            CostModel(snapshot_s=40.0)
