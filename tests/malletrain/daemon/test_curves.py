"""Which curve a new job starts with, and what is kept of each job for the next of its kind."""

from __future__ import annotations

import math
import os
import threading

import pytest
from msgspec import structs

from jpa import MeasuredCurve, RescaleCosts
from malletrain.core.controller import Controller
from malletrain.core.events import JobSubmitted, NodeJoined, NodeLost
from malletrain.core.scaling_model import MAX_POINTS, ScalingModel, named
from malletrain.daemon.jobs.curves import NEWS_EVERY_S, Curves
from malletrain.protocol import messages
from malletrain.store.records import CurveRow, JobRow
from malletrain.store.store import Store
from tests.waiting import PATIENCE_S


class Clock:
    time = 100.0

    def now(self):
        self.time += 1
        return self.time


def curve_of(rates):
    curve = MeasuredCurve()
    for nodes, rate in rates.items():
        curve = curve.with_measurement(nodes, rate, 0.02 * rate, 1.0)
    return curve


MEASURED = ScalingModel(
    curve_of({1: 100.0, 2: 190.0, 4: 340.0}),
    RescaleCosts().observe("up", 3.0),
    True,
    "measured",
    "All sizes.",
    5.0,
)


@pytest.fixture
def curves(tmp_path):
    with Store.open(f"sqlite:///{tmp_path}/m.db") as store:
        (tmp_path / "train.py").write_text("print(1)\n")
        controller = Controller()
        clock = Clock()
        curves = Curves(store, clock, controller, RescaleCosts())
        curves.controller, curves.clock = controller, clock
        curves.store, curves.script = store, str(tmp_path / "train.py")
        yield curves


def spec(curves, *args, **more):
    return messages.JobSpec(
        "a", "ada", curves.script, "/", "python", tuple(args), min_nodes=1, max_nodes=4, **more
    )


def begins(curves, job, job_spec):
    """The scaling model that a job starts with."""
    [stored_curve] = curves.begin([(job, job_spec)])
    return stored_curve.scaling


def new(curves, job, *args, **more):
    """Submit a job; return the scaling model it starts with, and its specification."""
    job_spec = spec(curves, *args, **more)
    curves.store.add_job(JobRow(job, "a", "ada", "{}", "queued"))
    return begins(curves, job, job_spec), job_spec


def test_the_first_of_its_kind_starts_with_nothing(curves):
    model, _ = new(curves, "j1")
    assert model is None
    assert curves.store.profile("j1").key


def test_a_resubmitted_job_inherits_and_is_a_little_less_sure(curves):
    _, job_spec = new(curves, "j1", "--lr", "0.1", "--layers", "3")
    curves.keep("j1", job_spec, MEASURED)
    model, _ = new(curves, "j2", "--layers=3", "--lr", "0.2")
    assert model is not None
    assert model.curve.measured_sizes == (1, 2, 4)
    assert model.curve.estimate(4)[0] == pytest.approx(340.0)
    assert model.curve.estimate(4)[1] > MEASURED.curve.estimate(4)[1]
    assert model.costs.up == (3.0,)
    assert not model.profiled


@pytest.mark.parametrize("other", [("--layers", "4"), ("--layers", "3", "more")])
def test_other_arguments_are_another_kind(curves, other):
    _, job_spec = new(curves, "j1", "--layers", "3")
    curves.keep("j1", job_spec, MEASURED)
    assert new(curves, "j2", *other)[0] is None


