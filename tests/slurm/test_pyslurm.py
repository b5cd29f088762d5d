"""pyslurm on a real Slurm: the same tables as from the commands. It needs pyslurm of this Slurm's
release, in the environment of the tests; skipped with the reason without it.
"""

from __future__ import annotations

import pytest

from scavenger.batch.commands import CommandPolicy, Commands
from scavenger.slurm.bindings import PyslurmSource
from scavenger.slurm.source import SlurmCommandSource, asking_environment
from tests.slurm.cluster import missing, release
from tests.slurm.test_leases import scavenger
from tests.slurm.test_shapes import here, make_requests, take
from tests.slurm.test_slots import SHARED
from tests.waiting import PATIENCE_S

PREFIX = "malletrain-t-"
CLOSED = """
PartitionName=closed Nodes=n[1-2] State=DOWN
PartitionName=hidden Nodes=n[2-3] Hidden=YES
"""


def commands_of(environment):
    return Commands(CommandPolicy(timeout_s=PATIENCE_S), asking_environment(environment))


@pytest.fixture
def slurm(cluster):
    """Call it to start a Slurm, with the options of ``cluster``."""

    def start(*arguments, **options):
        made = cluster(*arguments, **options)
        if why := PyslurmSource(commands_of(made.environment), release()).trouble():
            pytest.skip(why)
        return made

    if not missing():
        return start
    return cluster


def tables(source):
    """The lines of a poll's tables, each with the kind of table. The order of lines is no
    difference, nor are the sockets that sinfo prints behind GRES.
    """
    nodes, jobs, reservations = source.read(PREFIX)
    return {
        *(
            ("node", name, group._replace(gres=group.gres.partition("(")[0]))
            for name, group in nodes.nodes.items()
        ),
        *(("partitions", name, tuple(sorted(of))) for name, of in nodes.partitions.items()),
        *((kind, job.id, job) for kind, table in jobs._asdict().items() for job in table),
        *(("reservation", one.name, one) for one in reservations),
    }


def test_the_same_tables_as_from_the_commands(slurm):
    one = slurm(9, partitions=CLOSED, **SHARED)

    def submit(*options, partition="batch", command="sleep 600"):
        return one.submit(command, *options, partition=partition)

    def reserve(name, nodes, start, flags):
        one.run(
            *("scontrol", "create", "reservation", f"ReservationName={name}", "Duration=60"),
            *("Users=root", nodes, f"StartTime={start}", f"Flags={flags}"),
        )

    lease = ("--nodelist=n2", "--exclusive", "--mem=0", f"--job-name={PREFIX}l1-3", "--array=0-2%1")
    submit("--nodelist=n1", "--gres=gpu:1", "--cpus-per-task=2", "--mem=300", "--time=10")
    submit(*lease, partition="preemptable")
    ended = submit("--nodelist=n3", f"--job-name={PREFIX}l4", partition="preemptable", command="")
    suspended = submit("--nodelist=n7", "--exclusive")
    one.until(
        lambda: sum(state == "RUNNING" for state, _, _ in one.jobs().values()) == 3, "three run"
    )
    one.until(lambda: one.jobs()[ended][0] == "COMPLETED", "a lease has ended")
    submit("--job-name=a|b", "--nodelist=n1", "--exclusive", "--nodes=1-2", "--account=phys")
    submit("--begin=now+1hours", "--array=0-9%2")
    submit("--begin=now+1hours", "--nodes=2-4")
    one.run("sbatch", "-N1", "--begin=now+1hours", ":", "-N2", "--begin=now+1hours", "--wrap=true")
    submit("--hold", "--partition=batch,preemptable")
    one.run("scontrol", "suspend", suspended)
    one.run("scontrol", "update", "NodeName=n[1,3]", "State=DRAIN", "Reason=fan of n3")
    one.run("scontrol", "update", "NodeName=n8", "State=DOWN", "Reason=dead")
    reserve("later", "Nodes=n4", "now+1hours", "MAINT")
    reserve("daily", "Nodes=n4", "now+3hours", "DAILY,PURGE_COMP=5")
    reserve("replaced", "NodeCnt=1", "now+5hours", "REPLACE_DOWN")
    reserve("maintenance", "Nodes=n5", "now", "MAINT,IGNORE_JOBS")
    reserve("present", "Nodes=n6", "now", "FLEX")
    reserve("dead", "Nodes=n8", "now", "MAINT,IGNORE_JOBS")
    commands = commands_of(one.environment)
    by_commands, by_pyslurm = SlurmCommandSource(commands), PyslurmSource(commands, release())

    def states():
        return {name: group.state for name, group in by_commands.read(PREFIX)[0].nodes.items()}

    one.until(lambda: (states()["n5"], states()["n6"]) == ("maint", "reserved"), "both are seen")
    # Slurm goes on planning: what it says before and after is what pyslurm has to say.
    before, read, after = None, None, tables(by_commands)
    while before != after:
        before, read, after = after, tables(by_pyslurm), tables(by_commands)
    assert sorted(read - after) == sorted(after - read), "only pyslurm, and only the commands"
    assert states() == {
        "n1": "draining",
        "n2": "allocated",
        "n3": "drained",
        "n4": "idle",
        "n5": "maint",
        "n6": "reserved",
        "n7": "mixed",
        "n8": "down$",
        "n9": "idle",
    }
    assert {job.state for kind, _, job in after if kind == "ours"} == {
        "RUNNING",
        "PENDING",
        "COMPLETED",
    }
    kinds = [kind for kind, _, _ in after]
    assert [kinds.count(kind) for kind in ("pending", "suspended", "reservation")] == [6, 1, 6]


def test_tasks_of_an_array_are_leases_as_with_the_commands(slurm, root):
    """The first one has the number 0."""
    one = slurm(2, grace=3600)
    by_pyslurm = scavenger(one, api="auto", shape="array")
    assert all(works for works, _ in by_pyslurm.check()), by_pyslurm.check()
    assert by_pyslurm.source_name == "pyslurm"
    requests, marks = make_requests(root, "n1", "n2")
    take(one, by_pyslurm, requests, marks)
    assert {job.id.partition("_")[2] for job in by_pyslurm.source.read(PREFIX)[1].ours} == {
        "0",
        "1",
    }
    assert sorted(here(by_pyslurm).values()) == ["n1", "n2"]
    by_pyslurm.give_back(by_pyslurm.poll().leases)
    one.until(lambda: not one.leases(), "both end")
