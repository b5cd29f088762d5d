"""Workloads: what is drawn, what is read, and what is refused with which sentence."""

from __future__ import annotations

import gzip
import json
import math

import pytest

from allocator import ScalingCurve
from malletrain.sim.workload_files import read_curves, read_workload
from malletrain.sim.workloads import (
    NODE,
    Cluster,
    SimJob,
    WorkloadError,
    amdahl,
    arriving,
    built_in,
    hpo,
    with_stated_curves,
)
from tests.malletrain.sim.conftest import job, linear

CURVES = {"a": linear(4), "b": linear(16)}


def test_a_search_draws_every_model_and_the_same_for_the_same_seed():
    jobs = hpo(CURVES, 50, seed=3)
    assert jobs == hpo(CURVES, 50, seed=3) != hpo(CURVES, 50, seed=4)
    assert {j.model for j in jobs} == {"a", "b"}
    assert {(j.model, j.max_nodes) for j in jobs} == {("a", 4), ("b", 16)}
    assert len({j.name for j in jobs}) == 50
    assert {j.max_nodes for j in hpo(CURVES, 50, max_nodes=8)} == {4, 8}


def test_rates_are_the_curve_at_every_size():
    one = SimJob("j", 1, 4, 1.0, ScalingCurve.of({1: 10.0, 2: 18.0, 4: 30.0}))
    assert one.rates() == [0.0, 10.0, 18.0, 24.0, 30.0]


def test_a_real_log_gives_arrivals_sizes_and_work():
    jobs = [job("a", most=8), job("b", most=8), job("c", most=8)]
    first, second = arriving(jobs, [(5.0, 4, 100.0), (9.0, 16, 10.0)])
    assert (first.submit_s, first.max_nodes, first.samples) == (5.0, 4, 4000.0)
    assert (second.max_nodes, second.samples) == (8, 80.0 * 20), (
        "as many node-seconds, on the nodes its curve knows"
    )


def test_what_owners_state_and_the_truth_stays():
    jobs = hpo({"a": linear(4), "b": ScalingCurve.of({1: 3.0, 8: 12.0}), "c": linear(16, 5.0)}, 100)
    for how in ("exact", "other", "linear", "none"):
        stated = with_stated_curves(jobs, how, seed=1)
        assert [j.curve for j in stated] == [j.curve for j in jobs]
        assert with_stated_curves(jobs, how, seed=1) == stated
    assert with_stated_curves(jobs, "exact") == jobs
    assert all(j.stated_curve is None for j in with_stated_curves(jobs, "none"))
    assert all(
        j.stated_curve.at(j.max_nodes) == pytest.approx(j.max_nodes * j.curve.at(1))
        for j in with_stated_curves(jobs, "linear")
    )
    other = with_stated_curves(jobs, "other")
    assert all(j.stated_curve != j.curve for j in other)
    assert {j.stated_curve for j in other} == {j.curve for j in jobs}
    assert len({j.stated_curve for j in other if j.model == "a"}) == 2
    with pytest.raises(WorkloadError, match="only one model"):
        with_stated_curves([job("x"), job("y")], "other")


def test_curves_from_a_file(tmp_path):
    path = tmp_path / "curves.csv.gz"
    path.write_bytes(gzip.compress(b"model,nodes,samples_per_s\nx,1,10\nx,4,30\ny,2,5\ny,1,3\n"))
    assert read_curves(path) == {
        "x": ScalingCurve.of({1: 10, 4: 30}),
        "y": ScalingCurve.of({1: 3, 2: 5}),
    }


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("x,1,nan\nx,2,3", "line 2: samples_per_s must be a finite number"),
        ("x,1,-3\nx,2,3", "line 2: samples_per_s must be a finite number"),
        ("x,1,ten\nx,2,3", "line 2: samples_per_s must be a number; got 'ten'"),
        ("x,1.5,3\nx,2,3", "line 2: nodes must be a whole number"),
        ("x,1,3\nx,1,4", "line 3: Model x has 1 nodes twice"),
        ("x,1,3", "single point"),
        ("x,0,3\nx,1,3", "sizes start at 1"),
        (",1,3\nx,1,3", "line 2: The model has no name"),
        ("x,1\nx,2,3", "line 2: The row does not have the 3 columns"),
        ("", "no curve below"),
    ],
)
def test_bad_curves_are_refused_with_their_line(tmp_path, rows, says):
    path = tmp_path / "curves.csv"
    path.write_text("model,nodes,samples_per_s\n" + rows)
    with pytest.raises(WorkloadError, match=says):
        read_curves(path)


def test_a_file_that_is_no_file_of_curves(tmp_path):
    with pytest.raises(WorkloadError, match="no such file"):
        read_curves(tmp_path / "none.csv")
    (tmp_path / "bad").write_text("a,b\n1,2\n")
    with pytest.raises(WorkloadError, match="it has no model, nodes, samples_per_s"):
        read_curves(tmp_path / "bad")
    (tmp_path / "gz").write_bytes(gzip.compress(bytes(range(256)))[:60])
    with pytest.raises(WorkloadError, match="gzip file is damaged"):
        read_curves(tmp_path / "gz")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WorkloadError, match="not a text file"):
        read_curves(tmp_path / "binary")


