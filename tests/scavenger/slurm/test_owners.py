"""Leases of several users of an imitated Slurm: whose jobs are whose, and that one user's trouble
is no other's.
"""

import pytest

from scavenger.interface import Lease, LeaseState, SchedulerError
from tests.scavenger.slurm import slurm_world as world
from tests.scavenger.slurm.slurm_world import PREFIX, World, names, request

AS_OWNER = """#!/bin/sh
printf "%s\\n" "as $*" >>"{root}/calls"
owner=$1
shift
[ -f "{root}/refuse.$owner" ] && case "$1" in *{what}) cat "{root}/refuse.$owner" >&2; exit 1;; esac
exec "$@"
"""


@pytest.fixture
def slurm(tmp_path):
    return World(tmp_path)


def several(slurm, refused="sbatch", **settings):
    """A scavenger of several users. ``refused``: the command that fails for the users named
    by :func:`refuse`.
    """
    tool = slurm.tools.root / "as-owner"
    tool.write_text(AS_OWNER.format(root=slurm.tools.root, what=refused))
    tool.chmod(0o755)
    return slurm.ready(submit_as=("as-owner", "{owner}"), **settings)


def refuse(slurm, owner, words):
    (slurm.tools.root / f"refuse.{owner}").write_text(words)


def as_owner(slurm, what):
    """(owner, arguments) of every call of the command as another user."""
    calls = [call.split(" ", 3) for call in slurm.tools.calls("as ")]
    return [
        (owner, *arguments) for _, owner, command, *arguments in calls if command.endswith(what)
    ]


def runs(slurm, number, lease, user, node):
    return world.job(
        "RUNNING", number, f"{PREFIX}{lease}", nodes=node, user=user, end=slurm.now + 9999
    )


def fakes(slurm):
    """Jobs of a user who imitates the names of our jobs: one for each lease of Ann's, and one of a
    lease that nobody took.
    """
    return [
        world.job("SUSPENDED", 666, f"{PREFIX}l1", nodes="n7", user="eve", end=slurm.now + 9999),
        world.job("RUNNING", 667, f"{PREFIX}l2", nodes="n8", user="eve", end=slurm.now + 9999),
        world.job(
            "PENDING",
            668,
            f"{PREFIX}zzz",
            requested_nodes="n6",
            user="eve",
            submitted=slurm.now - 9999,
        ),
    ]


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_jobs_of_others_with_the_name_of_a_lease_change_nothing(slurm, first, restarted):
    scavenger = several(slurm, max_leases=4)
    leases = scavenger.take([request(1, owner="ann"), request(2, owner="ann")])
    numbers = [int(lease.scheduler_id) for lease in leases]
    if restarted:
        scavenger = slurm.ready(submit_as=("as-owner", "{owner}"), max_leases=4)
        scavenger.know({"l1": "ann", "l2": "ann", "l9": ""})
    true = [
        runs(slurm, numbers[0], "l1", "ann", "n1"),
        world.job(
            "PENDING",
            numbers[1],
            f"{PREFIX}l2",
            requested_nodes="n2",
            user="ann",
            submitted=slurm.now,
        ),
        runs(slurm, 99, "l9", "me", "n5"),
    ]
    slurm.queue(*(fakes(slurm) + true if first else true + fakes(slurm)))
    polled = scavenger.poll()
    by_lease = {lease.id: (lease.scheduler_id, lease.state, lease.node) for lease in polled.leases}
    assert by_lease["l1"] == (str(numbers[0]), LeaseState.RUNNING, "n1")
    assert by_lease["l2"][:2] == (str(numbers[1]), LeaseState.PENDING)
    assert by_lease.keys() == {"l1", "l2", "l9"}
    assert slurm.tools.calls("scancel") == []
    assert len(scavenger.take([request(3, owner="bob")])) == 1
    assert [owner for owner, *_ in as_owner(slurm, "sbatch")] == ["ann", "ann", "bob"], (
        "there may be one more"
    )
    scavenger.give_back(leases)
    assert as_owner(slurm, "scancel") == [("ann", " ".join(map(str, numbers)))]


