"""The scavenger on a real Slurm: leases, their words, their signals, planned nodes, other
owners.
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from malletrain.protocol.gpus import count_gpus
from scavenger.batch.commands import CommandPolicy, Commands
from scavenger.batch.rules import GapRules
from scavenger.batch.settings import BatchSettings
from scavenger.interface import LeaseRequest, LeaseState
from scavenger.slurm.job import SlurmLeaseOptions
from scavenger.slurm.scavenger import SlurmScavenger
from scavenger.slurm.source import asking_environment
from tests.selection import every_change
from tests.waiting import PATIENCE_S

TEMPLATE = (Path(__file__).parents[2] / "jobscripts" / "slurm" / "lease.sh").read_text()
NASTY = [
    "a b",
    "$(touch hacked)",
    "`id`",
    'it\'s "q"',
    "new\nline",
    "\r\n#SBATCH --partition=batch\r\n",
    "",
    "ü \\ \\n",
    "-x",
    "*",
]
TELL = (
    "import json, os, sys, time; json.dump([sys.argv[2:], dict(os.environ)], open(sys.argv[1] + "
    "'.new', 'w')); "
    "os.rename(sys.argv[1] + '.new', sys.argv[1]); time.sleep(600)"
)
LEAVE = """
import os, signal, sys, time
def leave(number, frame):
    open(sys.argv[1], "w").close()
    while sys.argv[2:] and not os.path.exists(sys.argv[2]):
        time.sleep(0.05)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
open(sys.argv[1] + ".ready", "w").close()
while True:
    time.sleep(0.05)
