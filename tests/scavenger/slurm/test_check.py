"""``malletrain check`` on a Slurm: every thing that would not work is a sentence that says what to
change.
"""

import pytest

from scavenger.slurm.job import SlurmLeaseOptions
from tests.scavenger.slurm import slurm_world as world
from tests.scavenger.slurm.slurm_world import World


@pytest.fixture
def slurm(tmp_path):
    made = World(tmp_path)
    # sbatch --test-only speaks on stderr and submits nothing.
    made.tools.runs(
        "sbatch", 'case "$*" in *--test-only*) [ -f "$here/sbatch.mode" ] || exit 0;; esac'
    )
    return made


def troubles(slurm, **settings):
    return [sentence for works, sentence in slurm.scavenger(**settings).check() if not works]


def test_a_good_site(slurm):
    findings = slurm.scavenger(needed_grace_s=9.0).check()
    assert all(works for works, _ in findings), findings
    text = " ".join(sentence for _, sentence in findings)
    for words in (
        "Slurm 22.05",
        "8 nodes",
        "batch preempt those of preemptable",
        "10 s to leave",
        "could be submitted",
        "2 s",
    ):
        assert words in text
    assert slurm.tools.calls("sbatch")[0].endswith("--test-only")
    assert "--nodelist" not in slurm.tools.calls("sbatch")[0]


@pytest.mark.parametrize(
    ("config", "partitions", "words"),
    [
        (("22.05.8", "20.02.7"), None, "is older than 20.11"),
        (("partition_prio", "none"), None, "PreemptType=preempt/partition_prio"),
        (None, ("PreemptMode=CANCEL", "PreemptMode=OFF"), "set PreemptMode=CANCEL"),
        (None, ("PreemptMode=CANCEL", "PreemptMode=SUSPEND"), "keep their memory"),
        (None, ("PriorityTier=10", "PriorityTier=1"), "a higher PriorityTier"),
        (None, ("GraceTime=10", "GraceTime=2"), "set GraceTime=9"),
        (
            None,
            ("PartitionName=preemptable", "PartitionName=other"),
            "no partition preemptable; set partition",
        ),
        (None, ("State=UP", "State=DOWN"), "scontrol update PartitionName=preemptable State=UP"),
        (("preempt/partition_prio", "preempt/qos"), None, "set qos in [scheduler.slurm]"),
    ],
)
def test_what_would_not_work(slurm, config, partitions, words):
    slurm.file("config", world.CONFIG.replace(*config) if config else world.CONFIG)
    slurm.file(
        "partitions", world.PARTITIONS.replace(*partitions) if partitions else world.PARTITIONS
    )
    findings = troubles(slurm, needed_grace_s=9.0)
    assert any(words in sentence for sentence in findings), findings


@pytest.mark.parametrize(
    ("config", "partitions"),
    [
        (("= REQUEUE", "= PRIORITY,REQUEUE"), None),
        (None, ("PreemptMode=OFF", "PreemptMode=PRIORITY")),
    ],
    ids=["cluster", "partition"],
)
def test_preemption_by_priority_needs_leases_of_low_priority(slurm, config, partitions):
    """PreemptMode=PRIORITY of Slurm 25.05, as scontrol of 25.05.8 prints it."""
    slurm.file("config", world.CONFIG.replace(*config) if config else world.CONFIG)
    slurm.file(
        "partitions", world.PARTITIONS.replace(*partitions) if partitions else world.PARTITIONS
    )
    [sentence] = troubles(slurm)
    assert sentence.startswith("Jobs of batch preempt a lease only if its priority is not higher")
    assert "set nice in [scheduler.slurm]" in sentence
    nice = SlurmLeaseOptions(partition="preemptable", nice=1_000_000)
    assert troubles(slurm, lease=nice) == []


def test_gpus_that_leases_leave_unused(slurm):
    slurm.tools.answers(
        "sinfo", world.sinfo("preemptable|up|idle|(null)|gpu:a100:4(S:0-1)|n[1-8]|none")
    )
    for lease, expected in (
        ({}, True),
        ({"gres": "gpu:4"}, False),
        ({"options": ("--gpus-per-node=4",)}, False),
    ):
        findings = slurm.scavenger(
            lease=SlurmLeaseOptions(partition="preemptable", **lease)
        ).check()
        assert any("gpu:a100:4" in sentence for _, sentence in findings) is expected


