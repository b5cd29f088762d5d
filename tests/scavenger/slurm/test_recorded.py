"""What releases of Slurm print, recorded by ``python -m tests.slurm.record``: one scene, the same
facts out of each.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scavenger.batch.slots import CPUS, MEMORY_MB
from scavenger.interface import LeaseState
from scavenger.slurm.associations import parse_associations
from scavenger.slurm.due_jobs import due_jobs
from scavenger.slurm.hosts import read_hosts
from scavenger.slurm.parse import (
    SlurmJobTable,
    read_jobs,
    read_nodes,
    read_reservations,
    read_steps,
)
from scavenger.slurm.site import read_site
from scavenger.slurm.state import lease_of, node_facts

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))
PREFIX = "malletrain-t-"


@pytest.fixture(scope="module", params=RECORDED, ids=lambda path: path.stem)
def release(request):
    """Name of the release, and its answers."""
    return request.param.stem, json.loads(request.param.read_text())


def site(answers):
    return read_site(answers["config"], answers["partitions"], answers["sdiag"])


def test_nodes_and_reservations(release):
    _, answers = release
    table = read_nodes(answers["sinfo"], "MARK")
    assert {name: group.base for name, group in table.nodes.items()} == {
        "n1": "mixed",
        "n2": "allocated",
        "n3": "drained",
        "n4": "idle",
    }
    assert {group.gres for group in table.nodes.values()} == {"gpu:4"}
    assert table.partitions["n4"] == ["batch", "preemptable"]
    [reservation] = read_reservations(answers["reservations"])
    assert (reservation.name, reservation.nodes, reservation.maintenance) == ("r1", "n4", True)
    assert reservation.end - reservation.start == 600
    now = reservation.start - 3600
    facts = node_facts(table, SlurmJobTable([], [], []), [reservation], {}, {}, now)
    assert facts["n3"].drained == "it is drained (fan of n3)"
    assert facts["n4"].idle
    assert facts["n4"].reserved_from == reservation.start


def test_jobs(release):
    _, answers = release
    table = read_jobs(answers["squeue"], "MARK", PREFIX)
    [lease] = table.ours
    assert (lease.state, lease.node_list, lease.user) == ("RUNNING", "n2", "root")
    assert (lease.partition, lease.account, lease.batch_host) == ("preemptable", "root", "n2")
    assert lease.end - lease.start == 60
    [waiting] = table.pending
    assert (waiting.name, waiting.reason, waiting.planned_on) == ("a|b", "Resources", "n1")
    assert waiting.requested_nodes == "n1"
    assert waiting.start >= waiting.submitted + 59
    due = due_jobs(table.pending, site(answers), "preemptable", waiting.start)
    assert [job.id for job in due] == [waiting.id]
    assert read_steps(answers["steps"]) == {}, "batch scripts are no steps"


def test_a_preempted_lease_has_ended(release):
    _, answers = release
    [job] = read_jobs(answers["squeue preempted"], "MARK", PREFIX).ours
    lease = lease_of("l1", job, job.end, 6.0)
    assert (lease.state, lease.reason) == (LeaseState.ENDED, "preempted")
    assert lease.ended > lease.started


def test_the_configuration(release):
    name, answers = release
    read = site(answers)
    assert read.version == tuple(map(int, name.split(".")[:2]))
    assert (read.preempt_type, read.preempt_mode) == ("partition_prio", "REQUEUE")
    assert read.user_signal
    assert 1.0 <= read.backfill_cycle_s < 10.0, "bf_interval=1, and the last cycle"
    assert (read.kill_wait_s, read.array_size, read.hidden) == (2.0, 1001, frozenset())
    batch, low = read.partitions["batch"], read.partitions["preemptable"]
    assert [(p.tier, p.grace_s, p.qos, len(p.nodes)) for p in (batch, low)] == [
        (10, 0.0, "", 4),
        (1, 6.0, "", 4),
    ]
    assert [read.preempt_mode_of(p) for p in ("batch", "preemptable")] == ["OFF", "CANCEL"]
    assert read.settings["SelectType"] == "select/cons_tres"
    assert "MEMORY" in read.settings["SelectTypeParameters"]


def test_what_hosts_have_and_what_jobs_have_of_it(release):
    _, answers = release
    hosts = read_hosts(answers["nodes"])
    assert {tuple(use.total[r] for r in (CPUS, MEMORY_MB, "gpu")) for use in hosts.values()} == {
        (8, 2000, 4)
    }
    assert {
        name: tuple(use.used[r] for r in (CPUS, MEMORY_MB, "gpu")) for name, use in hosts.items()
    } == {
        "n1": (2, 300, 1),
        "n2": (8, 2000, 4),
        "n3": (0, 0, 0),
        "n4": (0, 0, 0),
    }
    assert not any(use.closed for use in hosts.values())


def test_accounts(release):
    _, answers = release
    read = parse_associations(answers["associations"], answers["users"])
    assert read.account("root") == "root"
    assert read.account_shares == {"all": 0.5}
    assert answers["qos"] == "normal|\n"
