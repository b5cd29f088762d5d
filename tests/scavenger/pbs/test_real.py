"""What a real OpenPBS 23.06 showed: on the imitation that follows it, in its own answers, and on
a running one.

    MALLETRAIN_TEST_PBS=c1 MALLETRAIN_TEST_PBS_USERS=ann,bob python -m pytest -n 0 FILE

needs an OpenPBS as docs/pbs.md sets it up, an idle host c1 with four free ``ngpus`` or more, which
jobs may share, and the right to run ``qsub`` and ``qdel`` as these two users through sudo. Run it
as a user other than root: MoM does not see root's processes.
"""

import getpass
import json
import os
import time
from pathlib import Path

import pytest

from scavenger.batch.commands import CommandPolicy, Commands
from scavenger.batch.gap_memory import GapMemory
from scavenger.batch.settings import BatchSettings
from scavenger.batch.slots import SlotKind
from scavenger.interface import LeaseState
from scavenger.pbs.job import PbsLeaseOptions
from scavenger.pbs.parse import read_ended, read_jobs, read_nodes, read_reservations
from scavenger.pbs.scavenger import PbsScavenger
from scavenger.pbs.source import asking_environment
from scavenger.pbs.state import PbsSnapshot, by_host, node_facts
from tests.scavenger.pbs.fake_pbs import PATIENT
from tests.scavenger.pbs.pbs_world import SHELL, TEMPLATE, names, request, running, states, worlds
from tests.waiting import NEVER_S, until

pytestmark = pytest.mark.slow

LIVE = Path(__file__).parents[4] / "shared" / "pbs" / "live"
STUBBORN = ("sh", "-c", "trap '' TERM; while :; do sleep 0.1; done")
HOST = os.environ.get("MALLETRAIN_TEST_PBS", "")
USERS = os.environ.get("MALLETRAIN_TEST_PBS_USERS", "").split(",")
recorded = pytest.mark.skipif(not LIVE.is_dir(), reason="the recordings are not here")


@pytest.fixture
def world(tmp_path):
    with worlds(tmp_path) as make:
        yield make


def ended(one, *ids):
    """Poll until these leases have ended; their reasons."""
    seen = {}

    def look():
        seen.update({x.id: x for x in one.poll().leases if x.state is LeaseState.ENDED})
        return set(ids) <= seen.keys()

    return look, seen


def test_the_agent_leads_its_job_so_pbs_sees_at_once_that_it_left(world):
    made = world(hosts=1)
    made.pbs.edit(lambda state: state.update(sample_s=3600.0))
    one = made.scavenger()
    one.take([request(1)])
    running(made, one, "l1")
    main = made.pbs.submit("exit 0")
    made.pbs.until(lambda: made.pbs.jobs()[main]["state"] == "F", "the main job has run")


OUTLIVES_ITS_SHELL = """
trap 'until [ -e "$2" ]; do sleep 0.1; done; exit' TERM
touch "$1"
while :; do sleep 0.1; done
"""


def leads_its_session(pid):
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def test_under_a_shell_that_stays_above_it_pbs_looks_again_first(world, tmp_path):
    made, ready, go = world(hosts=1, queues=PATIENT), tmp_path / "ready", tmp_path / "go"
    made.pbs.edit(lambda state: state.update(sample_s=NEVER_S))
    one = made.scavenger(lease=PbsLeaseOptions(queue="preemptable"))
    one.take([request(1, "sh", "-c", OUTLIVES_ITS_SHELL, "sh", str(ready), str(go))])
    made.pbs.until(ready.exists, "the lease waits for its signal")
    [job] = made.pbs.leases()
    [shell] = [pid for pid in made.pbs.processes(job) if leads_its_session(pid)]
    made.pbs.submit("exit 0")
    made.pbs.until(lambda: not Path(f"/proc/{shell}").exists(), "the shell has ended")
    made.pbs.state()  # it is locked until PBS has looked what the shell has left
    go.touch()
    made.pbs.until(lambda: not made.pbs.processes(job), "nothing of the lease runs any more")
    assert list(made.pbs.leases("R")) == [job], "and its job is there still"


def test_a_lease_that_ignores_its_signal_is_killed_although_it_is_polled(world):
    made = world(hosts=1)
    one = made.scavenger()
    [lease] = one.take([request(1, *STUBBORN)])
    running(made, one, "l1")
    one.give_back([lease])

    def look():
        one.poll()
        return not made.pbs.leases()

    made.pbs.until(look, "PBS kills it when its kill_delay is over")
    assert len(made.tools.calls("qdel")) == 1