"""
GPUS = {
    "select": "select/cons_tres",
    "extra": "GresTypes=gpu",
    "node": "Gres=gpu:2",
    "gres": "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n",
}
"""A machine with two GPUs a node, for as much of them as Slurm wants to see."""


API = os.environ.get("MALLETRAIN_TEST_SLURM_API", "commands")
"""How the scavengers of the tests read Slurm."""


def scavenger(cluster, api=API, **settings):
    settings.setdefault("lease", SlurmLeaseOptions(partition="preemptable"))
    settings.setdefault("idle_for_s", 0.0)
    settings.setdefault("start_within_s", PATIENCE_S)
    settings.setdefault("hold_s", 0.5)
    settings.setdefault("user", getpass.getuser())
    made = BatchSettings(tag="t", template=TEMPLATE, **settings)
    patient = CommandPolicy(timeout_s=PATIENCE_S)
    commands = Commands(patient, asking_environment(cluster.environment))
    return SlurmScavenger(made, commands, api=api, environment=cluster.environment)


def gaps(one):
    return sorted(gap.node for gap in one.poll().gaps)


def states(one):
    return {lease.id: lease.state for lease in one.poll().leases}


@pytest.mark.check
def test_leases_run_what_they_are_told_and_nothing_else(cluster, root):
    slurm = cluster(4)
    one = scavenger(slurm)
    assert all(works for works, _ in one.check()), one.check()
    assert gaps(one) == ["n1", "n2", "n3", "n4"]
    out = root / 'it\'s $(out) "dir"\n'
    out.mkdir()
    requests = [
        LeaseRequest(
            f"l{i}",
            f"n{i}",
            (sys.executable, "-c", TELL, str(out / f"n{i}"), *NASTY),
            {"NASTY": "\n".join(NASTY)},
        )
        for i in (1, 2, 3)
    ]
    as_step = scavenger(slurm, lease=SlurmLeaseOptions(partition="preemptable", launch="step"))
    as_step.poll()
    leases = one.take(requests[:2]) + as_step.take(requests[2:])
    one.poll()
    assert [lease.state for lease in leases] == [LeaseState.PENDING] * 3
    assert [one.take([request])[0].scheduler_id for request in requests] == [
        lease.scheduler_id for lease in leases
    ], "asking twice"
    slurm.until(lambda: len([p for p in out.iterdir() if not p.suffix]) == 3, "the leases run")
    assert set(states(one).values()) == {LeaseState.RUNNING}
    for i in (1, 2, 3):
        words, environment = json.loads((out / f"n{i}").read_text())
        assert words == NASTY
        assert environment["NASTY"] == "\n".join(NASTY)
        assert environment["MALLETRAIN_NODE"] == f"n{i}"
        assert environment["MALLETRAIN_LEASE"] == f"l{i}"
        assert environment["MALLETRAIN_GRACE_S"] == "6"
    assert gaps(one) == ["n4"]
    assert not (root / "hacked").exists()
    # Preempting one lease takes no other along.
    main = slurm.submit("sleep 1", "--nodelist=n1", "--exclusive")
    slurm.until(lambda: states(one)["l1"] is LeaseState.ENDED, "the lease on n1 is over")
    slurm.until(lambda: slurm.jobs()[main][0] in ("RUNNING", "COMPLETED"), "the main job runs")
    assert [states(one)[name] for name in ("l2", "l3")] == [LeaseState.RUNNING] * 2
    one.give_back(one.poll().leases)
    slurm.until(lambda: not slurm.leases(), "the leases are cancelled")
    one.give_back(leases)
    slurm.until(lambda: gaps(one) == ["n1", "n2", "n3", "n4"], "the nodes are gaps again")


@pytest.mark.parametrize(
    "controller",
    every_change(["preempt_send_user_signal", "enable_configless"], "preempt_send_user_signal"),
)
def test_the_signal_of_a_preemption_reaches_the_command_at_once(cluster, root, controller):
    # A lease that ignored its signal would keep its node for an hour.
    slurm = cluster(1, controller=controller, grace=3600)
    one = scavenger(slurm)
    one.poll()
    mark = root / "told"
    one.take([LeaseRequest("l1", "n1", (sys.executable, "-c", LEAVE, str(mark)))])
    slurm.until(lambda: (root / "told.ready").exists(), "the command waits for its signal")
    main = slurm.submit("true", "--exclusive")
    slurm.until(mark.exists, "the command was told")
    slurm.until(lambda: slurm.jobs()[main][0] in ("RUNNING", "COMPLETED"), "the main job runs")


def test_leases_leave_for_a_job_that_lacks_a_node_it_counted_on(cluster, root):
    slurm = cluster(6, grace=600)
    one = scavenger(slurm)
    one.poll()
    marks = {f"l{i}": root / f"told{i}" for i in (1, 2, 3, 4)}
    go = root / "go"
    one.take(
        [
            LeaseRequest(i, f"n{i[1:]}", (sys.executable, "-c", LEAVE, str(path), str(go)))
            for i, path in marks.items()
        ]
    )
    slurm.until(
        lambda: all((root / f"{path.name}.ready").exists() for path in marks.values()),
        "four leases run",
    )
    # It needs four nodes: the two idle ones, and two leases that Slurm preempts. Before those have
    # left, one of the idle ones breaks.
    main = slurm.submit("sleep 600", "--nodes=4", "--exclusive", "--time=20")
    slurm.until(lambda: any(path.exists() for path in marks.values()), "leases are preempted")
    slurm.run("scontrol", "update", "NodeName=n6", "State=DRAIN", "Reason=fan")
    assert "n5" not in gaps(one), "the other one is left to the job"
    go.touch()
    leave_requests = set()
    time_left = {}

    def starts():
        for lease in one.poll().leases:
            if lease.leave_by is not None and lease.gone_at is not None:
                time_left[lease.id] = lease.gone_at - lease.leave_by
        leave_requests.update(one.ender.leave_requests)
        return slurm.jobs()[main][0] == "RUNNING"

    slurm.until(starts, "the main job runs")
    assert len(leave_requests) == 1
    assert time_left.keys() == leave_requests, "the job has waited for it already"
    assert all(0 < seconds < 600 for seconds in time_left.values())
    assert all(marks[lease].exists() for lease in leave_requests), (
        "it got its signal, and was not just killed"
    )
    assert sum(path.exists() for path in marks.values()) == 3


def test_a_lease_leaves_for_a_job_that_slurm_plans_on_a_node_that_leaves_for_another(cluster, root):
    """Slurm takes one lease back for each of two jobs, of which the second needs two nodes."""
    slurm = cluster(5, grace=600)
    one = scavenger(slurm)
    one.poll()
    marks = {f"l{i}": root / f"told{i}" for i in range(1, 6)}
    go = root / "go"
    one.take(
        [
            LeaseRequest(i, f"n{i[1:]}", (sys.executable, "-c", LEAVE, str(path), str(go)))
            for i, path in marks.items()
        ]
    )
    slurm.until(
        lambda: all((root / f"{path.name}.ready").exists() for path in marks.values()),
        "five leases run",
    )
    first = slurm.submit("sleep 600", "--nodes=1", "--exclusive", "--time=20")
    slurm.until(lambda: any(path.exists() for path in marks.values()), "a lease is preempted")
    second = slurm.submit("sleep 600", "--nodes=2", "--exclusive", "--time=20")

    def signalled():
        one.poll()
        return sum(path.exists() for path in marks.values()) == 3

    slurm.until(signalled, "three leases leave for three nodes")
    go.touch()
    slurm.until(
        lambda: {slurm.jobs()[job][0] for job in (first, second)} == {"RUNNING"}, "both jobs run"
    )
    assert sum(path.exists() for path in marks.values()) == 3


@pytest.mark.parametrize("what", every_change(["drained", "reserved"], "reserved"))
def test_leases_leave_nodes_that_are_drained_or_reserved(cluster, root, what):
    slurm = cluster(2, grace=3600)
    one = scavenger(slurm)
    one.poll()
    marks = {f"l{i}": root / f"told{i}" for i in (1, 2)}
    one.take(
        [
            LeaseRequest(i, f"n{i[1:]}", (sys.executable, "-c", LEAVE, str(path)))
            for i, path in marks.items()
        ]
    )
    slurm.until(
        lambda: all((root / f"{path.name}.ready").exists() for path in marks.values()),
        "two leases run",
    )
    assert all(lease.gone_at is None for lease in one.poll().leases)
    if what == "drained":
        slurm.run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=fan")
    else:
        words = "ReservationName=m StartTime=now+10minutes Duration=5 Users=root Nodes=n1"
        slurm.run("scontrol", "create", "reservation", *words.split(), "Flags=MAINT,IGNORE_JOBS")
    seen = {}

    def leaves():
        seen.update({x.id: x for x in one.poll().leases if x.gone_at is not None})
        return (root / "told1").exists()

    slurm.until(leaves, "the lease is told to leave")
    assert list(seen) == ["l1"]
    why = "it is draining (fan)" if what == "drained" else "reservation of its node begins in"
    assert why in seen["l1"].reason
    job = seen["l1"].scheduler_id
    slurm.until(lambda: slurm.jobs()[job][0] == "COMPLETED", "it leaves in order")
    assert not (root / "told2").exists()


def test_planned_nodes_are_left_alone_or_used_for_as_long_as_they_are_free(cluster, root):
    slurm = cluster(3)
    slurm.submit("sleep 600", "--nodelist=n1", "--exclusive", "--time=8")
    slurm.until(lambda: slurm.states()[0] == "allocated", "the first job runs")
    waiting = slurm.submit("true", "-N3", "--exclusive", "--time=5")
    slurm.until(
        lambda: slurm.states()[1:] == ["planned", "planned"],
        "the other nodes are planned for the second",
    )
    careful = scavenger(slurm)
    assert gaps(careful) == []
    [why] = [e.rules for e in careful.poll().explanations if e.node == "n2"]
    [sentence] = [sentence for rule, passed, sentence in why if not passed]
    assert sentence.startswith("it is held for a waiting job, which is expected to start in")
    for name, options in (
        ("backfill", {"backfill": True}),
        ("allowed", {"rules": GapRules(use_planned=True)}),
    ):
        one = scavenger(slurm, time_min_s=60.0, **options)
        assert gaps(one) == ["n2", "n3"]
        [lease] = one.take([LeaseRequest(name, "n2", ("sleep", "600"))])
        slurm.until(
            lambda one=one, name=name: states(one)[name] is LeaseState.RUNNING,
            "the lease runs on a planned node",
        )
        queries = ((lease.scheduler_id, "%e"), (waiting, "%S"))
        ends, starts = (
            float(slurm.run("squeue", "-h", "-j", job, "-o", field, env_time="%s"))
            for job, field in queries
        )
        assert time.time() + 60 < ends <= starts, "it ends before the waiting job starts"
        one.give_back([lease])
        slurm.until(lambda: not slurm.leases(), "the lease is over")


def test_nodes_in_maintenance_drained_or_reserved_are_no_gaps(cluster, root):
    slurm = cluster(4)
    one = scavenger(slurm)
    reserve = ("scontrol", "create", "reservation", "Duration=60", "Users=root")
    began = time.time()
    slurm.run(*reserve, "ReservationName=m", "StartTime=now", "Nodes=n1", "Flags=MAINT")
    slurm.run(*reserve, "ReservationName=s", "StartTime=now+30minutes", "Nodes=n2")
    slurm.run("scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=a fan | is\nbroken")
    slurm.until(lambda: gaps(one) == ["n2", "n4"], "two nodes are gaps")
    polled = one.poll()
    horizons = {gap.node: gap.horizon_s for gap in polled.gaps}
    assert horizons["n2"] <= 1800
    failed = {
        e.node: [rule for rule, passed, _ in e.rules if not passed] for e in polled.explanations
    }
    assert "reservation" in failed["n1"]
    assert "usable" in failed["n3"]
    [lease] = one.take([LeaseRequest("l2", "n2", ("sleep", "600"))])
    limit = slurm.run("squeue", "-h", "-j", lease.scheduler_id, "-o", "%l").strip()
    minutes, spare_s = int(limit.removesuffix(":00")), 30
    passed_s = time.time() - began
    assert (1800 - spare_s - passed_s) // 60 - 1 <= minutes < 30, (
        "it ends before the reservation begins, and not long before"
    )
    one.give_back([lease])


def test_a_lease_in_part_of_a_node_has_the_gpus_that_slurm_gives_it(cluster, root):
    slurm = cluster(2, **GPUS)
    one = scavenger(
        slurm,
        lease=SlurmLeaseOptions(
            partition="preemptable", gres="gpu:1", exclusive=False, options=("--mem=100",)
        ),
    )
    assert gaps(one) == ["n1", "n2"]
    [lease] = one.take([LeaseRequest("l1", "n1", (sys.executable, "-c", TELL, str(root / "told")))])
    slurm.until((root / "told").exists, "the lease runs")
    _, environment = json.loads((root / "told").read_text())
    assert count_gpus(environment) == 1
    assert environment["MALLETRAIN_GPUS"] == "1"
    assert gaps(one) == ["n2"], "the rest of the node is no gap"
    one.give_back([lease])


def test_a_lease_for_a_node_just_taken_is_withdrawn(cluster):
    slurm = cluster(2)
    one = scavenger(slurm, start_within_s=2.0)
    assert gaps(one) == ["n1", "n2"]
    view = one.read_state()
    main = slurm.submit("sleep 600", "--nodelist=n1", "--exclusive", "--time=20")
    slurm.until(lambda: slurm.jobs()[main][0] == "RUNNING", "the main job runs")
    one.read_state = lambda: view  # what was read is out of date when it is acted on
    leases = one.take(
        [LeaseRequest(name, node, ("sleep", "600")) for name, node in (("l1", "n1"), ("l2", "n2"))]
    )
    del one.read_state
    assert [lease.state for lease in leases] == [LeaseState.PENDING] * 2, "nobody can know"
    # Only then is it looked whether they have started in time.
    slurm.until(
        lambda: "RUNNING" in {state for state, _, _ in slurm.leases().values()}, "the second runs"
    )
    slurm.until(
        lambda: states(one) == {"l1": LeaseState.ENDED, "l2": LeaseState.RUNNING},
        "the first is withdrawn, the second runs",
    )
    [why] = [lease.reason for lease in one.poll().leases if lease.id == "l1"]
    assert "did not start within 2 s" in why or "cancelled" in why
    slurm.until(lambda: len(slurm.leases()) == 1, "Slurm knows of one lease only")
    one.give_back(leases)


def test_a_hundred_gaps_at_once_are_taken_at_the_sites_pace(cluster):
    """A job of the whole machine ends, as after a drain."""
    slurm = cluster(100)
    one = scavenger(slurm, submit_rate=25.0, submit_burst=30, rules=GapRules(max_at_once=60))
    main = slurm.submit("sleep 600", "--nodes=100", "--exclusive", "--time=20")
    slurm.until(lambda: slurm.jobs()[main][0] == "RUNNING", "the main job has the machine")
    assert gaps(one) == []
    slurm.run("scancel", main)
    slurm.until(lambda: slurm.states().count("idle") == 100, "all nodes are idle")
    node_of: dict[str, str] = {}  # by lease
    submitted, begin = 0, time.monotonic()

    def gaps_or_all_run():
        """The gaps, and the nodes of the leases that have not ended. No gaps are shown while Slurm
        is too busy to be asked for more.
        """
        answer = one.poll()
        nodes = sorted(gap.node for gap in answer.gaps)
        active = [lease for lease in answer.leases if lease.state is not LeaseState.ENDED]
        leased = [node_of[lease.id] for lease in active]
        running = sum(lease.state is LeaseState.RUNNING for lease in active)
        return (nodes, leased) if nodes or running == 100 else None

    while True:
        nodes, leased = slurm.until(gaps_or_all_run, "there are gaps, or leases run on all nodes")
        assert not set(nodes) & set(leased), "no gap where a lease is"
        # A lease that failed on its node leaves a gap again, once the node is idle.
        failed = submitted - len(leased)
        free = 100 - len(leased)
        assert min(60, free - failed) <= len(nodes) <= min(60, free)
        if not nodes:
            break
        new = {f"l{len(node_of) + i}": node for i, node in enumerate(nodes)}
        node_of.update(new)
        taken = one.take([LeaseRequest(id, node, ("sleep", "600")) for id, node in new.items()])
        states_now = [lease.state for lease in taken]
        assert set(states_now) <= {LeaseState.PENDING, LeaseState.NOT_YET}, taken
        submitted += states_now.count(LeaseState.PENDING)
        most = 30 + 25 * (time.monotonic() - begin)
        assert submitted <= most, "not faster than the site allows"
    assert sorted(leased) == sorted(f"n{i + 1}" for i in range(100)), "one lease on each node"
    running = [node for state, node, _ in slurm.leases().values() if state == "RUNNING"]
    assert sorted(running) == sorted(leased), "one job for each gap and none more"
    one.give_back(one.poll().leases)
    slurm.until(lambda: not slurm.leases(), "all are given back")


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("runuser") is None,
    reason="only root may submit as somebody else",
)
def test_a_lease_as_another_owner(cluster, root):
    slurm = cluster(1)
    one = scavenger(slurm, submit_as=("runuser", "-u", "{owner}", "--"))
    public = root / "public"
    public.mkdir()
    public.chmod(0o777)
    one.poll()
    [lease] = one.take(
        [
            LeaseRequest(
                "l1",
                "n1",
                ("sh", "-c", 'id -un >"$1"; sleep 600', "sh", str(public / "who")),
                owner="nobody",
            )
        ]
    )
    assert lease.state is LeaseState.PENDING, lease.reason
    slurm.until(
        lambda: (public / "who").exists() and (public / "who").read_text() == "nobody\n",
        "the lease runs as its owner",
    )
    assert states(one)["l1"] is LeaseState.RUNNING
    one.give_back([lease])
    slurm.until(lambda: not slurm.leases(), "the lease is cancelled")


def test_a_main_job_with_an_account_of_several_lines_keeps_no_poll(cluster):
    """A Slurm without slurmdbd takes any account."""
    slurm = cluster(1)
    main = slurm.submit("sleep 600", "--hold", "--account=an\naccount", "--job-name=of\ntwo")
    one = scavenger(slurm)
    one.poll()
    [lease] = one.take([LeaseRequest("l1", "n1", ("sleep", "600"))])
    slurm.until(lambda: states(one)["l1"] is LeaseState.RUNNING, "the lease runs")
    lines = slurm.run("squeue", "-h", "-j", f"{main},{lease.scheduler_id}", "-o", "%i|%a|%j")
    assert f"{main}|an\naccount|of\ntwo\n" in lines
