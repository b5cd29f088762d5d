"""Slots of several kinds in one simulation: known answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from malletrain.cli import main
from malletrain.sim.engine import Simulation, simulate
from malletrain.sim.model_jobs import CostModel
from malletrain.sim.settings import SimSettings
from malletrain.sim.slot_kinds import SlotKinds
from malletrain.sim.workload_files import read_workload
from malletrain.sim.workloads import WorkloadError
from scavenger.trace.amounts import HEADER, TraceKind, divide, parse
from tests.command_runner import CliRunner
from tests.malletrain.sim.conftest import job, linear

pytestmark = pytest.mark.slow

START_S, PLAN_S = 20.0, 1.0
ROWS = f"{HEADER}\n0,g1,idle,4\n0,c1,idle,64\n"
"""A host of four GPUs and a node of 64 cores, both idle all the time."""
SLOTS = ("gpu=1@g[1-9]", "cpu=node@c[1-9]")


def world(rows=ROWS, slots=SLOTS, prices=None, duration=1000.0):
    divided = divide(parse(rows, duration_s=duration), list(map(TraceKind.parse, slots)))
    return divided.trace, SlotKinds(divided.kind_of, divided.parts if prices is None else prices)


def play(jobs, **options):
    trace, kinds = world(**options)
    settings = SimSettings(costs=CostModel(start_s=START_S))
    return simulate(trace, jobs, settings, kinds)


def by_kind(result):
    return {kind.kind: kind for kind in result.slots_by_kind}


def test_two_kinds_with_a_job_each():
    """Both jobs are planned after a second and start for 20; a slot is a quarter of its host."""
    result = play([job("a", most=4, node_class="gpu"), job("b", most=1, node_class="cpu")])
    trained_s = 1000 - PLAN_S - START_S
    assert result.samples == pytest.approx(trained_s * (40 + 10))
    assert result.ideal_samples == pytest.approx(1000 * (40 + 10))
    gpu, cpu = by_kind(result)["gpu"], by_kind(result)["cpu"]
    assert (gpu.slots, gpu.price, cpu.slots, cpu.price) == (4, 0.25, 1, 1.0)
    assert gpu.idle_slot_hours * 3600 == pytest.approx(4000)
    assert gpu.harvested_fraction == cpu.harvested_fraction == pytest.approx(trained_s / 1000)
    assert gpu.allocated_slot_hours * 3600 == pytest.approx(4 * (1000 - PLAN_S))
    assert gpu.charged_node_hours * 3600 == pytest.approx(1000 - PLAN_S)
    assert cpu.charged_node_hours * 3600 == pytest.approx(1000 - PLAN_S)


def test_a_job_never_has_slots_of_two_kinds():
    """Five slots are idle, but four of one kind are the most that it can have. The bound lets it
    mix kinds.
    """
    result = play([job("a", most=8)])
    assert result.samples == pytest.approx((1000 - PLAN_S - START_S) * 40)
    assert result.ideal_samples == pytest.approx(1000 * 50)
    assert by_kind(result)["cpu"].harvested_fraction == 0.0
    assert by_kind(result)["cpu"].idle_slot_hours * 3600 == pytest.approx(1000)


def test_a_job_of_one_kind_leaves_the_other_alone():
    result = play([job("a", most=8, node_class="cpu")])
    assert result.samples == pytest.approx((1000 - PLAN_S - START_S) * 10)
    assert by_kind(result)["gpu"].allocated_slot_hours == 0.0


def test_a_job_moves_to_the_other_kind_when_its_slots_go():
    """c1 is busy from 400 s on, and the four GPUs are idle from 300 s on."""
    rows = f"{HEADER}\n0,c1,idle,64\n0,g1,busy,4\n300,g1,idle,1\n400,c1,busy,64\n"
    result = play([job("a", most=1)], rows=rows)
    kinds = by_kind(result)
    assert kinds["cpu"].allocated_slot_hours * 3600 == pytest.approx(400 - PLAN_S)
    assert 550 < kinds["gpu"].allocated_slot_hours * 3600 <= 600
    assert result.harvested_fraction * result.equivalent_nodes * 1000 == pytest.approx(
        sum(k.harvested_fraction * k.idle_slot_hours * 3600 for k in kinds.values())
    )


@pytest.mark.parametrize(("price", "seconds"), [(0.25, 720.0), (1.0, 180.0)])
def test_budgets_are_charged_by_price(price, seconds):
    """0.05 node-hours are 180 node-seconds."""
    one = job("a", most=1, node_class="gpu", budget_nh=0.05)
    result = play([one], prices={"gpu": price})
    assert by_kind(result)["gpu"].allocated_slot_hours * 3600 == pytest.approx(seconds, abs=1.5)
    assert result.budgets_overspent == 0


def test_a_job_of_a_kind_that_does_not_exist():
    trace, kinds = world()
    with pytest.raises(WorkloadError, match="Job a runs on slots of kind tpu; the trace has cpu"):
        Simulation(trace, [job("a", node_class="tpu")], None, kinds)


def test_a_workload_file_names_kinds(tmp_path):
    path = tmp_path / "jobs.csv"
    path.write_text("name,samples,model,max_nodes,kind\na,1e6,m,4,gpu\nb,1e6,m,1,\n")
    assert [j.node_class for j in read_workload(path, {"m": linear()})] == ["gpu", ""]


class TestCommand:
    @pytest.fixture
    def files(self, tmp_path):
        trace, jobs, curves = (tmp_path / name for name in ("t.csv", "jobs.csv", "curves.csv"))
        trace.write_text(f"{ROWS}1000,g1,busy,4\n1000,c1,busy,64\n")
        jobs.write_text("name,samples,model,max_nodes,kind\na,1e9,m,4,gpu\nb,1e9,m,1,cpu\n")
        curves.write_text("model,nodes,samples_per_s\nm,1,10\nm,8,80\n")
        return ["--trace", trace, "--workload", jobs, "--curves", curves, "--start-cost", START_S]

    @staticmethod
    def run(files, *options):
        return CliRunner().invoke(main, [*map(str, ["simulate", *files]), *options])

    def test_prices_by_kind_are_in_the_report(self, files):
        slots = [word for slot in SLOTS for word in ("--slot", slot)]
        done = self.run(files, *slots, "--price", "cpu=2", "--json")
        assert done.exit_code == 0, done.output
        kinds = {kind["kind"]: kind for kind in json.loads(done.stdout)["slots_by_kind"]}
        assert {name: kind["price"] for name, kind in kinds.items()} == {"cpu": 2.0, "gpu": 0.25}
        assert kinds["cpu"]["charged_node_hours"] * 3600 == pytest.approx(2 * (1000 - PLAN_S))
        shown = self.run(files, *slots)
        assert "gpu slots" in shown.stdout
        assert "at 0.25: 0.3 node-hours" in " ".join(shown.stdout.split())

    def test_one_kind_without_a_name_is_reported_as_before(self, files):
        done = self.run([*files[:2], "--jobs", "3"], "--slot", "node", "--json")
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["slots_by_kind"] == []

    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            (["--slot", "gpu=0"], "--slot gpu=0: give [KIND=]N or [KIND=]node"),
            (["--slot", "gpu=1@g1", "--price", "tpu=1"], "the kinds are gpu, node."),
            (["--slot", "gpu=1@g1", "--price", "gpu=0"], "a price is a number of node-hours"),
            (["--slot", "gpu=8@g1"], "No host has the 8 units of a slot of kind gpu"),
            (["--slot", "gpu=1@g1"], "Job b runs on slots of kind cpu; the trace has gpu, node."),
        ],
    )
    def test_what_is_refused(self, files, options, sentence):
        done = self.run(files, *options)
        assert done.exit_code != 0
        assert sentence in " ".join(done.output.split())

    def test_the_example_of_the_page(self, tmp_path):
        page = (Path(__file__).parents[3] / "docs" / "slots.md").read_text()
        example = page.partition("$ cat mixed.csv\n")[2].partition("```")[0]
        rows, _, rest = example.partition("$ malletrain ")
        command, _, output = rest.partition("\n")
        trace = tmp_path / "mixed.csv"
        trace.write_text(rows)
        words = [str(trace) if word == "mixed.csv" else word for word in command.split()]
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, done.output
        shown = [" ".join(line.split()) for line in output.splitlines() if line != "..."]
        assert len(shown) == 2
        # A narrow terminal breaks lines.
        printed = " ".join(done.stdout.split())
        assert [line in printed for line in shown] == [True, True], done.stdout
