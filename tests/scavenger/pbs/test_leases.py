"""Leases of an imitated PBS: what is asked for, what runs, how it is preempted, withdrawn and given
back.
"""

import json
import sys

import pytest

from scavenger.batch.lease_script import HOME_OUTPUT_DIR
from scavenger.interface import Lease, LeaseState, SchedulerError
from scavenger.pbs.job import PbsLeaseOptions
from tests.scavenger.pbs.fake_pbs import PATIENT, QUEUES
from tests.scavenger.pbs.pbs_world import PREFIX, names, request, running, states, why, worlds

pytestmark = pytest.mark.slow

NASTY = [
    "a b",
    "$(touch hacked)",
    "`id`",
    'it\'s "q"',
    "new\nline",
    "\r\n#PBS -q workq\r\n",
    "",
    "ü \\ \\n",
    "-x",
    "*",
    "a,b",
]
TELL = (
    "import json, os, sys, time; json.dump([sys.argv[2:], dict(os.environ), os.getcwd()], "
    "open(sys.argv[1] + '.new', 'w')); "
    "os.rename(sys.argv[1] + '.new', sys.argv[1]); print('told', flush=True); time.sleep(600)"
)
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


@pytest.fixture
def world(tmp_path):
    with worlds(tmp_path) as make:
        yield make


def test_leases_run_what_they_are_told_and_nothing_else(world, tmp_path):
    made = world(hosts=3)
    one = made.scavenger(output_dir=tmp_path)
    assert names(one.poll()) == ["n1", "n2", "n3"]
    out = tmp_path / 'it\'s $(out) "dir"\n'
    out.mkdir()
    requests = [
        request(
            i,
            sys.executable,
            "-c",
            TELL,
            str(out / f"n{i}"),
            *NASTY,
            env={"NASTY": "\n".join(NASTY)},
        )
        for i in (1, 2)
    ]
    leases = one.take(requests)
    assert [(lease.state, lease.node) for lease in leases] == [
        (LeaseState.PENDING, "n1"),
        (LeaseState.PENDING, "n2"),
    ], leases
    assert [one.take([r])[0].scheduler_id for r in requests] == [
        lease.scheduler_id for lease in leases
    ], "asking twice"
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
        assert "PYTEST_CURRENT_TEST" not in environment, (
            "nothing of the daemon's environment goes along"
        )
        made.pbs.until(
            lambda i=i: "told" in (tmp_path / f"l{i}.out").read_text(), "what leases print is kept"
        )
    assert not list(tmp_path.glob("**/hacked"))
    running(made, one, "l1", "l2")
    assert names(one.poll()) == ["n3"]
    assert one.poll().idle_nodes == 3
    one.give_back(one.poll().leases)
    made.pbs.until(lambda: not made.pbs.leases(), "the leases are deleted")
    one.give_back(leases)
    made.pbs.until(lambda: names(one.poll()) == ["n1", "n2", "n3"], "the nodes are gaps again")


def test_the_words_of_a_lease(world):
    vnodes = {
        "h1": {"ncpus": 0, "mem": "0b", "ngpus": 1},
        "h1[0]": {"ncpus": 4, "mem": "2gb", "ngpus": 1},
        "h1[1]": {"ncpus": 4, "ngpus": "@h1"},
    }
    made = world(hosts={"h1": vnodes})
    one = made.scavenger(
        lease=PbsLeaseOptions(
            queue="preemptable",
            account="a1",
            select="system=polaris",
            options=("-l", "filesystems=home"),
        )
    )
    one.take([request(1, node="h1")])
    [job] = made.pbs.leases().values()
    words = " ".join(job["args"])
    for part in (
        f"-N {PREFIX}l1 ",
        "-r n ",
        "-l select=1:host=h1:ncpus=8:ngpus=2:mem=2097152kb:system=polaris ",
        "-l place=pack:exclhost ",
        "-l walltime=12:00:00 ",
        "-q preemptable ",
        "-A a1 ",
        "-l filesystems=home",
        "-f ",
    ):
        assert part in words + " "
    assert "-V" not in job["args"]


