"""A lease is never longer than the jobs that its partition and its QOS take."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from scavenger.batch.commands import (
    CommandError,
    CommandPolicy,
    CommandResult,
    Commands,
    NoAnswerError,
)
from scavenger.batch.settings import BatchSettings
from scavenger.interface import LeaseState
from scavenger.slurm.job import SlurmLeaseOptions
from scavenger.slurm.limits import with_accounting
from scavenger.slurm.site import LeaseAssociation, read_site
from tests.scavenger.slurm import slurm_world as world
from tests.scavenger.slurm.slurm_world import World
from tests.scavenger.slurm.test_leases import request

SLURMDBD = "AccountingStorageType = accounting_storage/slurmdbd\n"
ENFORCED = f"{SLURMDBD}AccountingStorageEnforce = associations,limits,qos\n"


@pytest.fixture
def slurm(tmp_path):
    return World(tmp_path)


def configured(slurm, max_time="1-00:00:00", qos="N/A", walls="", associations=""):
    partitions = world.PARTITIONS.replace("MaxTime=1-00:00:00", f"MaxTime={max_time} QoS={qos}")
    slurm.file("partitions", partitions)
    slurm.file("config", world.CONFIG + ENFORCED)
    slurm.tools.runs(
        "sacctmgr",
        f"case \"$*\" in *' user '*) echo phys;; *' assoc '*maxwall*) printf '{associations}';; "
        f"*' qos '*maxwall*) printf '{walls}';; esac; exit 0",
    )


@pytest.mark.parametrize(
    ("max_time", "qos", "walls", "minutes", "by"),
    [
        ("UNLIMITED", "N/A", "", 720, None),
        ("01:00:00", "N/A", "", 60, "MaxTime of partition preemptable"),
        ("01:00:00", "N/A", "low|00:30:00\\nnormal|\\n", 30, "MaxWall of QOS low"),
        ("01:00:00", "part", "low|02:00:00\\npart|00:10:00\\n", 10, "MaxWall of QOS part of part"),
        ("2-00:00:00", "part", "low|\\npart|\\n", 720, None),
    ],
)
def test_the_limit_is_taken_and_told(slurm, max_time, qos, walls, minutes, by):
    configured(slurm, max_time, qos, walls)
    lease = SlurmLeaseOptions(partition="preemptable", qos="low")
    scavenger = slurm.ready(lease=lease)
    [one] = scavenger.take([request(1)])
    assert one.state == LeaseState.PENDING
    assert f"--time={minutes} " in slurm.tools.calls("sbatch")[-1]
    sentences = [s for works, s in scavenger.check() if works and "sooner than time_limit" in s]
    assert len(sentences) == (by is not None)
    assert by is None or by in sentences[0]


@pytest.mark.parametrize(
    ("qos", "walls", "associations", "minutes", "by"),
    [
        ("", "normal|00:20:00\\n", "me|||normal,low|\\n", 20, "MaxWall of QOS normal"),
        ("", "normal|00:20:00\\n", "", 720, None),
        ("", "low|00:10:00\\n", "me||low|normal,low|\\n", 10, "MaxWall of QOS low"),
        ("", "low|00:10:00\\n", "me|||low|\\n", 10, "MaxWall of QOS low"),
        ("", "normal|\\n", "me|||normal|00:30:00\\n", 30, "association with account phys"),
        ("low", "low|\\n", "me|||normal,low|00:30:00\\n", 30, "association with account phys"),
        ("low", "low|02:00:00\\n", "me|||low|00:30:00\\n", 120, "MaxWall of QOS low"),
        ("", "", "me||||02:00:00\\nme|preemptable|||00:40:00\\n", 40, "association with"),
        ("", "", "me|other|||00:40:00\\nann||||00:50:00\\n", 720, None),
    ],
    ids=[
        "default QOS of the cluster",
        "an association that is not shown",
        "default QOS of the association",
        "the only QOS of the association",
        "the association",
        "the association beside a QOS without a limit",
        "a QOS lifts the limit of the association",
        "an association for the partition",
        "associations for others",
    ],
)
def test_the_limits_that_nobody_named_are_taken_and_told(
    slurm, qos, walls, associations, minutes, by
):
    """Those of the QOS that Slurm chooses, and of the association and its parents."""
    configured(slurm, walls=walls, max_time="UNLIMITED", associations=associations)
    scavenger = slurm.ready(lease=SlurmLeaseOptions(partition="preemptable", qos=qos))
    [one] = scavenger.take([request(1)])
    assert one.state == LeaseState.PENDING
    assert f"--time={minutes} " in slurm.tools.calls("sbatch")[-1]
    sentences = [s for works, s in scavenger.check() if works and "sooner than time_limit" in s]
    assert len(sentences) == (by is not None)
    assert by is None or by in sentences[0]


def test_the_qos_of_several_users_is_not_known_without_an_account(slurm):
    """Each has a default account of their own, whose QOS need not be normal."""
    configured(slurm, max_time="UNLIMITED", walls="normal|00:20:00\\n")
    scavenger = slurm.ready(submit_as=("env", "AS={owner}"))
    scavenger.take([request(1, owner="ann")])
    assert "--time=720 " in slurm.tools.calls("sbatch")[-1]
    assert not any("sooner than time_limit" in sentence for _, sentence in scavenger.check())


@dataclass
class Sacctmgr(Commands):
    """sacctmgr, of which one entity is not reported."""

    entity: str = ""
    error: type[CommandError] = CommandError
    accounts: str = "phys\n"
    entities: list[str] = field(default_factory=list)

    def run(self, argv, **_):
        self.entities.append(argv[3])
        if argv[3] == self.entity:
            raise self.error("slurmdbd is away.")
        associations = "me|||normal|02:00:00\n"
        answers = {"qos": "normal|00:20:00\n", "user": self.accounts, "assoc": associations}
        return CommandResult(tuple(argv), 0, answers[argv[3]], "", 0.0)


def test_the_default_qos_counts_where_no_limits_are_enforced_too():
    """Slurm gives it to jobs, for example for PreemptExemptTime."""
    settings = BatchSettings("t", "", SlurmLeaseOptions(partition="preemptable"), user="me")
    site = read_site(
        world.CONFIG + SLURMDBD + "AccountingStorageEnforce = associations,qos\n", world.PARTITIONS
    )
    first = with_accounting(Sacctmgr(), site, settings, None)
    assert first.max_wall == {}
    assert first.association == LeaseAssociation("phys", "normal", {})
    without = Sacctmgr()
    assert with_accounting(without, read_site(world.CONFIG, ""), settings, None).max_wall == {}
    assert without.entities == []


@pytest.mark.parametrize(
    ("accounts", "account"),
    [("phys\nphys\n", "phys"), ("phys\nchem\n", ""), ("\n", ""), ("", "")],
)
def test_an_answer_that_names_several_default_accounts_names_none(accounts, account):
    settings = BatchSettings("t", "", SlurmLeaseOptions(partition="preemptable"), user="me")
    site = read_site(world.CONFIG + ENFORCED, world.PARTITIONS)
    first = with_accounting(Sacctmgr(accounts=accounts), site, settings, None)
    assert first.association.account == account


@pytest.mark.parametrize("error", [CommandError, NoAnswerError])
@pytest.mark.parametrize("entity", ["qos", "user", "assoc"])
def test_limits_stay_while_slurmdbd_does_not_report_them(entity, error):
    settings = BatchSettings("t", "", SlurmLeaseOptions(partition="preemptable"), user="me")
    site = read_site(world.CONFIG + ENFORCED, world.PARTITIONS)
    first = with_accounting(Sacctmgr(), site, settings, None)
    assert first.max_wall == {"normal": 1200.0}
    assert first.association == LeaseAssociation("phys", "normal", {"": 7200.0})
    commands = Sacctmgr(CommandPolicy(tries=2), entity=entity, error=error)
    assert with_accounting(commands, site, settings, first) == first
    assert commands.entities.count(entity) == 1, "leases wait meanwhile"
    if error is NoAnswerError:
        assert commands.entities[-1] == entity, "the next one would not be answered either"


def test_a_limit_below_the_shortest_lease_is_told_before_anything_is_asked_for(slurm):
    configured(slurm, "00:05:00")
    scavenger = slurm.ready(min_lease_s=600.0)
    [one] = scavenger.take([request(1)])
    assert one.state == LeaseState.ENDED
    assert "takes jobs of 300 s at most where leases run (MaxTime of partition pre" in one.reason
    assert slurm.tools.calls("sbatch") == []
    assert any(not works and "none could start" in s for works, s in scavenger.check())


def test_a_lease_asks_for_no_more_memory_than_its_partition_gives(slurm):
    configured(slurm)
    scavenger = slurm.ready()
    scavenger.take([request(1)])
    assert "--exclusive --mem=0 " in slurm.tools.calls("sbatch")[-1]
    slurm.file(
        "partitions", world.PARTITIONS.replace("MaxTime=1-", "MaxMemPerNode=1000 MaxTime=1-")
    )
    scavenger = slurm.ready()
    scavenger.take([request(2)])
    assert "--exclusive --mem=1000 " in slurm.tools.calls("sbatch")[-1]
    assert any("1,000 MB of a node's memory" in s for works, s in scavenger.check() if works)
    trial = slurm.tools.calls("sbatch")[-1]
    assert "--exclusive --mem=1000 " in trial
    assert trial.endswith("--test-only")
