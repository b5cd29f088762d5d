"""The scavenger of PBS against an imitated one: what it asks for, and what it does when commands hang, fail or print garbage."""

import json
import sys
import time
from pathlib import Path

import pytest

from scavenger.batch_settings import BatchSettings
from scavenger.commands import Commands, Policy
from scavenger.gap_memory import GapMemory
from scavenger.interface import Lease, LeaseRequest, LeaseState, SchedulerError
from scavenger.pbs import PbsScavenger
from scavenger.pbs_job import LeaseOptions
from scavenger.pbs_source import asking_environment
from scavenger.rules import GapRules
from tests.scavenger.fake_pbs import QUEUES, FakePbs

PREFIX = "malletrain-t-"
TEMPLATE = (Path(__file__).parents[2] / "jobscripts" / "pbs" / "lease.sh").read_text()
NASTY = ["a b", "$(touch hacked)", "`id`", 'it\'s "q"', "new\nline", "\r\n#PBS -q workq\r\n", "", "ü \\ \\n", "-x", "*", "a,b"]
TELL = "import json, os, sys, time; json.dump([sys.argv[2:], dict(os.environ), os.getcwd()], open(sys.argv[1] + '.new', 'w')); " \
    "os.rename(sys.argv[1] + '.new', sys.argv[1]); print('told', flush=True); time.sleep(600)"  # fmt: skip
LEAVE = """
import signal, sys, time
def leave(number, frame):
    open(sys.argv[1], "w").write("asked")
    time.sleep(0.2)
    open(sys.argv[1], "w").write("left in order")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
open(sys.argv[1] + ".ready", "w").close()
while True:
    time.sleep(0.05)
"""


class World:
    """A scavenger on an imitated PBS, with a clock that can be put forward."""

    def __init__(self, root, **options):
        self.pbs = FakePbs(root, **options)
        self.tools = self.pbs.tools
        self.later = 0.0

    def scavenger(self, timeout_s=20.0, **settings):
        settings.setdefault("lease", LeaseOptions(queue="preemptable"))
        settings.setdefault("idle_for_s", 0.0)
        settings.setdefault("hold_s", 0.3)
        made = BatchSettings(tag="t", template=TEMPLATE, user="pbsuser", submit_rate=1000.0, **settings)
        commands = Commands(Policy(timeout_s, 1, 0.0), asking_environment(self.pbs.environment))
        clock = lambda: time.time() + self.later  # noqa: E731
        return PbsScavenger(made, commands, memory=GapMemory(), clock=clock, environment=self.pbs.environment)