@pytest.mark.parametrize("order", ["D", "R"])
def test_preempted_leases_leave_in_order_and_take_no_other_along(world, tmp_path, order):
    made = world(hosts=2, preempt_order=order, queues=PATIENT)
    one = made.scavenger()
    mark = tmp_path / "told"
    one.take(
        [request(1, sys.executable, "-c", LEAVE, str(mark))]
    )  # the first is the first to be preempted
    one.take([request(2)])
    made.pbs.until(lambda: (tmp_path / "told.ready").exists(), "the command waits for its signal")
    running(made, one, "l1", "l2")
    main = made.pbs.submit("exit 0")
    made.pbs.until(lambda: made.pbs.jobs()[main]["state"] == "F", "the main job has run")
    assert mark.read_text() == "left in order"
    seen = {}
    made.pbs.until(
        lambda: (
            seen.update({x.id: x for x in one.poll().leases})
            or seen["l1"].state is LeaseState.ENDED
        ),
        "the lease is over",
    )
    assert seen["l1"].reason in {"preempted", "the main scheduler requeued it"}
    assert seen["l2"].state is LeaseState.RUNNING
    only = [f"{PREFIX}l2"]
    made.pbs.until(
        lambda: [job["name"] for job in made.pbs.leases().values()] == only,
        "a requeued lease does not stay",
    )


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


@pytest.mark.parametrize("order", ["D 10 R", "SR 20 R"])
def test_leases_that_are_preempted_for_a_part_of_their_time_stay(world, order):
    """They are submitted rerunnable from now on. With ``preempt_order = R`` they leave
    (test_real.py).
    """
    made = world(hosts=2, preempt_order="D")
    one = made.scavenger()
    one.take([request(1)])
    running(made, one, "l1")
    made.pbs.edit(lambda state: state["sched"].update(preempt_order=order))
    made.later += 121  # what is configured is asked for every two minutes
    assert states(one) == {"l1": LeaseState.RUNNING}
    assert not one.ender.leave_requests
    one.take([request(2)])
    assert [job["rerunnable"] for job in made.pbs.leases().values()] == [False, True]


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


def test_there_are_never_more_requests_than_gaps(world):
    made = world(hosts=2)
    one = made.scavenger()
    main = made.pbs.submit("sleep 600", "-l", "walltime=00:10:00")
    made.pbs.until(lambda: made.pbs.jobs()[main]["state"] == "R", "the main job runs")
    leases = one.take([request(1), request(2), request(3, node="n2"), request(4, node="nowhere")])
    assert [lease.state for lease in leases] == [
        LeaseState.ENDED,
        LeaseState.PENDING,
        LeaseState.ENDED,
        LeaseState.ENDED,
    ]
    assert "n2 is requested with lease l2" in leases[2].reason
    assert "says it is job-exclusive" in leases[0].reason
    assert "knows no node nowhere" in leases[3].reason
    [again] = one.take([request(5, node="n2")])
    assert "with lease l" in again.reason


def test_a_limit_of_the_site_ends_the_asking_for_a_while(world):
    made = world(
        hosts=3, queues={**QUEUES, "preemptable": {**QUEUES["preemptable"], "max_queued": 1}}
    )
    one = made.scavenger()
    leases = one.take([request(1)])
    assert "would exceed queue" in one.take([request(2)])[0].reason
    calls = len(made.tools.calls("qsub"))
    assert one.take([request(3)])[0].state is LeaseState.ENDED
    assert len(made.tools.calls("qsub")) == calls
    polled = one.poll()
    assert polled.gaps == ()
    assert "refuses more jobs" in why(polled, "n3")["at once"]
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
    [lease] = one.take([request(1)])
    running(made, one, "l1")
    made.tools.fails("qdel", f"qdel: Unknown Job Id {lease.scheduler_id}")
    one.give_back([lease])
    assert made.tools.calls("qdel") == [f"qdel {lease.scheduler_id}"]
    made.tools.fails("qdel", f"qdel: Unauthorized Request  {lease.scheduler_id}")
    with pytest.raises(SchedulerError, match="Unauthorized"):
        one.give_back([lease])
    one.give_back([])
    made.pbs.works("qdel")
    one.give_back([lease])


def test_a_job_with_the_number_of_an_earlier_lease_is_not_deleted(world):
    """A server that has lost its state gives numbers again."""
    made = world(hosts=1)
    number = made.pbs.submit("sleep 600", queue="workq")
    one = made.scavenger()
    one.know({"l9": ""})
    one.give_back([Lease("l9", number, LeaseState.RUNNING, "n1")])
    assert made.tools.calls("qdel") == []


