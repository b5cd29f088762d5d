"""The longest wait that ``check`` tells beside what main jobs waited: the parts without a Slurm."""

from __future__ import annotations

import pytest

from benchmarks.main_jobs import MainJob
from benchmarks.noharm import CONFIG
from benchmarks.noharm_bound import BOUND, CASES, compared, workload
from malletrain.config.model import parse_config
from tests.scavenger.slurm import slurm_world


def test_main_jobs_of_several_nodes_have_two_components_and_name_all_their_nodes():
    jobs = workload(8, 2.0, 0.6, 1, CASES["heterogeneous"])
    assert [job.nodes for job in jobs] == [
        j.nodes for j in workload(8, 2.0, 0.6, 1, CASES["plain"])
    ]
    assert any(job.parts for job in jobs)
    for job in jobs:
        assert sum(job.parts) == job.nodes if job.parts else job.nodes == 1
    job = MainJob(0.0, 3, 20.0, ("--time=5",), parts=(1, 2))
    assert job.words == (
        *("--nodes=1", "--time=5", ":", "--partition=batch", "--nodes=2", "--time=5"),
    )
    assert job.nodelist == "$SLURM_JOB_NODELIST_HET_GROUP_0,$SLURM_JOB_NODELIST_HET_GROUP_1"
    assert MainJob(0.0, 2, 20.0).words == ("--nodes=2", "--exclusive", "--time=5")


def test_what_a_job_waits_anyway_is_not_counted():
    row = compared(14.0, [1.0, 5.0, 2.0], [0.5, 20.0, 15.0])
    assert row["over_bound"] == 1
    assert row["added"]["max_s"] == 15.0
    assert row["added"]["median_s"] == 13.0


@pytest.mark.parametrize("name", CASES)
def test_the_configuration_of_each_case_is_one(tmp_path, name):
    text = CONFIG.replace("[gaps]", f"{CASES[name].lines}[gaps]")
    for key, value in (("state", str(tmp_path)), ("shape", "single"), ("lease_nodes", "8")):
        text = text.replace(f"{{{key}}}", value)
    assert parse_config(text).scheduler.slurm.qos == ("low" if name == "qos" else "")


@pytest.mark.parametrize(
    ("more", "bounds_s"),
    [("", ("17", "47")), ("PreemptExemptTime = 00:01:30\n", ("107", None))],
)
def test_the_bound_is_read_as_check_tells_it(tmp_path, more, bounds_s):
    slurm = slurm_world.World(tmp_path)
    slurm.file("config", slurm_world.CONFIG + more)
    sentences = [
        match.groups() for _, words in slurm.scavenger().check() if (match := BOUND.search(words))
    ]
    assert sentences == [bounds_s]