def test_a_refused_submission_is_told_in_slurms_words(slurm):
    slurm.tools.fails(
        "sbatch",
        "sbatch: error: allocation failure: Invalid account or account/partition combination "
        "specified",
    )
    [sentence] = troubles(slurm)
    assert "Invalid account" in sentence
    assert "[scheduler.slurm]" in sentence


def test_a_slurm_that_does_not_answer(slurm):
    slurm.tools.runs("scontrol", 'echo "Unable to contact slurm controller" >&2; exit 1')
    [sentence] = troubles(slurm)
    assert "Slurm cannot be asked" in sentence
    assert "Unable to contact" in sentence


def test_no_partition_is_named(slurm):
    assert (
        "set partition in [scheduler.slurm] to one of batch, preemptable"
        in troubles(slurm, lease=SlurmLeaseOptions())[0]
    )


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        ("normal|scavenge|cluster\nscavenge||cancel\n", ""),
        ("normal||cluster\nscavenge||cancel\n", "sacctmgr modify qos NAME set Preempt+=scavenge"),
        ("normal||cluster\n", "no QOS scavenge; it has normal"),
        (
            "normal|scavenge|priority,requeue\nscavenge||cancel\n",
            "Jobs of QOS normal preempt a lease only if its priority is not higher",
        ),
    ],
)
def test_preemption_by_qos(slurm, tmp_path, printed, words):
    slurm.file("config", world.CONFIG.replace("preempt/partition_prio", "preempt/qos"))
    sacctmgr = slurm.tools.root / "sacctmgr"
    sacctmgr.write_text(f"#!/bin/sh\ncat <<E\n{printed}E\n")
    sacctmgr.chmod(0o755)
    findings = troubles(slurm, lease=SlurmLeaseOptions(qos="scavenge"))
    assert (findings == []) if not words else (words in findings[0]), findings


PARTITION = "PartitionName={} Nodes={} PriorityTier={} PreemptMode={} State={}\n"
NOT_PREEMPTING = "share nodes with preemptable and do not preempt leases"


@pytest.mark.parametrize(
    ("partitions", "waiting", "preempted"),
    [
        ((("long", "n[5-9]", 10, "OFF", "UP"),), "", ""),
        ((("long", "n[5-9]", 1, "OFF", "UP"),), "long", ""),
        ((("long", "n9", 1, "OFF", "UP"), ("short", "n1", 1, "CANCEL", "UP")), "short", ""),
        ((("long", "n1", 1, "OFF", "DOWN"),), "", ""),
        ((("long", "n1", 1, "OFF", "UP"), ("debug", "n2", 0, "OFF", "UP")), "debug, long", ""),
        (
            (("long", "n1", 1, "OFF", "UP"), ("debug", "n2", 0, "CANCEL", "UP")),
            "debug, long",
            "debug",
        ),
    ],
)
def test_partitions_whose_jobs_wait_for_leases_are_named(slurm, partitions, waiting, preempted):
    """One partition that preempts leases is not enough."""
    slurm.file("partitions", world.PARTITIONS + "".join(PARTITION.format(*p) for p in partitions))
    findings = slurm.scavenger(time_limit_s=3600.0).check()
    assert all(works is not False for works, _ in findings), findings
    look = [sentence for works, sentence in findings if works is None]
    named = [sentence for sentence in look if NOT_PREEMPTING in sentence]
    assert [sentence.partition(" share ")[0] for sentence in named] == (
        [f"Jobs of {waiting}"] if waiting else []
    )
    assert all("time_limit in [scheduler.slurm] (3600 s)" in sentence for sentence in named)
    victims = [sentence for sentence in look if sentence.startswith("Leases preempt jobs of")]
    assert [sentence.split(",")[0] for sentence in victims] == (
        [f"Leases preempt jobs of {preempted}"] if preempted else []
    )


def test_qos_whose_jobs_wait_for_leases_are_named(slurm):
    slurm.file("config", world.CONFIG.replace("preempt/partition_prio", "preempt/qos"))
    rows = [f"q{number}||cluster" for number in range(10)]
    printed = "\n".join(["normal|scavenge|cluster", "scavenge||cancel", *rows])
    slurm.tools.answers("sacctmgr", f"{printed}\n")
    findings = slurm.scavenger(lease=SlurmLeaseOptions(qos="scavenge")).check()
    [sentence] = [sentence for works, sentence in findings if works is None]
    assert sentence.startswith("Jobs of QOS q0, q1, q2, q3, q4, q5, q6, q7 and 2 more do not")