def test_a_user_who_shortens_a_job_of_our_name_holds_up_nobody(slurm):
    scavenger = several(slurm)
    for end in (5000, 4000):
        slurm.queue(
            world.job("RUNNING", 9, f"{PREFIX}zzz", nodes="n7", user="eve", end=slurm.now + end)
        )
        assert len(scavenger.poll().gaps) == 8


def test_a_lease_of_before_a_restart_is_given_back_as_its_owner(slurm):
    scavenger = several(slurm)
    scavenger.know({"l1": "ann", "l2": ""})
    slurm.queue(runs(slurm, 41, "l1", "ann", "n1"), runs(slurm, 42, "l2", "me", "n2"))
    scavenger.give_back(
        [Lease("l1", "41", LeaseState.RUNNING, "n1"), Lease("l2", "42", LeaseState.RUNNING, "n2")]
    )
    assert as_owner(slurm, "scancel") == [("ann", "41")]
    assert "scancel 42" in slurm.tools.calls("scancel")


def test_one_users_limit_stops_nobody_else(slurm):
    scavenger = several(slurm)
    refuse(slurm, "bob", "sbatch: error: AssocMaxSubmitJobLimit\n")
    leases = scavenger.take(
        [request(1, owner="ann"), request(2, owner="bob"), request(3, owner="cid"), request(4)]
    )
    assert [lease.state for lease in leases] == [
        LeaseState.PENDING,
        LeaseState.ENDED,
        LeaseState.PENDING,
        LeaseState.PENDING,
    ]
    assert "AssocMaxSubmitJobLimit" in leases[1].reason
    assert names(scavenger.poll()) == [f"n{i}" for i in range(1, 9)], "for others they are of use"
    again = scavenger.take([request(5, owner="bob"), request(6, owner="ann")])
    assert [lease.state for lease in again] == [LeaseState.ENDED, LeaseState.PENDING]
    assert again[0].reason.startswith("Slurm takes no job of bob for now: sbatch: error: AssocMax")
    assert [owner for owner, *_ in as_owner(slurm, "sbatch")].count("bob") == 1, (
        "he is not asked for again at once"
    )
    slurm.now += 301
    assert "sbatch: error" in scavenger.take([request(7, owner="bob")])[0].reason


def test_what_cannot_be_cancelled_for_one_is_cancelled_for_the_others(slurm):
    scavenger = several(slurm, refused="scancel")
    owners = ("ann", "bob", "cid")
    leases = scavenger.take([request(i, owner=owner) for i, owner in enumerate(owners, 1)])
    refuse(slurm, "bob", "sudo: a password is required\n")
    with pytest.raises(SchedulerError, match="a password is required"):
        scavenger.give_back(leases)
    assert sorted(as_owner(slurm, "scancel")) == [
        (owner, lease.scheduler_id) for owner, lease in zip(owners, leases, strict=True)
    ], "some at a time, in any order"


def test_a_signal_that_fails_for_one_is_not_sent_to_the_others_again(slurm):
    scavenger = several(slurm, refused="scancel")
    refuse(slurm, "bob", "sudo: a password is required\n")
    slurm.nodes(idle="n1", allocated="n[2-8]")
    scavenger.know({"l2": "ann", "l3": "bob"})
    stuck = world.job(
        "PENDING", 5, "main", count=3, start=slurm.now, planned="n[1-3]", reason="Resources"
    )
    slurm.queue(runs(slurm, 22, "l2", "ann", "n2"), runs(slurm, 23, "l3", "bob", "n3"), stuck)
    scavenger.poll()
    for _ in range(3):
        slurm.now += 2.5
        scavenger.poll()
    owners = [owner for owner, options in as_owner(slurm, "scancel") if "--signal=TERM" in options]
    assert owners.count("ann") == 1
    assert owners.count("bob") > 1