def test_leases_of_an_owner_are_submitted_and_deleted_as_the_owner(world):
    made = world(hosts=1)
    as_owner = made.tools.root / "as-owner"
    as_owner.write_text(
        '#!/bin/sh\necho "as-owner $*" >>"${0%/*}/said"\nFAKE_PBS_USER=$1; export '
        'FAKE_PBS_USER; shift; exec "$@"\n'
    )
    as_owner.chmod(0o755)
    one = made.scavenger(submit_as=("as-owner", "{owner}"))
    [lease] = one.take([request(1, owner="ann")])
    assert [job["owner"] for job in made.pbs.leases().values()] == ["ann"]
    running(made, one, "l1")
    one.give_back([lease])
    made.pbs.until(lambda: not made.pbs.leases(), "it is deleted, as ann")
    assert (
        f"as-owner ann {made.tools.root}/qdel {lease.scheduler_id}"
        in as_owner.with_name("said").read_text()
    )


def test_jobs_of_others_with_our_name_are_not_ours(world):
    made = world(hosts=1)
    made.pbs.edit(lambda state: state["server"].update(scheduling="False"))
    number = made.pbs.submit("true", "-N", f"{PREFIX}l1", queue="preemptable")
    made.pbs.edit(lambda state: state["jobs"][number].update(owner="mallory"))
    assert made.scavenger().poll().leases == ()
    of_several = made.scavenger(submit_as=("as-owner", "{owner}"))
    of_several.know({"l1": "ann"})
    assert of_several.poll().leases == ()
    of_several = made.scavenger(submit_as=("as-owner", "{owner}"))
    of_several.know({"l1": "mallory"})
    assert [lease.scheduler_id for lease in of_several.poll().leases] == [number]


def test_what_became_of_a_lease_is_asked_for_once(world):
    made = world(hosts=1)
    one = made.scavenger()
    one.take([request(1, "sh", "-c", "exit 3")])
    seen = {}
    made.pbs.until(
        lambda: (
            seen.update({x.id: x for x in one.poll().leases})
            or seen["l1"].state is LeaseState.ENDED
        ),
        "the lease is over",
    )
    assert seen["l1"].reason == "its command failed with exit status 3"
    assert len(made.tools.calls("qstat -x")) == 1
    assert one.poll().leases == ()


def test_a_node_is_free_as_soon_as_its_lease_has_left_wherever_pbs_would_copy_to(world, tmp_path):
    made = world(hosts=1, queues=PATIENT)
    made.pbs.edit(lambda state: state.update(copy_s=3600.0))
    one = made.scavenger()
    one.poll()
    one.take([request(1, sys.executable, "-c", LEAVE, str(tmp_path / "told"))])
    made.pbs.until((tmp_path / "told.ready").exists, "the lease runs")
    main = made.pbs.submit("sleep 600")
    made.pbs.until(lambda: main in made.pbs.jobs("R"), "the main job runs")
    assert (tmp_path / "told").read_text() == "left in order"


@pytest.mark.parametrize("shape", ["array", "block"])
def test_each_lease_has_a_job_of_its_own_whatever_is_configured(world, shape):
    made = world(hosts=2)
    one = made.scavenger(shape=shape)
    one.poll()
    one.take([request(1), request(2)])
    running(made, one, "l1", "l2")
    assert len(made.pbs.leases()) == 2


def test_what_leases_of_other_users_print_is_kept_at_home(world, tmp_path):
    made = world(hosts=1)
    tool = made.tools.root / "as-owner"
    tool.write_text('#!/bin/sh\nshift\nexec "$@"\n')
    tool.chmod(0o755)
    one = made.scavenger(submit_as=("as-owner", "{owner}"), output_dir=tmp_path / "out")
    one.poll()
    argv = ("sh", "-c", "echo to stdout; echo to stderr >&2; sleep 600")
    one.take([request(1, *argv, owner="pbsuser")])
    output = made.pbs.state_dir / HOME_OUTPUT_DIR / "l1.out"
    made.pbs.until(
        lambda: output.exists() and len(output.read_text().splitlines()) == 2, "it prints"
    )
    assert output.read_text() == "to stdout\nto stderr\n"