def test_jobs_from_csv_and_json_are_the_same(tmp_path):
    table = tmp_path / "jobs.csv"
    table.write_text(
        "name,samples,model,curve,stated_curve,max_nodes,sizes\none,1e6,a,,,,\ntwo,2e6,,1:10 "
        "8:60,none,6,1 2 4\n"
    )
    entries = tmp_path / "jobs.json"
    second = {
        "name": "two",
        "samples": 2e6,
        "curve": {"1": 10, "8": 60},
        "stated_curve": "none",
        "max_nodes": 6,
        "sizes": [1, 2, 4],
    }
    entries.write_text(json.dumps([{"name": "one", "samples": 1e6, "model": "a"}, second]))
    jobs = read_workload(table, CURVES)
    assert jobs == read_workload(entries, CURVES)
    assert jobs[0].curve == jobs[0].stated_curve == CURVES["a"]
    assert (jobs[1].max_nodes, jobs[1].stated_curve, jobs[1].sizes) == (6, None, (1, 2, 4))


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"samples": 1}, "entry 1: The job has no name"),
        ({"name": "x"}, "entry 1: The job has no samples"),
        ({"name": "x", "samples": 1, "model": "z"}, "its model 'z' is not known; known are a, b"),
        ({"name": "x", "samples": 0, "model": "a"}, "entry 1: Job x has 0.0 samples"),
        (
            {"name": "x", "samples": 1, "model": "a", "max_nodes": 5},
            "its curve ends at 4; the simulator does not extrapolate",
        ),
        (
            {"name": "x", "samples": 1, "model": "a", "min_nodes": 3, "max_nodes": 2},
            "1 <= min <= max",
        ),
        ({"name": "x", "samples": 1, "model": "a", "nodes": 3}, "has no field nodes"),
        (
            {"name": "x", "samples": 1, "model": "a", "goal": "fame"},
            "known are throughput, efficiency",
        ),
        ({"name": "x", "samples": 1, "model": "a", "sizes": [8]}, "accepts no size within 1:4"),
        (
            {"name": "x", "samples": 1, "model": "a", "submit_s": -1},
            "submit_s must be a finite number",
        ),
        ({"name": "x", "samples": 1, "curve": "1-2"}, "A curve is written as"),
        ({"name": "x", "samples": 1, "curve": {"1": 5}}, "single point"),
        ({"name": "x", "samples": 1, "curve": 5}, "A curve is an object"),
    ],
)
def test_bad_jobs_are_refused_with_their_entry(tmp_path, entry, says):
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps([entry]))
    with pytest.raises(WorkloadError, match=says):
        read_workload(path, CURVES)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[", "not JSON"),
        ("[1]", "list of objects"),
        ("[]", "has no job"),
        ("name,samples\n", "has no job"),
    ],
)
def test_files_without_jobs(tmp_path, text, says):
    path = tmp_path / "jobs"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=says):
        read_workload(path)


def test_names_are_unique(tmp_path):
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps([{"name": "x", "samples": 1, "model": "a"}] * 2))
    with pytest.raises(WorkloadError, match="entry 2: There are two jobs named x"):
        read_workload(path, CURVES)


@pytest.mark.parametrize("count", [0, -1])
def test_no_jobs_are_no_workload(count):
    with pytest.raises(WorkloadError, match="1 or more"):
        hpo(CURVES, count)
    with pytest.raises(WorkloadError, match="no scaling curve"):
        hpo({}, 1)
    with pytest.raises(
        WorkloadError, match="no scaling curve goes beyond 16; the simulator does not extrapolate"
    ):
        hpo(CURVES, 1, max_nodes=17)


def test_the_built_in_family_slows_down_with_scale():
    curves = built_in(64)
    assert len(curves) == 7
    for curve in curves.values():
        per_node = [rate / nodes for nodes, rate in curve.points]
        assert per_node == sorted(per_node, reverse=True)
        assert 0.3 < per_node[-1] / per_node[0] < 1
    assert built_in(48)["vgg16"].largest == 48


def test_the_laws_by_hand():
    plain = Cluster(flops=1e12, alpha_s=1e-3, beta=1e9, overlap=0.0, batch=100, jitter=0.0)
    assert plain.rate(1e9, 1e6, 1) == pytest.approx(1000.0)
    assert plain.rate(1e9, 1e6, 2) == pytest.approx(200 / (0.1 + 2e-3 + 4e6 / 1e9))
    assert Cluster(flops=1e12, jitter=0.1, batch=100, alpha_s=0, overlap=1).rate(
        1e9, 0, 8
    ) == pytest.approx(800 / (0.1 * (1 + 0.1 * math.sqrt(2 * math.log(8)))))
    assert amdahl(10.0, 0.1, 11) == pytest.approx(55.0)
    assert NODE.curve(1e12, 1e6, [1, 8], serial=0.5).at(8) == pytest.approx(
        amdahl(NODE.rate(1e12, 1e6, 1), 0.5, 8)
    )


def test_a_log_says_whose_its_jobs_are(tmp_path):
    from malletrain.sim.joblogs import read_log

    swf = tmp_path / "log.swf"
    swf.write_text("; MaxProcs: 4\n1 0 0 60 2 -1 -1 2 60 -1 1 17 1 -1 -1 -1 -1 -1\n")
    gpus = tmp_path / "gpus.csv"
    gpus.write_text("timestamp,duration,num_gpus,cluster\n2017-10-09 07:01:55,66,1,11cb48\n")
    assert [read_log(path).jobs[0].user for path in (swf, gpus)] == ["u17", "11cb48"]