def forged(slurm, number, name, user, node):
    return world.job(
        "RUNNING", number, PREFIX + name, nodes=node, user=user, end=slurm.now + 99, batch=node
    )


def test_jobs_of_those_who_have_no_lease_are_nobodys_whatever_their_names(slurm):
    scavenger = several(slurm)
    scavenger.know({"l1": "ann"}, {"l1": "n1"})
    slurm.queue(
        runs(slurm, 41, "l1", "ann", "n1"),
        forged(slurm, 666, "l9000-9001", "eve", "n7"),
        forged(slurm, 667, "l9000@n7", "eve", "n7"),
        forged(slurm, 668, "x@y", "ann", "n6"),
    )
    assert {lease.id for lease in scavenger.poll().leases} == {"l1"}
    assert slurm.tools.calls("scancel") == as_owner(slurm, "scancel") == []


def test_what_nobody_asked_for_and_cannot_be_cancelled_is_left_alone_for_a_while(slurm):
    scavenger = several(slurm, refused="scancel")
    refuse(slurm, "ann", "sudo: a password is required\n")
    scavenger.know({"l1": "ann"}, {"l1": "n1"})
    slurm.queue(runs(slurm, 41, "l1", "ann", "n1"), forged(slurm, 666, "l9000-9001", "ann", "n7"))
    for _ in range(5):
        scavenger.poll()
        slurm.now += 5
    assert as_owner(slurm, "scancel") == [("ann", "666")]
    slurm.now += 300
    scavenger.poll()
    assert len(as_owner(slurm, "scancel")) == 2


@pytest.mark.parametrize("state", ["RUNNING", "PENDING"])
def test_a_main_job_whose_name_contains_that_of_a_lease_is_not_cancelled(slurm, state):
    """A lease that a job_submit plugin has renamed has the number that sbatch returned."""
    scavenger = slurm.ready()
    [lease] = scavenger.take([request(1)])
    main = world.job(state, 999, f"post-{PREFIX}l1", nodes="n7", end=slurm.now + 9999)
    renamed = runs(slurm, lease.scheduler_id, "l1", "me", "n1").replace("|mall", "|proj_mall")
    slurm.queue(main, renamed)
    [polled] = scavenger.poll().leases
    assert (polled.scheduler_id, polled.state) == (lease.scheduler_id, LeaseState.RUNNING)
    scavenger.give_back([lease])
    slurm.queue(main)
    scavenger.give_back([lease])
    assert scavenger.poll().leases == ()
    scavenger.give_back([lease])
    restarted = slurm.scavenger()
    restarted.know({"l1": ""}, {"l1": "n1"}, {"l1": lease.scheduler_id})
    restarted.give_back([lease])
    assert slurm.tools.calls("scancel") == [f"scancel {lease.scheduler_id}"]


@pytest.mark.parametrize(
    ("name", "number", "scheduler_id"),
    [("l1", "7", "7"), ("l1-2", "7", "7/n1"), ("l1-2", "7_0", "7_0"), ("l1-2", "7_0", "7/n1")],
)
def test_a_renamed_lease_is_known_again_after_a_restart_by_its_number(
    slurm, name, number, scheduler_id
):
    scavenger = slurm.scavenger()
    scavenger.know({"l1": ""}, {"l1": "n1"}, {"l1": scheduler_id})
    slurm.queue(runs(slurm, number, f"{name}_x", "me", "n1"))
    [lease] = scavenger.poll().leases
    assert (lease.id, lease.state, lease.node) == ("l1", LeaseState.RUNNING, "n1")
    other = slurm.scavenger()
    other.know({"l1": ""}, {"l1": "n1"}, {"l1": ""})
    assert other.poll().leases == ()
    assert not slurm.tools.calls("scancel")
