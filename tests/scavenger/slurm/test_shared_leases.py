"""Leases that share a job, on imitated commands of Slurm: what is submitted for them, refused, and
ended.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from scavenger.interface import LeaseState, SchedulerError
from tests.scavenger.slurm import slurm_world as world
from tests.scavenger.slurm.slurm_world import request
from tests.waiting import PATIENCE_S, until

PENDING, RUNNING, ENDED = LeaseState.PENDING, LeaseState.RUNNING, LeaseState.ENDED
NOT_YET = LeaseState.NOT_YET


@pytest.fixture
def slurm(tmp_path):
    made = world.World(tmp_path)
    made.tools.runs("sbatch", '[ -f "$here/sbatch.mode" ] || { echo 70; exit 0; }')
    return made


def job(state, number, name="l1-3", **options):
    options.setdefault("partition", "preemptable")
    return world.job(state, number, world.PREFIX + name, submitted=100_060, **options)


def states(one):
    return {lease.id: lease.state for lease in one.poll().leases}


@pytest.mark.parametrize("shape", ["array", "block"])
def test_one_submission_for_those_that_are_alike(slurm, shape):
    one = slurm.ready(shape=shape, shared_by=3, submit_as=("env", "AS={owner}"))
    requests = [request(i, owner="ann") for i in (1, 2, 3, 4)]
    requests += [request(i, owner="bob") for i in (5, 6)] + [request(7)]
    leases = one.take(requests)
    assert [(lease.id, lease.node, lease.state) for lease in leases] == [
        (f"l{i}", f"n{i}", PENDING) for i in range(1, 8)
    ]
    assert [lease.scheduler_id for lease in leases[:4]] == ["70/n1", "70/n2", "70/n3", "70"]
    names = sorted(
        word.split("=")[1]
        for line in slurm.tools.calls("sbatch")
        for word in line.split()
        if word.startswith("--job-name")
    )
    assert names == [world.PREFIX + name for name in ("l1-3", "l4", "l5-6", "l7")]
    [first] = [line for line in slurm.tools.calls("sbatch") if "l1-3" in line]
    assert "--exclude=n[4-8]" in first


def test_leases_whose_other_nodes_fit_in_no_argument_are_jobs_of_their_own(slurm):
    """The list of 20,000 names with a domain is longer than an argument of a command can be."""
    names = [f"node{i:05d}.cluster.example.org" for i in range(20_000)]
    slurm.nodes(idle=",".join(names[:4]), allocated=",".join(names[4:]))
    one = slurm.ready(shape="array")
    slurm.tools.runs("sbatch", "echo $$")
    leases = one.take([request(i, names[i]) for i in range(3)])
    assert [lease.state for lease in leases] == [PENDING] * 3, leases[0].reason
    submitted = slurm.tools.calls("sbatch")
    assert len(submitted) == 3
    assert all(f"--nodelist={name} " in "\n".join(submitted) for name in names[:3])


def test_of_an_array_those_that_run_end_alone_and_those_that_wait_together(slurm):
    one = slurm.ready(shape="array")
    one.take([request(i) for i in (1, 2, 3)])
    waiting = one.ledger.jobs["l1"].lease
    one.give_back([waiting])
    assert not slurm.tools.calls("scancel"), "it may have started meanwhile"
    slurm.queue(
        job("RUNNING", "70_0", nodes="n2", end=200_000, batch="n2"),
        job("RUNNING", "70_1", nodes="n1", end=200_000, batch="n1"),
        job("PENDING", "70_[2]"),
    )
    assert states(one) == {"l2": RUNNING, "l1": ENDED, "l3": PENDING}
    assert slurm.tools.calls("scancel") == ["scancel 70_1"]
    one.give_back([lease for lease in one.poll().leases if lease.id == "l2"])
    assert slurm.tools.calls("scancel")[1:] == ["scancel 70_0"]
    slurm.now += 61
    slurm.queue(job("PENDING", "70_[2]"))
    assert states(one)["l3"] is ENDED
    assert slurm.tools.calls("scancel")[2:] == ["scancel 70_[2]"]


@pytest.mark.parametrize("state", ["FAILED", "PREEMPTED"])
def test_a_lease_of_an_array_that_ended_does_not_come_back_with_the_next_task(slurm, state):
    one = slurm.ready(shape="array")
    one.take([request(i) for i in (1, 2)])
    first = job("RUNNING", "70_0", "l1-2", nodes="n1", end=200_000, batch="n1")
    slurm.queue(first, job("PENDING", "70_[1]", "l1-2"))
    assert states(one) == {"l1": RUNNING, "l2": PENDING}
    ended = job(state, "70_0", "l1-2", nodes="n1", end=100_070, batch="n1")
    slurm.queue(ended, job("PENDING", "70_[1]", "l1-2"))
    assert states(one)["l1"] is ENDED
    # The task that waited for n2 starts where the first one was.
    second = job("RUNNING", "70_1", "l1-2", nodes="n1", end=200_000, batch="n1")
    for queue in ((ended, second), (second,)):
        slurm.queue(*queue)
        assert states(one)["l1"] is ENDED
    assert slurm.tools.calls("scancel")[-1] == "scancel 70_1"


def test_where_there_may_not_be_so_many_jobs_there_are_as_many_as_there_may_be(slurm):
    slurm.tools.runs(
        "sbatch",
        'case "$*" in *--array*) echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1;; '
        "esac; echo 70; exit 0",
    )
    one = slurm.ready(shape="array")
    leases = one.take([request(i) for i in (1, 2, 3, 4)])
    assert [lease.state for lease in leases] == [PENDING, ENDED, ENDED, ENDED]
    assert "QOSMaxSubmitJobPerUserLimit" in leases[3].reason
    assert len(slurm.tools.calls("sbatch")) == 3, "four, two and one of them"
    slurm.queue(job("PENDING", "70", "l1", requested_nodes="n1"))
    assert "refuses more jobs" in one.take([request(5)])[0].reason


def test_leases_that_are_accepted_after_a_refusal_count_for_the_limit(slurm):
    """Submissions run in parallel: this one's refusal returns before the others are accepted."""
    slurm.tools.runs(
        "sbatch",
        'case "$*" in *l1*) echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1;; esac\n'
        'until [ -e "$here/go" ]; do sleep 0.05; done; echo 7$$',
    )
    one = slurm.ready()
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(one.take, [request(i) for i in (1, 2)])
        until(lambda: one.ledger.refusal(one.settings.user, slurm.now), "one is refused")
        (slurm.tools.root / "go").touch()
        assert [lease.state for lease in taken.result(PATIENCE_S)] == [ENDED, PENDING]
    assert "refuses more jobs" in one.ledger.refusal(one.settings.user, slurm.now)