def test_another_environment_is_another_kind_and_how_it_is_run_is_not(curves):
    own = messages.SoftwareEnvironment(container="a.sif", modules=("cuda",))
    job_spec = structs.replace(spec(curves), software=own)
    curves.store.add_job(JobRow("j1", "a", "ada", "{}", "queued"))
    begins(curves, "j1", job_spec)
    curves.keep("j1", job_spec, MEASURED)

    def inherits(job, **software):
        curves.store.add_job(JobRow(job, "a", "ada", "{}", "queued"))
        other = messages.SoftwareEnvironment(**software) if software else None
        return begins(curves, job, structs.replace(spec(curves), software=other)) is not None

    assert inherits("j2", container="a.sif", modules=("cuda",), runtime="podman", binds=("/x",))
    assert not inherits("j3", container="b.sif", modules=("cuda",))
    assert not inherits("j4", container="a.sif")
    assert not inherits("j5", modules=("a.sif", "cuda"))
    assert not inherits("j6")
    assert not inherits("j7", venv="/v")


def test_another_number_of_processes_or_another_script_is_another_kind(curves):
    _, job_spec = new(curves, "j1")
    curves.keep("j1", job_spec, MEASURED)
    assert new(curves, "j2", nproc_per_node=2)[0] is None
    with open(curves.script, "a") as file:
        file.write("print(2)\n")
    assert new(curves, "j3")[0] is None


def test_jobs_of_one_key_begin_with_a_belief_and_not_with_the_points(curves):
    _, job_spec = new(curves, "j1", "--layers", "3", profile_key="sweep")
    curves.keep("j1", job_spec, MEASURED)
    model, _ = new(curves, "j2", "--layers", "9", profile_key="sweep")
    assert model.curve.measured_sizes == ()
    assert model.has_data
    rate, std = model.curve.estimate(4)
    assert rate == pytest.approx(340.0, rel=0.05)
    assert std > 0.2 * rate


def test_a_model_of_similar_size_is_believed_once_it_says_how_large_it_is(curves):
    _, job_spec = new(curves, "j1", "--layers", "3")
    curves.described("j1", job_spec, {"parameters": 1_000_000, "flops_per_sample": None})
    curves.keep("j1", job_spec, MEASURED)
    model, other = new(curves, "j2", "--layers", "4")
    assert model is None
    suggested = curves.described("j2", other, {"parameters": 1_200_000, "flops_per_sample": None})
    assert suggested is not None
    assert 200 < suggested.curve.estimate(4)[0] < 340
    assert (
        curves.described("j2", other, {"parameters": 1_200_000, "flops_per_sample": None}) is None
    ), "every rank says it"
    assert curves.described("j2", other, {"parameters": "many", "flops_per_sample": -1.0}) is None


def test_a_job_whose_owner_says_its_models_size_begins_with_what_a_similar_one_showed(curves):
    _, job_spec = new(curves, "j1", "--layers", "3", parameters=1e6)
    curves.described("j1", job_spec, {"parameters": 1_000_000, "flops_per_sample": None})
    curves.keep("j1", job_spec, MEASURED)
    model, other = new(curves, "j2", "--layers", "4", parameters=1.2e6)
    assert 200 < model.curve.estimate(4)[0] < 340
    assert not model.profiled
    assert not model.curve.measured_sizes, "it is believed, not known"
    size = {"parameters": 1_200_000, "flops_per_sample": None}
    assert curves.described("j2", other, size) is not None, "its workers' word counts for others"
    assert new(curves, "j3", "--layers", "5", parameters=1e9)[0] is None, "nobody is near"
    again, _ = new(curves, "j4", "--layers", "3", parameters=1e6)
    assert again.curve.measured_sizes, "one of its own kind goes before"


def test_where_the_script_says_nothing_of_its_models_size_its_owner_is_believed(curves):
    _, job_spec = new(curves, "j1", "--layers", "3", parameters=1e6, flops=2e9)
    curves.keep("j1", job_spec, MEASURED)
    assert new(curves, "j2", "--layers", "4", parameters=1.2e6)[0] is not None
    curves.described("j1", job_spec, {"parameters": 8e9, "flops_per_sample": None})
    curves.keep("j1", job_spec, MEASURED)
    assert new(curves, "j3", "--layers", "5", parameters=1.2e6)[0] is None, "the script's counts"