def test_backfill_mode_needs_no_preemption(slurm):
    slurm.file("config", world.CONFIG.replace("partition_prio", "none"))
    assert troubles(slurm, backfill=True) == []
    other = world.CONFIG.replace("sched/backfill", "sched/builtin").replace(
        "PrivateData             = none", "PrivateData = jobs"
    )
    slurm.file("config", other)
    findings = troubles(slurm, backfill=True)
    assert "needs SchedulerType=sched/backfill" in findings[0]
    assert "operator's account" in findings[1]


def test_a_damaged_batch_script_is_found(slurm):
    scavenger = slurm.scavenger()
    object.__setattr__(scavenger.settings, "template", "#!/bin/sh\nexec true\n")
    assert any("has no line" in sentence for works, sentence in scavenger.check() if not works)


@pytest.mark.parametrize("lease", [{}, {"gres": "gpu:4"}], ids=["", "GPUs named"])
def test_a_poll_that_would_fail_is_told(slurm, lease):
    """PrivateData=nodes: sinfo shows nothing to a user who is no operator."""
    slurm.tools.answers("sinfo", "")
    slurm.file("config", f"{world.CONFIG}\nPrivateData = nodes,usage\n")
    findings = troubles(slurm, lease=SlurmLeaseOptions(partition="preemptable", **lease))
    assert any("The polls of the daemon fail: " in s and "PrivateData=nodes" in s for s in findings)


@pytest.mark.parametrize(
    ("slurm_user", "level", "works"),
    [("slurm", "None", False), ("slurm", "Operator", True), ("me", "None", True)],
)
def test_reservations_that_are_hidden_are_told_to_who_is_no_operator(
    slurm, slurm_user, level, works
):
    more = f"\nPrivateData = reservations\nSlurmUser = {slurm_user}(64030)\n"
    slurm.file("config", world.CONFIG + more)
    slurm.tools.answers("sacctmgr", f"{level}\n")
    findings = troubles(slurm)
    assert any("maintenance would not be seen" in sentence for sentence in findings) is not works


def test_a_plugin_that_moves_leases_to_another_partition_is_named(slurm):
    line_of = "Job 7 to start at 2026-11-27T22:00:00 using 4 processors on nodes n1 in partition {}"
    for partition, moved in (("long", True), ("preemptable", False)):
        line = f"sbatch: {line_of.format(partition)}"
        slurm.tools.runs("sbatch", f'echo "{line}" >&2')
        sentences = troubles(slurm, needed_grace_s=9.0)
        assert any("would run in partition long" in each for each in sentences) is moved, sentences


def test_priorities_that_slurm_never_preempts(slurm):
    slurm.file(
        "config", f"{world.CONFIG}PreemptParameters = youngest_first,min_exempt_priority=900\n"
    )
    [sentence] = troubles(slurm, needed_grace_s=9.0)
    assert "does not preempt jobs whose priority is above 900" in sentence
    nice = SlurmLeaseOptions(partition="preemptable", nice=10_000)
    assert troubles(slurm, needed_grace_s=9.0, lease=nice) == []


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [("ExclusiveTopo=YES", "set ExclusiveTopo=NO"), ("Exclusive=TOPO", "set Exclusive=NO")],
)
def test_a_partition_whose_jobs_block_their_topology(slurm, setting, remedy):
    slurm.file("partitions", world.PARTITIONS.replace("State=UP", f"{setting} State=UP"))
    [sentence] = troubles(slurm, needed_grace_s=9.0)
    assert f"({setting} of partition preemptable)" in sentence
    assert remedy in sentence


def test_the_cluster_of_a_federation_has_its_leases_alone(slurm):
    """Text of slurm_print_federation (federation_info.c)."""
    slurm.file("config", f"{world.CONFIG}AccountingStorageType = accounting_storage/slurmdbd\n")
    slurm.tools.runs(
        "scontrol",
        'case "$*" in *federation*) printf "Federation: fed\\nSelf:       site:c1:6817 ID:1\\n"; '
        'exit 0;; *config*) cat "$here/config"; exit 0;; '
        '*partition*) cat "$here/partitions"; exit 0;; '
        '*) cat "$here/reservations"; exit 0;; esac',
    )
    sentences = [sentence for _, sentence in slurm.scavenger(needed_grace_s=9.0).check()]
    assert any("belongs to federation fed" in each for each in sentences), sentences
    assert all("--clusters=site" in call for call in slurm.tools.calls("sbatch"))
    calls = [*slurm.tools.calls("squeue"), *slurm.tools.calls("sinfo")]
    assert calls
    assert all("--local" in call for call in calls)
