"""How long a main job may wait for a lease, from what Slurm says of itself."""

from __future__ import annotations

import pytest

from scavenger.slurm.longest_wait import longest_wait
from scavenger.slurm.site import read_site
from tests.scavenger.slurm import slurm_world as world
from tests.scavenger.slurm.slurm_world import World

EXEMPT = "PreemptExemptTime       = 00:01:30\n"


@pytest.mark.parametrize(
    ("config", "partition", "qos", "exempt_of", "exempt"),
    [
        ("", "", "", {}, (0.0, "PreemptExemptTime")),
        ("PreemptExemptTime = 00:00:00\n", "", "", {}, (0.0, "PreemptExemptTime")),
        ("PreemptExemptTime = UNLIMITED\n", "", "", {}, (0.0, "PreemptExemptTime")),
        ("PreemptExemptTime =\n", "", "", {}, (0.0, "PreemptExemptTime")),
        (EXEMPT, "", "", {}, (90.0, "PreemptExemptTime")),
        (EXEMPT, "", "low", {"low": None, "normal": 600.0}, (90.0, "PreemptExemptTime")),
        (EXEMPT, "", "low", {"low": 0.0}, (0.0, "PreemptExemptTime of QOS low")),
        ("", "", "low", {"low": 60.0}, (60.0, "PreemptExemptTime of QOS low")),
        ("", "", "", {"normal": 60.0}, (60.0, "PreemptExemptTime of QOS normal")),
        (
            "",
            "QoS=part",
            "low",
            {"low": 0.0, "part": 30.0},
            (30.0, "PreemptExemptTime of QOS part"),
        ),
    ],
)
def test_exempt_times_of_cluster_partition_and_qos(config, partition, qos, exempt_of, exempt):
    partitions = world.PARTITIONS.replace("PartitionName=preemptable", f"{{}} {partition}")
    partitions = partitions.format("PartitionName=preemptable")
    site = read_site(world.CONFIG + config, partitions, world.SDIAG)
    wait = longest_wait(site, "preemptable", qos, exempt_of)
    assert (wait.exempt_s, wait.exempt_by) == exempt
    assert (wait.grace_s, wait.kill_wait_s) == (10.0, 5.0)
    assert wait.seconds == pytest.approx(exempt[0] + 10 + 5 + 2.83)


def test_check_says_the_number_and_refuses_what_keeps_leases(tmp_path):
    slurm = World(tmp_path)
    slurm.tools.runs(
        "sbatch", 'case "$*" in *--test-only*) [ -f "$here/sbatch.mode" ] || exit 0;; esac'
    )
    sentences = [s for works, s in slurm.scavenger().check() if works and "at the longest" in s]
    assert sentences == [
        "A job waits 17 s for a lease at the longest: 10 s of grace, 5 s of KillWait for a lease "
        "that does not end by itself, 2 s until Slurm looks again. A heterogeneous job waits up to "
        "47 s, because Slurm puts off its components while it preempts for them."
    ]
    slurm.file("config", world.CONFIG + EXEMPT)
    (sentence,) = [s for works, s in slurm.scavenger().check() if not works]
    assert sentence.startswith(
        "A job may wait 107 s for a lease: in its first 90 s Slurm preempts none"
    )
    assert "(PreemptExemptTime)" in sentence


PROGRAMS = "Prolog = {}\nPrologSlurmctld = {}\nEpilog = {}\nEpilogSlurmctld = {}\n"
NONE = "(null)"


@pytest.mark.parametrize(
    ("config", "epilog", "prolog"),
    [
        (PROGRAMS.format(NONE, NONE, NONE, NONE), "", ""),
        (PROGRAMS.format(NONE, NONE, "/e", NONE), "The time of Epilog comes", ""),
        (
            PROGRAMS.format("/p", NONE, "/e", "/f"),
            "The time of Epilog and EpilogSlurmctld comes",
            "while Prolog runs",
        ),
        # Slurm 24.05 and later number the programs.
        ("Epilog[0] = /e\nEpilog[1] = /f\nProlog[0] = /p\n", "Epilog comes", "while Prolog runs"),
        ("PrologSlurmctld[0] = /p\n", "", "while PrologSlurmctld runs"),
    ],
)
@pytest.mark.parametrize(
    ("timeout", "limit"),
    [
        ("", "without a limit, as PrologEpilogTimeout is not set"),
        ("PrologEpilogTimeout = 65534\n", "without a limit"),
        ("PrologEpilogTimeout = 90\n", "each 90 s at most (PrologEpilogTimeout)"),
    ],
)
def test_programs_of_the_site_come_on_top_of_the_sum(
    tmp_path, config, epilog, prolog, timeout, limit
):
    slurm = World(tmp_path)
    slurm.file("config", world.CONFIG + config + timeout)
    sentences = [s for works, s in slurm.scavenger().check() if works and "of this sum" in s]
    ended = [s for s in sentences if s.startswith("The time of Epilog")]
    assert (epilog in ended[0] and limit in ended[0]) if epilog else ended == []
    started = [s for s in sentences if s.startswith("A lease that is preempted while")]
    assert (prolog in started[0] and limit in started[0]) if prolog else started == []


@pytest.mark.parametrize(
    ("config", "seconds"), [("", "60 s"), ("UnkillableStepTimeout = 180 sec\n", "180 s")]
)
def test_processes_that_do_not_end_come_on_top_of_the_sum(tmp_path, config, seconds):
    slurm = World(tmp_path)
    slurm.file("config", world.CONFIG + config)
    [sentence] = [s for works, s in slurm.scavenger().check() if "UnkillableStepTimeout" in s]
    assert f"after {seconds} (UnkillableStepTimeout) Slurm drains it" in sentence


def test_complete_wait_is_in_the_sum(tmp_path):
    slurm = World(tmp_path)
    slurm.file("config", f"{world.CONFIG}CompleteWait            = 4 sec\n")
    [sentence] = [s for works, s in slurm.scavenger().check() if "at the longest" in s]
    assert sentence.startswith("A job waits 21 s for a lease at the longest:")
    assert "until Slurm looks again, 4 s of CompleteWait. A heterogeneous" in sentence