def test_who_was_submitted_before_there_was_a_node_is_told_of_those_that_came(curves):
    controller, specs = curves.controller, {}
    _, specs["j1"] = new(curves, "j1", "--layers", "3", parameters=1e6)
    _, specs["j2"] = new(curves, "j2", "--layers", "4", parameters=1.2e6)
    controller.handle(NodeJoined("g0", "gpu"), 0.0)
    for job in specs:
        controller.handle(JobSubmitted(job, 1, 4), 0.0)
    controller.jobs["j1"].nodes = ("g0",)
    assert not curves.news
    curves.keep("j1", specs["j1"], ScalingModel(curve_of({1: 100.0})))
    assert not curves.news, "it is not over"
    curves.keep("j1", specs["j1"], MEASURED)
    assert curves.news
    assert curves.tell_at() == -math.inf, "at once"
    before = curves.clock.time
    assert [event.job for event in curves.for_waiting(specs.get)] == ["j2"]
    after = curves.clock.time
    assert not curves.news
    assert curves.tell_at() is None
    curves.keep("j1", specs["j1"], MEASURED)
    assert before < curves.tell_at() - NEWS_EVERY_S <= after, "no more often than that"


def test_a_restart_finds_what_the_job_knew(curves):
    _, job_spec = new(curves, "j1")
    curves.keep("j1", job_spec, MEASURED)
    again = begins(curves, "j1", job_spec)
    assert again.to_dict() == MEASURED.to_dict()


def test_a_kind_is_what_has_the_same_key_and_not_what_its_owner_calls_alike(curves):
    kinds = {}
    for job, args, key in (
        ("j1", ("--lr", "1"), ""),
        ("j2", ("--lr", "2"), ""),
        ("j3", ("--deep",), ""),
        ("j4", (), "sweep"),
    ):
        _, job_spec = new(curves, job, *args, profile_key=key)
        kinds[job] = curves.begin([(job, job_spec)])[0].kind
    assert kinds["j1"] == kinds["j2"] != ""
    assert kinds["j3"] not in ("", kinds["j1"])
    assert kinds["j4"] == ""
    for job in ("j5", "j6"):
        _, job_spec = new(curves, job, "--wide", job, profile_key="s", sweep="s/1")
        kinds[job] = curves.begin([(job, job_spec)])[0].kind
    assert kinds["j5"] == kinds["j6"] != "", "trials that share a profile are one kind"


def test_a_curve_is_stored_under_the_class_of_nodes_it_was_measured_on(curves):
    controller = curves.controller
    for k in range(5):
        controller.handle(NodeJoined(f"c{k}", "cpu" if k < 3 else "gpu"), 0.0)
    _, job_spec = new(curves, "j1")
    assert curves.store.profile("j1").node_class == "cpu", "the usual class, until it runs"
    controller.handle(JobSubmitted("j1", 1, 4), 0.0)
    controller.jobs["j1"].nodes = ("c3", "c4")
    curves.keep("j1", job_spec, MEASURED)
    row = curves.store.profile("j1")
    assert row.node_class == "gpu"
    assert curves.store.curve(row.key).node_class == "gpu"
    assert new(curves, "j2")[0] is None, "on the usual class nothing is known"
    for k in range(3):
        controller.handle(NodeLost(f"c{k}"), 1.0)
    model, _ = new(curves, "j3")
    assert model is not None
    assert model.curve.measured_sizes == (1, 2, 4)


def test_a_profile_under_way_is_kept_for_the_job_and_not_for_others(curves):
    _, job_spec = new(curves, "j1")
    half = ScalingModel(curve_of({4: 340.0}))
    curves.keep("j1", job_spec, half)
    assert begins(curves, "j1", job_spec).curve.measured_sizes == (4,)
    assert new(curves, "j2")[0] is None


