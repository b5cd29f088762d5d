import pytest

from scavenger.batch.settings import BatchSettings
from scavenger.interface import SchedulerError
from scavenger.pbs.job import PbsLeaseOptions, job_id, qsub, select_of, sum_of, walltime
from scavenger.pbs.parse import RawNode
from scavenger.pbs.source import asking_environment, submitting_environment


def test_job_ids():
    assert job_id("123.pbs0\n") == "123.pbs0"
    assert job_id("a hook says hello\n22[].server.example.org\n") == "22[].server.example.org"
    assert job_id("Project x:\n7\n22.pbs0\nThank you.\n") == "22.pbs0"
    for text in ("", "qsub: waiting", "12x", "Job 7"):
        with pytest.raises(SchedulerError, match="is no job id"):
            job_id(text)


def test_what_a_host_has():
    assert sum_of("ncpus", [{"ncpus": 2}, {"ncpus": "3"}, {}]) == "5"
    assert (
        sum_of("mem", [{"mem": "2gb"}, {"mem": "1024kb"}, {"mem": "1mw"}])
        == f"{2 * 1024**2 + 1024 + 8 * 1024}kb"
    )
    # Of each vnode the whole megabytes: PBS's scheduler has no more to give.
    assert sum_of("mem", [{"mem": "24684092kb"}, {"mem": "2047kb"}]) == "24684544kb"
    assert sum_of("vmem", [{"vmem": "2047kb"}]) == "2047kb"
    assert sum_of("mem", [{"mem": "0b"}]) == sum_of("ngpus", [{}]) == ""
    vnodes = [("a[0]", RawNode(resources_available={"ncpus": 2, "mem": "0b"}))]
    assert select_of(PbsLeaseOptions(), "a", vnodes) == "1:host=a:ncpus=2"
    assert (
        select_of(PbsLeaseOptions(resources=(), select="system=p"), "a", vnodes)
        == "1:host=a:system=p"
    )
    with pytest.raises(SchedulerError, match="cannot stand in a request"):
        select_of(PbsLeaseOptions(), "a:b", vnodes)


def test_walltimes():
    assert walltime(3723.9) == "01:02:03"
    assert walltime(360000) == "100:00:00"


def test_names_and_walltimes_of_qsub():
    words = qsub(
        BatchSettings("t", "", PbsLeaseOptions(), time_min_s=60.0),
        name="n" * 300,
        select="1",
        limit_s=120.0,
        rerunnable=True,
    )
    assert words[words.index("-N") + 1] == "n" * 230
    assert words[words.index("-r") + 1] == "y"
    assert {"min_walltime=00:01:00", "max_walltime=00:02:00"} <= set(words)
    words = qsub(
        BatchSettings("t", "", PbsLeaseOptions(), time_min_s=120.0),
        name="n",
        select="1",
        limit_s=120.0,
        rerunnable=False,
    )
    assert "walltime=00:02:00" in words


CONTACT = {
    "PBS_SERVER": "s",
    "PBS_AUTH_METHOD": "munge",
    "PBS_ENCRYPT_METHOD": "tls",
    "PBS_BATCH_SERVICE_PORT": "25001",
}
"""What a client needs to reach a server that is not that of /etc/pbs.conf."""


def test_the_environment_of_commands(tmp_path):
    conf = tmp_path / "pbs.conf"
    conf.write_text(f"PBS_SERVER=s\nPBS_EXEC={tmp_path}/pbs\n")
    mine = {
        "PATH": "/nowhere",
        **CONTACT,
        "PBS_JOBID": "7",
        "PBS_O_HOME": "/h",
        "PBS_PUBLIC_HOST_NAME": "login1",
        "LC_ALL": "de_DE",
        "TZ": "Asia/Tokyo",
        "HOME": "/h",
    }
    asking = asking_environment(mine, conf)
    assert asking["PATH"] == f"/nowhere:{tmp_path}/pbs/bin:/opt/pbs/bin"
    assert (asking["TZ"], asking["LC_ALL"]) == ("UTC0", "C")
    assert {k: v for k, v in asking.items() if k.startswith("PBS_")} == CONTACT
    submitting = submitting_environment(asking, mine)
    assert (submitting["TZ"], submitting["LC_ALL"]) == ("Asia/Tokyo", "de_DE")
    assert "TZ" not in submitting_environment(asking, {})
    (tmp_path / "qstat").write_text("#!/bin/sh\n")
    (tmp_path / "qstat").chmod(0o755)
    assert asking_environment({"PATH": str(tmp_path)}, conf)["PATH"] == str(tmp_path), (
        "the commands are there already"
    )