@pytest.mark.parametrize("shape", ["array", "block"])
def test_how_many_share_a_job_is_not_bounded_by_the_pace_of_submissions(slurm, shape):
    one = slurm.ready(shape=shape, shared_by=6, submit_rate=0.001, submit_burst=1)
    assert one.poll().max_new_leases == 6
    leases = one.take([request(8), *(request(i) for i in range(1, 8))])
    assert [lease.id for lease in leases if lease.state is PENDING] == [
        f"l{i}" for i in (8, 1, 2, 3, 4, 5)
    ]
    assert {lease.state for lease in leases if lease.id in ("l6", "l7")} == {NOT_YET}
    assert len(slurm.tools.calls("sbatch")) == 1
    assert one.poll().max_new_leases == 0


def test_the_half_for_which_the_pace_leaves_nothing_is_not_asked_for_at_once(slurm):
    """The limit is known then, and for a while nothing is asked for."""
    slurm.tools.runs("sbatch", 'echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1')
    one = slurm.ready(shape="array", submit_rate=0.001, submit_burst=1)
    leases = one.take([request(i) for i in (1, 2, 3, 4)])
    assert [lease.state for lease in leases] == [NOT_YET, NOT_YET, ENDED, ENDED]
    assert "takes no job of ours" in one.take([request(5)])[0].reason


def test_what_may_have_been_submitted_is_cancelled_when_it_turns_up(slurm):
    one = slurm.ready(shape="block")
    slurm.tools.runs("sbatch", 'echo "sbatch: error: Socket timed out" >&2; exit 1')
    assert {lease.state for lease in one.take([request(i) for i in (1, 2, 3)])} == {ENDED}
    slurm.queue(job("RUNNING", "8", nodes="n[1-3]", end=200_000, batch="n1"))
    assert set(states(one).values()) == {ENDED}
    assert slurm.tools.calls("scancel") == ["scancel 8"]


def test_who_is_somebody_elses_job_of_such_a_name_is_left_alone(slurm):
    one = slurm.ready(shape="block")
    slurm.queue(job("RUNNING", "9", nodes="n[1-3]", end=200_000, batch="n1", user="mallory"))
    one.know({"l1": "", "l2": "", "l3": ""}, {"l1": "n1", "l2": "n2", "l3": "n3"})
    assert states(one) == {}
    assert not slurm.tools.calls("scancel")


def test_a_node_of_a_block_that_is_not_given_back_is_asked_for_again(slurm):
    one = slurm.ready(shape="block")
    slurm.queue(job("RUNNING", "8", nodes="n[1-3]", end=200_000, batch="n1"))
    one.know({"l1": "", "l2": "", "l3": ""}, {"l1": "n1", "l2": "n2", "l3": "n3"})
    assert set(states(one).values()) == {RUNNING}
    slurm.tools.runs("scontrol", 'case "$*" in *update*) echo busy >&2; exit 1;; esac')
    with pytest.raises(SchedulerError, match="busy"):
        one.give_back([one.ledger.jobs["l2"].lease])
    slurm.tools.runs("scontrol", 'case "$*" in *update*) exit 0;; esac; cat "$here/reservations"')
    assert states(one) == {"l1": RUNNING, "l2": ENDED, "l3": RUNNING}
    updates = [line for line in slurm.tools.calls("scontrol") if "update" in line]
    assert updates == 2 * ["scontrol update JobId=8 NodeList=n[1,3]"]