def test_pbs_outlives_the_end_of_several_leases_of_which_one_has_just_ended(world):
    made = world(hosts=3)
    one = made.scavenger()
    leases = one.take([request(k) for k in (1, 2, 3)])
    running(made, one, "l1", "l2", "l3")
    last = leases[-1].scheduler_id
    made.pbs.edit(lambda state: state["jobs"][last].update(delete=True))
    made.pbs.until(lambda: last not in made.pbs.leases(), "one ends unseen")
    one.give_back(leases)
    made.pbs.until(lambda: not made.pbs.leases(), "the others end as well")
    assert all(lease.state is LeaseState.ENDED for lease in one.poll().leases)


def test_of_several_leases_gone_at_one_poll_each_is_understood(world, tmp_path):
    made, enough = world(hosts=3), tmp_path / "enough"
    one = made.scavenger(hold_s=20.0)
    wait = f"until [ -e {enough} ]; do sleep 0.1; done"
    one.take([request(k, "sh", "-c", f"{wait}; exit {k}") for k in (1, 2, 3)])
    running(made, one, "l1", "l2", "l3")
    enough.touch()
    made.pbs.until(lambda: not made.pbs.leases(), "they end")
    look, seen = ended(one, "l1", "l2", "l3")
    assert look()
    assert [seen[f"l{k}"].reason for k in (1, 2, 3)] == [
        f"its command failed with exit status {k}" for k in (1, 2, 3)
    ]
    assert names(one.poll()) == ["n1", "n2", "n3"], "nothing was taken back, so nothing holds"


@pytest.mark.parametrize("what", ["offline", "reservation", "preempt_order"])
def test_leases_leave_where_the_site_needs_it(world, what):
    made = world(hosts=2)
    one = made.scavenger(spare_s=900.0)
    one.take([request(1), request(2)])
    running(made, one, "l1", "l2")

    def change(state):
        if what == "offline":
            state["nodes"]["pbs0[1]"].update(state="offline", comment="bad\ndimm")
        elif what == "reservation":
            start = state["jobs"][min(state["jobs"])]["began"] + 900
            state["resv"] = {"M1.pbs0": {"start": start, "end": start + 900}}
            state["nodes"]["pbs0[1]"]["resv"].append("M1.pbs0")
        else:
            state["sched"]["preempt_order"] = "R"

    made.pbs.edit(change)
    if what == "preempt_order":
        made.later += 121  # what is configured is asked for every two minutes
    leaving = ("l1", "l2") if what == "preempt_order" else ("l1",)
    look, seen = ended(one, *leaving)
    made.pbs.until(look, "the leases leave")
    why = {
        "offline": "its node is wanted: it is offline (bad dimm)",
        "reservation": "reservation of its node begins in",
        "preempt_order": "this lease is not rerunnable",
    }
    assert why[what] in seen["l1"].reason
    assert len(made.pbs.leases()) == 2 - len(leaving), "the other one stays"


@recorded
def test_recorded_json_of_three_jobs_shows_one_and_dsv_all():
    shown = json.loads((LIVE / "qstat_xf_three_ids.json").read_text())["Jobs"]
    assert list(shown) == ["5.pbs0"]
    jobs = read_ended((LIVE / "qstat_xf_three_ids.dsv").read_text(), "malletrain-", "|").ours
    assert [(job.id, job.state, job.exit, job.host, job.user) for job in jobs] == [
        ("5.pbs0", "F", 271, "n1", "malletrain"),
        ("6.pbs0", "F", 271, "n2", "malletrain"),
        ("32.pbs0", "F", 271, "n2", "malletrain"),
    ]
    [same] = read_jobs((LIVE / "qstat_xf_three_ids.json").read_text(), "malletrain-").ours
    assert same == jobs[0]


@recorded
@pytest.mark.parametrize(
    ("nodes", "drained", "reserved"),
    [
        ("pbsnodes_maintenance_resv_running", set(), {"n1", "n2"}),
        ("pbsnodes_mom_dead", set(), set()),
        ("pbsnodes_leases", set(), set()),
    ],
)
def test_recorded_nodes_tell_who_has_to_leave(nodes, drained, reserved):
    hosts = by_host(read_nodes((LIVE / f"{nodes}.json").read_text()))
    reservations = read_reservations((LIVE / "pbs_rstat_f_maintenance.txt").read_text())
    now = 1795305692.0
    facts = node_facts(PbsSnapshot(hosts, [], {}, reservations), lambda node: (), {}, now)
    assert {name for name, node in facts.items() if node.drained} == drained
    assert {name for name, node in facts.items() if node.reserved} == reserved