@pytest.mark.parametrize(
    "damage", [{"curve": {"version": 99}}, {"curve": {}}, {"x": 1}, {"curve": [1]}, {"curve": None}]
)
def test_a_damaged_curve_is_as_none(curves, damage):
    _, job_spec = new(curves, "j1")
    key = curves.store.profile("j1").key
    curves.store.put_curve(CurveRow(key, "default", 1, damage, "j1", 1.0))
    assert new(curves, "j2")[0] is None
    assert job_spec.min_nodes == 1


def test_interruptions_and_reasons_are_kept(curves):
    new(curves, "j1")
    curves.interrupted("j1", {"by": "j2", "before": 4, "nodes": 2})
    curves.waits("j1", "It needs 2 nodes more.")
    row = curves.store.profile("j1")
    assert [(i["by"], i["before"], i["nodes"]) for i in row.interruptions] == [("j2", 4, 2)]
    assert row.waits == "It needs 2 nodes more."
    curves.keep("j1", spec(curves), MEASURED)
    assert curves.store.profile("j1").waits == ""


def test_a_script_that_cannot_be_read_has_a_key_all_the_same(curves):
    job_spec = messages.JobSpec("a", "ada", "/does/not/exist.py", "/", "python")
    curves.store.add_job(JobRow("j1", "a", "ada", "{}", "queued"))
    assert begins(curves, "j1", job_spec) is None
    assert len(curves.store.profile("j1").key) == 32


@pytest.mark.parametrize("kind", ["FIFO", "terminal", "folder"])
def test_a_script_that_is_no_file_is_not_waited_for(tmp_path, kind, request):
    """A user may replace the file at which the client has looked. The whole daemon waited."""
    path = str(tmp_path / "train.py")
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        os.mkdir(path)
    else:
        ends = os.openpty()
        path = os.ttyname(ends[1])
        request.addfinalizer(lambda: [os.close(end) for end in ends])
    keys, before = [], len(os.listdir("/proc/self/fd"))
    job_spec = messages.JobSpec("a", "ada", path, "/", "python")
    reader = threading.Thread(
        target=lambda: keys.append(Curves.key_of(job_spec, "default")), daemon=True
    )
    reader.start()
    reader.join(PATIENCE_S)
    assert [len(key) for key in keys] == [32]
    assert len(os.listdir("/proc/self/fd")) == before


def test_many_sizes_are_handed_to_the_planner_as_a_selection():
    assert named(range(1, 9), ()) == list(range(1, 9))
    for sizes in (range(1, 100_001), [k * 2 for k in range(1, 5000)]):
        chosen = named(sizes, (14, 3, 200_000))
        assert len(chosen) <= MAX_POINTS + 1
        assert {chosen[0], chosen[-1]} == {min(sizes), max(sizes)}
        assert 14 in chosen
        assert set(chosen) <= set(sizes)


def test_caution_counts_after_a_profile_only():
    sizes = range(1, 5)
    seen = ScalingModel(curve_of({1: 100.0}))
    assert seen.bid_curve(sizes, 1.0).at(4) > 200
    assert ScalingModel().bid_curve(sizes, 1.0) is None
    cautious = MEASURED.bid_curve(sizes, 1.0)
    assert cautious.at(3) < MEASURED.curve.estimate(3)[0]


def test_another_model_is_told_from_the_same_one_said_again(curves):
    _, job_spec = new(curves, "j1")
    first = {"parameters": 1_000_000, "flops_per_sample": 2e9}
    assert curves.another_model("j1", first) == ""
    curves.described("j1", job_spec, first)
    assert curves.another_model("j1", first) == ""
    assert curves.another_model("j1", {"parameters": 1_000_000, "flops_per_sample": None}) == ""
    larger = {"parameters": 3_000_000, "flops_per_sample": 2e9}
    assert curves.another_model("j1", larger) == "3e+06 2e+09"
    curves.described("j1", job_spec, larger)
    assert curves.another_model("j1", larger) == ""
