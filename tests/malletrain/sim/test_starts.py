"""How jobs begin and grow: small scenes by hand."""

from __future__ import annotations

import click
import pytest

from malletrain.cli.simulate import simulate
from malletrain.sim.engine import Simulation
from malletrain.sim.model_jobs import CostModel
from malletrain.sim.policies import POLICIES, Ramp
from malletrain.sim.settings import SimSettings
from tests.malletrain.sim.conftest import job, trace_of

pytestmark = pytest.mark.slow

START_S, UP_S = 20.0, 18.0
PLAN_S = 1.0
"""From a node event to the plan."""


def play(gaps, jobs, policy, duration=1000.0, **more):
    costs = CostModel(start_s=START_S, up_s=UP_S, down_s=12.0, mode="live", step_s=0.0)
    settings = SimSettings(POLICIES[policy], costs, sample_s=100.0, **more)
    simulation = Simulation(trace_of(gaps, duration), jobs, settings)
    simulation.run()
    return simulation


def nodes_of(gaps):
    return {f"n{k}": spans for k, spans in enumerate(gaps)}


class TestGang:
    TWO_THEN_FOUR = nodes_of([[(0.0, 1000.0)]] * 2 + [[(300.0, 1000.0)]] * 2)

    def test_a_job_waits_until_its_whole_request_is_there(self):
        run = play(self.TWO_THEN_FOUR, [job(most=4)], "gang").runs["job"]
        assert run.first_start == pytest.approx(300 + PLAN_S)
        assert run.done == pytest.approx((1000 - 300 - PLAN_S - START_S) * 40)
        assert run.rescales == 0

    def test_a_work_conserving_start_uses_what_there_is_and_grows(self):
        run = play(self.TWO_THEN_FOUR, [job(most=4)], "malletrain").runs["job"]
        assert run.first_start == pytest.approx(PLAN_S)
        two = (300 + PLAN_S) - (PLAN_S + START_S)
        four = 1000 - (300 + PLAN_S + UP_S)
        assert run.done == pytest.approx(two * 20 + four * 40)
        assert (run.starts, run.rescales) == (1, 1)
        assert run.allocated_s == pytest.approx(1000 - PLAN_S)

    def test_a_later_job_that_fits_goes_first_and_keeps_its_nodes(self):
        """b (2 nodes) runs for 700 s on three idle nodes. The fourth comes at 500, but a (4 nodes)
        has to wait for the end of b.
        """
        gaps = nodes_of([[(0.0, 1000.0)]] * 3 + [[(500.0, 1000.0)]])
        jobs = [job("a", most=4), job("b", most=2, samples=14000.0)]
        runs = play(gaps, jobs, "gang").runs
        assert runs["b"].ended_at == pytest.approx(PLAN_S + START_S + 700)
        assert (runs["b"].starts, runs["b"].rescales, runs["b"].preemptions) == (1, 0, 0)
        assert runs["b"].ended_at < runs["a"].first_start <= runs["b"].ended_at + 2 * PLAN_S

    def test_a_job_that_loses_a_node_waits_for_its_whole_request_again(self):
        gaps = nodes_of([[(0.0, 1000.0)]] * 3 + [[(0.0, 500.0), (700.0, 1000.0)]])
        run = play(gaps, [job(most=4)], "gang").runs["job"]
        assert (run.starts, run.preemptions) == (2, 1)
        assert run.allocated_s == pytest.approx((500 - PLAN_S) + (1000 - 700 - PLAN_S), abs=1.0)

    def test_a_request_is_the_largest_accepted_size(self):
        run = play(self.TWO_THEN_FOUR, [job(most=4, sizes=(1, 3))], "gang").runs["job"]
        assert run.first_start == pytest.approx(300 + PLAN_S)
        assert run.done == pytest.approx((1000 - 300 - PLAN_S - START_S) * 30)


class TestRamp:
    EIGHT = nodes_of([[(0.0, 2500.0)]] * 8)

    @pytest.mark.parametrize(
        ("policy", "sizes"),
        [
            ("malletrain", [8, 8, 8, 8]),
            ("doubling", [1, 2, 4, 8]),
            ("additive", [1, 2, 3, 4]),
        ],
    )
    def test_sizes_ten_minutes_apart(self, policy, sizes):
        """The job starts at 1 s, so its size changes at 601, 1201 and 1801 s."""
        series = play(self.EIGHT, [job(most=8)], policy, duration=2500.0).series
        at = {time: busy for time, _, busy in series}
        assert [at[t] for t in (100, 700, 1300, 1900)] == sizes
        assert [at[t] for t in (600, 1200, 1800, 2400)] == sizes

    def test_samples_of_a_doubling_job(self):
        """Each of its two growths is planned a second after its step and costs a pause."""
        run = play(self.EIGHT, [job(most=4)], "doubling", duration=2500.0).runs["job"]
        steps = [PLAN_S + 600, PLAN_S + 1200]
        grown = [at + PLAN_S for at in steps]
        assert run.done == pytest.approx(
            (grown[0] - PLAN_S - START_S) * 10
            + (grown[1] - grown[0] - UP_S) * 20
            + (2500 - grown[1] - UP_S) * 40
        )

    def test_a_step_without_the_nodes_of_the_last_one_is_skipped(self):
        """Two of the nodes come at 1,300: the step at 1,201 finds the job on one node of two."""
        gaps = nodes_of([[(0.0, 2500.0)]] + [[(1300.0, 2500.0)]] * 3)
        series = play(gaps, [job(most=4)], "doubling", duration=2500.0).series
        at = {time: busy for time, _, busy in series}
        assert [at[t] for t in (700, 1200, 1400, 1800, 1900)] == [1, 1, 2, 2, 4]

    def test_two_jobs_begin_where_one_would_take_all(self):
        jobs = [job("a", most=8), job("b", most=8)]
        runs = play(self.EIGHT, jobs, "doubling", duration=2500.0).runs
        assert [runs[name].first_start for name in "ab"] == [PLAN_S, PLAN_S]


@pytest.mark.parametrize(
    ("ramp", "limits"),
    [
        (Ramp(factor=2.0), [1, 2, 4, 8, 10, 10]),
        (Ramp(nodes=3), [1, 4, 7, 10, 10]),
        (Ramp(factor=1.5, nodes=1), [1, 2, 4, 7, 10]),
    ],
)
def test_the_largest_size_follows_the_ramp(ramp, limits):
    one = job(most=10)
    assert [1, *(ramp.grown(one, limit) for limit in limits[:-1])] == limits


def test_a_ramp_keeps_to_accepted_sizes():
    one = job(most=10, sizes=(2, 3, 8))
    assert [Ramp(factor=2.0).grown(one, k) for k in (2, 3, 8)] == [3, 8, 8]
    assert [Ramp(nodes=1).grown(one, k) for k in (2, 3, 8)] == [3, 8, 8]


def test_the_command_knows_all_policies():
    option = next(p for p in simulate.params if p.name == "policy")
    assert isinstance(option.type, click.Choice)
    assert set(option.type.choices) == set(POLICIES)