class RealPbs:
    """Main jobs of two users on one host of a running PBS."""

    def __init__(self) -> None:
        self.commands = Commands(CommandPolicy(60.0, 1, 0.0), asking_environment())
        self.environment = self.commands.environment or {}
        self.user_of: dict[str, str] = {}

    def scavenger(self, **amounts: int) -> PbsScavenger:
        """One whose kind of slot is one GPU of the host."""
        kind = SlotKind("gpu", {"gpu": 1, "cpus": 1, "memory_mb": 50, **amounts}, nodes={HOST})
        settings = BatchSettings(
            tag="real",
            template=TEMPLATE,
            user=getpass.getuser(),
            submit_rate=1000.0,
            lease=PbsLeaseOptions(queue="preemptable", shell=SHELL),
            idle_for_s=0.0,
            hold_s=0.3,
            slots=(kind,),
        )
        return PbsScavenger(settings, self.commands, memory=GapMemory())

    def submit(self, user: str, gpus: int, cpus: int = 1) -> str:
        """A main job of this user on some GPUs of the host."""
        chunk = f"select=1:host={HOST}:ncpus={cpus}:ngpus={gpus}:mem=50mb"
        argv = ["qsub", "-q", "workq", "-l", chunk, "-l", "walltime=00:10:00"]
        argv = [*argv, "-R", "oe", "--", "/bin/sleep", "600"]
        job = self.commands.ask([*self._as(user), *argv]).strip()
        self.user_of[job] = user
        return job

    def _as(self, user: str) -> list[str]:
        return ["sudo", "-n", "-E", "-u", user, "env", f"PATH={self.environment['PATH']}"]

    def state(self, job: str) -> str:
        shown = json.loads(self.commands.ask(["qstat", "-x", "-f", "-F", "json", job]))
        return shown["Jobs"][job]["job_state"]

    def runs(self, job: str) -> float:
        """Wait until the job runs; the seconds of the wait."""
        since = time.monotonic()
        until(lambda: self.state(job) == "R", "the main job runs", 0.1)
        return time.monotonic() - since

    def delete(self, job: str) -> None:
        self.commands.ask([*self._as(self.user_of.pop(job)), "qdel", job])

    def clear(self, one: PbsScavenger) -> None:
        jobs = list(self.user_of)
        for job in jobs:
            self.delete(job)
        until(lambda: all(self.state(job) == "F" for job in jobs), "the main jobs end", 0.5)

        def none_left() -> bool:
            leases = one.poll().leases
            one.give_back([x for x in leases if x.state is not LeaseState.ENDED])
            return not leases

        until(none_left, "the leases are deleted", 0.5)


def leased(one):
    """Slot → state of its lease."""
    return {lease.node: lease.state for lease in one.poll().leases}


@pytest.fixture
def real_pbs():
    if not HOST or len(USERS) != 2:
        pytest.skip("MALLETRAIN_TEST_PBS and MALLETRAIN_TEST_PBS_USERS name no running PBS")
    return RealPbs()


def test_on_a_running_pbs_a_job_takes_back_one_gpu_of_a_host_that_two_users_share(real_pbs):
    one = real_pbs.scavenger()
    try:
        free = len(one.poll().gaps)
        assert free >= 4, f"{HOST} must be idle: {one.poll().explanations}"
        real_pbs.runs(real_pbs.submit(USERS[0], 1))
        gaps = names(one.poll())
        assert len(gaps) == free - 1
        one.take([request(n, node=gap) for n, gap in enumerate(gaps)])
        ids = [f"l{n}" for n in range(len(gaps))]
        until(
            lambda: [states(one).get(i) for i in ids] == [LeaseState.RUNNING] * len(ids),
            "every other GPU is leased",
            0.5,
        )
        second = real_pbs.submit(USERS[1], 1)
        print(f"Wait for one GPU: {real_pbs.runs(second):.1f} s")
        until(lambda: len(leased(one)) == free - 2, "one lease has ended", 0.5)
        third = real_pbs.submit(USERS[0], 2)
        print(f"Wait for two GPUs: {real_pbs.runs(third):.1f} s")
        until(lambda: len(leased(one)) == free - 4, "two more have ended", 0.5)
        real_pbs.delete(second)
        until(lambda: len(one.poll().gaps) == 1, "its GPU is idle again", 0.5)
    finally:
        real_pbs.clear(one)


def test_on_a_running_pbs_a_slot_is_idle_only_if_pbs_starts_a_lease_there(real_pbs):
    """A job that has all CPUs of a vnode leaves GPUs that no further job can have."""
    one = real_pbs.scavenger()
    try:
        nodes = read_nodes(real_pbs.commands.ask(["pbsnodes", "-av", "-F", "json"]))
        cpus = {int(node.resources_available["ncpus"]) for _, node in by_host(nodes)[HOST]}
        free = len(one.poll().gaps)
        real_pbs.runs(real_pbs.submit(USERS[0], 1, cpus=max(cpus)))
        gaps = names(one.poll())
        assert len(gaps) < free
        one.take([request(n, node=gap) for n, gap in enumerate(gaps)])
        ids = [f"l{n}" for n in range(len(gaps))]
        until(
            lambda: [states(one).get(i) for i in ids] == [LeaseState.RUNNING] * len(ids),
            "a lease runs on each slot that was idle",
            0.5,
        )
    finally:
        real_pbs.clear(one)