@pytest.fixture
def world(tmp_path):
    made = []

    def make(**options):
        made.append(World(tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.pbs.stop()


def request(number, *argv, node=None, **options):
    return LeaseRequest(f"l{number}", node or f"n{number}", argv or ("sleep", "600"), **options)


def names(snapshot):
    return sorted(gap.node for gap in snapshot.gaps)


def why(snapshot, node):
    return {rule: sentence for e in snapshot.explanations if e.node == node for rule, passed, sentence in e.rules if not passed}


def states(one):
    return {lease.id: lease.state for lease in one.poll().leases}


def running(world, one, *ids):
    world.pbs.until(lambda: [states(one).get(i) for i in ids] == [LeaseState.RUNNING] * len(ids), "the leases run")


def test_leases_run_what_they_are_told_and_nothing_else(world, tmp_path):
    made = world(hosts=3)
    one = made.scavenger(output_dir=tmp_path)
    assert names(one.poll()) == ["n1", "n2", "n3"]
    out = tmp_path / 'it\'s $(out) "dir"\n'
    out.mkdir()
    requests = [request(i, sys.executable, "-c", TELL, str(out / f"n{i}"), *NASTY, env={"NASTY": "\n".join(NASTY)}) for i in (1, 2)]
    leases = one.take(requests)
    assert [(lease.state, lease.node) for lease in leases] == [(LeaseState.PENDING, "n1"), (LeaseState.PENDING, "n2")], leases
    assert [one.take([r])[0].scheduler_id for r in requests] == [lease.scheduler_id for lease in leases], "asking twice"
    # Also for another process, after a restart of the daemon.
    assert made.scavenger().take([requests[0]])[0].scheduler_id == leases[0].scheduler_id
    made.pbs.until(lambda: len([p for p in out.iterdir() if not p.suffix]) == 2, "the leases run")
    for i in (1, 2):
        words, environment, folder = json.loads((out / f"n{i}").read_text())
        assert (words, folder) == (NASTY, "/")
        assert environment["NASTY"] == "\n".join(NASTY)
        assert environment["MALLETRAIN_NODE"] == f"n{i}"
        assert environment["MALLETRAIN_LEASE"] == f"l{i}"
        assert environment["MALLETRAIN_GRACE_S"] == "8"
        assert "PYTEST_CURRENT_TEST" not in environment, "nothing of the daemon's environment goes along"
        made.pbs.until(lambda i=i: "told" in (tmp_path / f"l{i}.out").read_text(), "what leases print is kept")
    assert not list(tmp_path.glob("**/hacked"))
    running(made, one, "l1", "l2")
    assert names(one.poll()) == ["n3"]
    assert one.poll().idle_nodes == 3
    one.give_back(one.poll().leases)
    made.pbs.until(lambda: not made.pbs.leases(), "the leases are deleted")
    one.give_back(leases)
    made.pbs.until(lambda: names(one.poll()) == ["n1", "n2", "n3"], "the nodes are gaps again")


def test_the_words_of_a_lease(world):
    vnodes = {"h1": {"ncpus": 0, "mem": "0b"}, "h1[0]": {"ncpus": 4, "mem": "2gb", "ngpus": 1}, "h1[1]": {"ncpus": 4, "ngpus": 1}}
    made = world(hosts={"h1": vnodes})
    one = made.scavenger(lease=LeaseOptions(queue="preemptable", account="a1", select="system=polaris", options=("-l", "filesystems=home")))
    one.take([request(1, node="h1")])
    [job] = made.pbs.leases().values()
    words = " ".join(job["args"])
    for part in (
        f"-N {PREFIX}l1 ", "-r n ", "-l select=1:host=h1:ncpus=8:ngpus=2:mem=2097152kb:system=polaris ", "-l place=pack:exclhost ",
        "-l walltime=12:00:00 ", "-q preemptable ", "-A a1 ", "-l filesystems=home", "-f ",
    ):  # fmt: skip
        assert part in words + " "
    assert "-V" not in job["args"]


def test_a_poll_is_two_commands(world):
    made = world(hosts=2)
    one = made.scavenger()
    one.poll()
    before = len(made.tools.calls())
    one.poll()
    assert [line.split()[0] for line in made.tools.calls()[before:]] == ["qstat", "pbsnodes"]


def test_a_node_is_a_gap_after_its_turn(world):
    made = world(hosts=2)
    one = made.scavenger(idle_for_s=None)
    assert names(one.poll()) == []
    made.later += 5.5  # one scheduler_iteration
    assert names(one.poll()) == ["n1", "n2"]
    main = made.pbs.submit("sleep 600", "-l", "walltime=00:10:00")
    made.pbs.until(lambda: made.pbs.jobs()[main]["state"] == "R", "the main job runs")
    snapshot = one.poll()
    assert names(snapshot) == ["n2"]
    assert "job-exclusive" in why(snapshot, "n1")["idle"]


@pytest.mark.parametrize("order", ["D", "R"])
def test_preempted_leases_leave_in_order_and_take_no_other_along(world, tmp_path, order):
    made = world(hosts=2, preempt_order=order)
    one = made.scavenger()
    told = tmp_path / "told"
    one.take([request(1, sys.executable, "-c", LEAVE, str(told))])  # the first is the first to be preempted
    one.take([request(2)])
    made.pbs.until(lambda: (tmp_path / "told.ready").exists(), "the command waits for its signal")
    running(made, one, "l1", "l2")
    main = made.pbs.submit("exit 0")
    made.pbs.until(lambda: made.pbs.jobs()[main]["state"] == "F", "the main job has run")
    assert told.read_text() == "left in order"
    seen = {}
    made.pbs.until(lambda: seen.update({x.id: x for x in one.poll().leases}) or seen["l1"].state is LeaseState.ENDED, "the lease is over")
    assert seen["l1"].reason in {"preempted", "the main scheduler requeued it"}
    assert seen["l2"].state is LeaseState.RUNNING
    only = [f"{PREFIX}l2"]
    made.pbs.until(lambda: [job["name"] for job in made.pbs.leases().values()] == only, "a requeued lease does not stay")


def test_while_pbs_takes_leases_back_no_other_is_asked_for(world):
    made = world(hosts=2)
    one = made.scavenger(hold_s=20.0)
    one.take([request(1, "sh", "-c", "trap '' TERM; while :; do sleep 0.1; done")])
    running(made, one, "l1")
    made.pbs.submit("exit 0", "-l", "walltime=00:01:00", hosts=2)

    def leaving():
        return next((x for x in one.poll().leases if x.id == "l1" and x.leaving_by is not None), None)

    lease = made.pbs.until(leaving, "the lease is leaving")
    assert (lease.state, lease.reason) == (LeaseState.RUNNING, "preempted")
    snapshot = one.poll()
    assert snapshot.gaps == ()
    assert "took leases back" in why(snapshot, "n2")["hold"]
    assert one._interval(one._look(), 0.01) == 2.0, "it may soon be over"
    [refused] = one.take([request(2)])
    assert "took leases back" in refused.reason
    made.later += 30
    made.pbs.until(lambda: "n2" in names(one.poll()) or made.pbs.jobs("F"), "it is over at some time")


def test_suspended_leases_count_as_lost_and_are_deleted(world):
    made = world(hosts=1, preempt_order="SCR")
    one = made.scavenger()
    one.take([request(1)])
    running(made, one, "l1")
    main = made.pbs.submit("sleep 600", "-l", "walltime=00:10:00")
    made.pbs.until(lambda: made.pbs.jobs("S"), "the lease is suspended")
    [lease] = one.poll().leases
    assert (lease.state, lease.reason) == (LeaseState.ENDED, "the main scheduler suspended it")
    made.pbs.until(lambda: not made.pbs.leases(), "it is deleted")
    assert made.pbs.jobs()[main]["state"] == "R"


def test_leases_are_rerunnable_only_where_nothing_else_preempts_them(world):
    made = world(hosts=1, preempt_order="R")
    made.scavenger().take([request(1)])
    [job] = made.pbs.leases().values()
    assert job["rerunnable"]


def test_leases_that_do_not_start_in_time_are_withdrawn(world):
    made = world(hosts=2)
    one = made.scavenger(start_within_s=60.0)
    made.pbs.edit(lambda state: state.update(asleep=True))
    one.take([request(1)])
    assert states(one) == {"l1": LeaseState.PENDING}
    made.later += 70
    [lease] = one.poll().leases
    assert lease.state is LeaseState.ENDED
    assert "did not start within 60 s" in lease.reason
    assert not made.pbs.leases()


def test_nothing_is_taken_while_pbs_starts_no_jobs(world):
    made = world(hosts=1)
    made.pbs.edit(lambda state: state["server"].update(scheduling="False"))
    assert "scheduling of its server is False" in why(made.scavenger().poll(), "n1")["hold"]
    made.pbs.edit(lambda state: (state["server"].update(scheduling="True"), state["queues"]["preemptable"].update(started="False")))
    assert "queue preemptable is stopped" in why(made.scavenger().poll(), "n1")["hold"]
    snapshot = made.scavenger(lease=LeaseOptions(queue="lost")).poll()
    assert "no queue lost" in why(snapshot, "n1")["hold"]
    assert snapshot.poll_again_s >= 5.0, "that may last, and is no reason to ask more often"


def test_there_are_never_more_requests_than_gaps(world):
    made = world(hosts=2)
    one = made.scavenger()
    main = made.pbs.submit("sleep 600", "-l", "walltime=00:10:00")
    made.pbs.until(lambda: made.pbs.jobs()[main]["state"] == "R", "the main job runs")
    leases = one.take([request(1), request(2), request(3, node="n2"), request(4, node="nowhere")])
    assert [lease.state for lease in leases] == [LeaseState.ENDED, LeaseState.PENDING, LeaseState.ENDED, LeaseState.ENDED]
    assert "n2 is asked for with lease l2" in leases[2].reason
    assert "says it is job-exclusive" in leases[0].reason
    assert "knows no node nowhere" in leases[3].reason
    [again] = one.take([request(5, node="n2")])
    assert "with lease l" in again.reason


def test_a_limit_of_the_site_ends_the_asking_for_a_while(world):
    made = world(hosts=3, queues={**QUEUES, "preemptable": {**QUEUES["preemptable"], "max_queued": 1}})
    one = made.scavenger()
    leases = one.take([request(1)])
    assert "would exceed queue" in one.take([request(2)])[0].reason
    calls = len(made.tools.calls("qsub"))
    assert one.take([request(3)])[0].state is LeaseState.ENDED
    assert len(made.tools.calls("qsub")) == calls
    snapshot = one.poll()
    assert snapshot.gaps == ()
    assert "refuses more jobs" in why(snapshot, "n3")["at once"]
    one.give_back(leases)
    made.later += 301
    made.pbs.until(lambda: len(one.poll().gaps) == 3, "PBS is asked again")


@pytest.mark.parametrize("trouble", ["fails", "hangs"])
def test_a_submission_without_an_answer_is_deleted_should_it_turn_up(world, trouble):
    made = world(hosts=1)
    one = made.scavenger()
    if trouble == "fails":
        made.tools.fails("qsub", "qsub: End of File")
    else:
        made.tools.hangs("qsub")
    usual = one.commands.run

    def impatient(argv, **options):
        return usual(argv, **options, **({"timeout_s": 1.0} if argv[0] == "qsub" else {}))

    one.commands.run = impatient
    [lease] = one.take([request(1)])
    assert lease.state is LeaseState.ENDED
    assert "End of File" in lease.reason or "gave no answer" in lease.reason
    made.pbs.works("qsub")
    made.pbs.submit("sleep 600", "-N", f"{PREFIX}l1", queue="preemptable")
    [lease] = one.poll().leases
    assert lease.state is LeaseState.ENDED
    made.pbs.until(lambda: not made.pbs.leases(), "it is deleted")


def test_giving_back_forgives_what_has_ended_and_nothing_else(world):
    made = world(hosts=1)
    one = made.scavenger()
    one.give_back([Lease("l9", "99.pbs0", LeaseState.RUNNING, "n1")])
    assert made.tools.calls("qdel") == ["qdel 99.pbs0"]
    made.tools.fails("qdel", "qdel: Unauthorized Request  99.pbs0")
    with pytest.raises(SchedulerError, match="Unauthorized"):
        one.give_back([Lease("l9", "99.pbs0", LeaseState.RUNNING, "n1")])
    one.give_back([])


def test_leases_of_an_owner_are_submitted_and_deleted_as_the_owner(world):
    made = world(hosts=1)
    as_owner = made.tools.root / "as-owner"
    as_owner.write_text('#!/bin/sh\necho "as-owner $*" >>"${0%/*}/said"\nFAKE_PBS_USER=$1; export FAKE_PBS_USER; shift; exec "$@"\n')
    as_owner.chmod(0o755)
    one = made.scavenger(submit_as=("as-owner", "{owner}"))
    [lease] = one.take([request(1, owner="ann")])
    assert [job["owner"] for job in made.pbs.leases().values()] == ["ann"]
    running(made, one, "l1")
    one.give_back([lease])
    made.pbs.until(lambda: not made.pbs.leases(), "it is deleted, as ann")
    assert f"as-owner ann {made.tools.root}/qdel {lease.scheduler_id}" in as_owner.with_name("said").read_text()


def test_jobs_of_others_with_our_name_are_not_ours(world):
    made = world(hosts=1)
    made.pbs.edit(lambda state: state["server"].update(scheduling="False"))
    number = made.pbs.submit("true", "-N", f"{PREFIX}l1", queue="preemptable")
    made.pbs.edit(lambda state: state["jobs"][number].update(owner="mallory"))
    assert made.scavenger().poll().leases == ()


def test_reserved_planned_and_broken_nodes_are_left_alone(world):
    made = world(hosts=6)
    now = time.time()

    def change(state):
        state["resv"] = {"M1.pbs0": {"start": now - 9, "end": now + 900}, "R2.pbs0": {"start": now + 40, "end": now + 900},
                         "R3.pbs0": {"start": now + 7200, "end": now + 9000}}  # fmt: skip
        for i, name in enumerate(("M1.pbs0", "R2.pbs0", "R3.pbs0"), 1):
            state["nodes"][f"pbs0[{i}]"]["resv"].append(name)
        state["nodes"]["pbs0[4]"].update(state="offline", comment="bad dimm")
        state["nodes"]["pbs0[5]"].update(state="state-unknown,down")

    made.pbs.edit(change)
    one = made.scavenger()
    snapshot = one.poll()
    assert names(snapshot) == ["n3", "n6"]
    assert {gap.node: gap.horizon_s for gap in snapshot.gaps}["n3"] <= 7200
    assert "maintenance reservation M1.pbs0" in why(snapshot, "n1")["reservation"]
    assert "begins in" in why(snapshot, "n2")["reservation"]
    assert "it is offline (bad dimm)" in why(snapshot, "n4")["usable"]
    one.poll()
    assert len(made.tools.calls("pbs_rstat")) == 1, "reservations are asked for rarely"
    one.take([request(3)])
    [job] = made.pbs.leases().values()
    assert job["walltime"] <= 7170, "it ends before the reservation begins"


def test_expected_starts_are_respected_or_used(world):
    made = world(hosts=2, queues={**QUEUES, "expressq": {"Priority": 100}})
    made.pbs.edit(lambda state: state.update(strict_ordering=True))
    first = made.pbs.submit("sleep 600", "-l", "walltime=00:30:00")
    made.pbs.until(lambda: made.pbs.jobs()[first]["state"] == "R", "the first job runs")
    second = made.pbs.submit("sleep 600", "-l", "walltime=00:30:00", hosts=2)
    made.pbs.until(lambda: "estimated" in made.pbs.jobs()[second], "the second is expected to start later")
    careful = made.scavenger()
    snapshot = careful.poll()
    assert names(snapshot) == []
    assert "held for a waiting job, which is expected to start in 30 min" in why(snapshot, "n2")["planned"]
    one = made.scavenger(backfill=True, time_min_s=300.0, spare_s=60.0)
    assert names(one.poll()) == ["n2"]
    one.take([request(2)])
    [job] = made.pbs.leases().values()
    assert 1600 < job["walltime"] <= 1740
    assert "min_walltime=00:05:00" in job["args"]
    assert not [word for word in job["args"] if word.startswith("walltime")]


def test_hosts_of_several_vnodes_are_one_node(world):
    hosts = {f"h{i}": {f"h{i}": {"ncpus": 0}, f"h{i}[0]": {"ncpus": 4}, f"h{i}[1]": {"ncpus": 4}} for i in (1, 2)}
    made = world(hosts=hosts)
    made.pbs.edit(lambda state: state["nodes"]["h2[1]"].update(state="offline"))
    snapshot = made.scavenger().poll()
    assert snapshot.total_nodes == 2
    assert names(snapshot) == ["h1"]
    assert "offline" in why(snapshot, "h2")["usable"]


def test_nodes_of_other_queues_are_left_alone(world):
    queues = {**QUEUES, "preemptable": {**QUEUES["preemptable"], "default_chunk": {"Qlist": "pre", "ncpus": 1}}}
    hosts = {f"n{i}": {f"n{i}": {"ncpus": 2, "Qlist": q}} for i, q in enumerate(("debug", "debug,pre"), 1)}
    made = world(hosts=hosts, queues=queues)
    snapshot = made.scavenger().poll()
    assert names(snapshot) == ["n2"]
    assert "not in preemptable" in why(snapshot, "n1")["partition"]


def test_features_and_classes_come_from_resources(world):
    hosts = {f"n{i}": {f"n{i}": {"ncpus": 2, "gpu_type": kind, "nvlink": "True"}} for i, kind in enumerate(("a100", "v100"), 1)}
    made = world(hosts=hosts)
    one = made.scavenger(rules=GapRules(features=frozenset({"nvlink"})), node_classes=("gpu_type=a100", "gpu_type=v100"))
    assert {gap.node: gap.node_class for gap in one.poll().gaps} == {"n1": "gpu_type=a100", "n2": "gpu_type=v100"}
    one = made.scavenger(rules=GapRules(features=frozenset({"gpu_type=v100"})))
    assert names(one.poll()) == ["n2"]


def test_what_users_wrote_does_not_spoil_a_poll(world):
    made = world(hosts=1)
    variables = {"A": "RAW:005", "B": "RAW:inf", "C": 'RAW:\\"say \\\\"hi\\\\"\\"', "D": "RAW:.5"}
    number = made.pbs.submit("sleep 600", "-l", "walltime=00:10:00")
    made.pbs.edit(lambda state: state["jobs"][number].update(variables=variables, name="RAW:0042"))
    made.pbs.until(lambda: made.pbs.jobs()[number]["state"] == "R", "the job runs")
    snapshot = made.scavenger().poll()
    assert snapshot.total_nodes == 1
    assert snapshot.gaps == ()


@pytest.mark.parametrize("tool", ["qstat", "pbsnodes", "pbs_rstat"])
@pytest.mark.parametrize("trouble", ["fails", "hangs", "prints garbage"])
def test_a_failed_poll_changes_nothing(world, tool, trouble):
    made = world(hosts=2)
    one = made.scavenger()
    one.poll()
    now = time.time()
    if tool == "pbs_rstat":
        made.pbs.edit(lambda s: (s["resv"].update({"R9.pbs0": {"start": now + 7200, "end": now + 9000}}),
                                 s["nodes"]["pbs0[1]"]["resv"].append("R9.pbs0")))  # fmt: skip
    if trouble == "fails":
        made.tools.fails(tool, "Connection refused\nqstat: cannot connect to server pbs0 (errno=15010)")
    elif trouble == "hangs":
        made.tools.hangs(tool)
        one.commands.policy = Policy(0.7, 1, 0.0)
    else:
        made.tools.answers(tool, "<html>504</html>")
    with pytest.raises(SchedulerError) as error:
        one.poll()
    assert len(str(error.value)) > 20
    with pytest.raises(SchedulerError):
        one.take([request(1)])
    assert made.tools.calls("qsub") == []
    made.pbs.works(tool)
    one.commands.policy = Policy(20.0, 1, 0.0)
    one.settings.__dict__["idle_for_s"] = 0.1
    assert len(one.poll().gaps) == 2, "the nodes are as long idle as they were"


def test_what_became_of_a_lease_is_asked_for_once(world):
    made = world(hosts=1)
    one = made.scavenger()
    one.take([request(1, "sh", "-c", "exit 3")])
    seen = {}
    made.pbs.until(lambda: seen.update({x.id: x for x in one.poll().leases}) or seen["l1"].state is LeaseState.ENDED, "the lease is over")
    assert seen["l1"].reason == "its command failed with exit status 3"
    assert len(made.tools.calls("qstat -x")) == 1
    assert one.poll().leases == ()
