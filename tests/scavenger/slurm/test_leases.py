"""Leases of an imitated Slurm: what is asked for, refused, withdrawn and given back."""

from dataclasses import replace

import pytest

from scavenger.batch.rules import GapRules, parse_hours
from scavenger.interface import Lease, LeaseState, SchedulerError
from tests.scavenger.slurm import slurm_world as world
from tests.scavenger.slurm.slurm_world import PREFIX, World, request, why

PENDING, NOT_YET = LeaseState.PENDING, LeaseState.NOT_YET


@pytest.fixture
def slurm(tmp_path):
    return World(tmp_path)


def test_leases_are_submitted_pinned_and_with_their_command(slurm):
    scavenger = slurm.ready()
    leases = scavenger.take([request(1), request(2)])
    assert [(lease.id, lease.state, lease.node) for lease in leases] == [
        ("l1", LeaseState.PENDING, "n1"),
        ("l2", LeaseState.PENDING, "n2"),
    ]
    assert len({lease.scheduler_id for lease in leases}) == 2
    calls = slurm.tools.calls("sbatch")
    assert len(calls) == 2
    assert any("--nodelist=n1 " in call and f"--job-name={PREFIX}l1 " in call for call in calls)
    script = slurm.tools.stdin("sbatch").decode()
    assert "export MALLETRAIN_GRACE_S=10\n" in script
    assert "set -- agent 'a b'\n" in script


def test_asking_again_for_a_known_lease_starts_nothing(slurm):
    scavenger = slurm.ready()
    [first] = scavenger.take([request(1)])
    slurm.queue(
        world.job(
            "PENDING",
            int(first.scheduler_id),
            f"{PREFIX}l1",
            submitted=slurm.now,
            requested_nodes="n1",
        )
    )
    [again] = scavenger.take([request(1)])
    assert (again.id, again.scheduler_id) == ("l1", first.scheduler_id)
    # Also for another process, after a restart of the daemon.
    [other] = slurm.ready().take([request(1)])
    assert other.scheduler_id == first.scheduler_id
    assert len(slurm.tools.calls("sbatch")) == 1


def test_there_are_never_more_requests_than_gaps(slurm):
    scavenger = slurm.ready()
    slurm.nodes(idle="n1", allocated="n[2-8]")
    slurm.queue(world.job("PENDING", 5, f"{PREFIX}l0", submitted=slurm.now, requested_nodes="n1"))
    leases = scavenger.take([request(1), request(2)])
    assert [lease.state for lease in leases] == [LeaseState.ENDED] * 2
    assert "with lease l0" in leases[0].reason
    assert "says it is allocated" in leases[1].reason
    assert slurm.tools.calls("sbatch") == []


def test_no_node_is_asked_for_twice_at_once(slurm):
    scavenger = slurm.ready()
    leases = scavenger.take([request(1), request(2, "n1"), request(3), request(1)])
    assert [lease.state for lease in leases] == [
        LeaseState.PENDING,
        LeaseState.ENDED,
        LeaseState.PENDING,
        LeaseState.PENDING,
    ]
    assert leases[1].reason == "n1 is requested with lease l1"
    assert leases[3] == leases[0]
    assert len(slurm.tools.calls("sbatch")) == 2
    assert scavenger.take([request(4, "nowhere")])[0].reason == "Slurm knows no node nowhere"


def test_the_submission_rate_is_kept(slurm):
    """Two may be asked for, then one every 1000 s; nothing waits for that."""
    scavenger = slurm.ready(submit_rate=0.001, submit_burst=2)
    assert scavenger.poll().max_new_leases == 2
    leases = scavenger.take([request(i) for i in range(1, 5)])
    assert [lease.state for lease in leases] == [PENDING, PENDING, NOT_YET, NOT_YET]
    assert "submit_rate allows 0.001 submissions a second" in leases[3].reason
    assert len(slurm.tools.calls("sbatch")) == 2
    assert scavenger.poll().max_new_leases == 0
    assert scavenger.contact().refused_s == 0, "nobody has refused anything"
    assert not {"l3", "l4"} & scavenger.ledger.given_up.keys()


def test_a_limit_of_the_site_ends_the_asking_for_a_while(slurm):
    scavenger = slurm.ready()
    slurm.tools.fails("sbatch", "sbatch: error: QOSMaxSubmitJobPerUserLimit")
    leases = scavenger.take([request(1)])
    assert "QOSMaxSubmitJobPerUserLimit" in leases[0].reason
    calls = len(slurm.tools.calls("sbatch"))
    assert scavenger.take([request(2)])[0].state is LeaseState.ENDED
    assert len(slurm.tools.calls("sbatch")) == calls
    polled = scavenger.poll()
    assert polled.gaps == ()
    assert "takes no job of ours" in why(polled, "n3")["at once"]
    slurm.now += 301
    assert len(scavenger.poll().gaps) == 8


def test_one_refusal_does_not_fail_the_others(slurm):
    scavenger = slurm.ready()
    slurm.tools.runs(
        "sbatch",
        'case "$*" in *nodelist=n2*) echo "no such node" >&2; exit 1;; esac; echo 7; exit 0',
    )
    leases = scavenger.take([request(1), request(2), request(3)])
    assert [lease.state for lease in leases] == [
        LeaseState.PENDING,
        LeaseState.ENDED,
        LeaseState.PENDING,
    ]
    assert "no such node" in leases[1].reason


def test_the_cause_of_a_refusal_comes_before_the_command_line(slurm):
    """The command line is long: where a reason is cut, the cause is still there."""
    scavenger = slurm.ready()
    slurm.tools.fails("sbatch", "sbatch: error: invalid account or account/partition combination")
    [lease] = scavenger.take([request(1)])
    cause, _, command = lease.reason.partition(" (sbatch ")
    assert cause.endswith("invalid account or account/partition combination")
    assert "sbatch --" not in cause
    assert command.startswith("--")


def test_a_submission_without_an_answer_is_cancelled_should_it_turn_up(slurm):
    scavenger = slurm.ready()
    slurm.tools.hangs("sbatch")
    usual = scavenger.commands.run

    def impatient(argv, **options):
        return usual(argv, **options, **({"timeout_s": 0.5} if argv[0] == "sbatch" else {}))

    scavenger.commands.run = impatient
    [lease] = scavenger.take([request(1)])
    assert lease.state is LeaseState.ENDED
    assert "gave no answer" in lease.reason
    slurm.queue(world.job("RUNNING", 77, f"{PREFIX}l1", nodes="n1", end=slurm.now + 3600))
    polled = scavenger.poll()
    assert [(lease.id, lease.state) for lease in polled.leases] == [("l1", LeaseState.ENDED)]
    assert slurm.tools.calls("scancel") == ["scancel 77"]


def test_leases_that_do_not_start_in_time_are_withdrawn(slurm):
    scavenger = slurm.ready(start_within_s=60.0)
    slurm.queue(
        world.job(
            "PENDING",
            9,
            f"{PREFIX}l1",
            submitted=slurm.now - 30,
            requested_nodes="n1",
            reason="Priority",
        )
    )
    [lease] = scavenger.poll().leases
    assert (lease.state, lease.reason) == (LeaseState.PENDING, "Priority")
    slurm.now += 31
    [lease] = scavenger.poll().leases
    assert lease.state is LeaseState.ENDED
    assert "did not start within 60 s (Priority)" in lease.reason
    assert slurm.tools.calls("scancel") == ["scancel 9"]


def test_suspended_leases_are_ended(slurm):
    scavenger = slurm.ready()
    slurm.queue(world.job("SUSPENDED", 9, f"{PREFIX}l1", nodes="n1", end=slurm.now + 3600))
    [lease] = scavenger.poll().leases
    assert (lease.state, lease.reason) == (LeaseState.ENDED, "the main scheduler suspended it")
    assert slurm.tools.calls("scancel") == ["scancel 9"]


def test_giving_back_cancels_and_forgives_what_has_ended(slurm):
    scavenger = slurm.ready()
    slurm.queue(
        world.job("RUNNING", 9, f"{PREFIX}l1", nodes="n1", end=slurm.now + 3600),
        world.job("COMPLETED", 8, f"{PREFIX}l2", nodes="n2"),
    )
    leases = list(scavenger.poll().leases)
    slurm.tools.fails(
        "scancel", "scancel: error: Kill job error on job id 9: Invalid job id specified"
    )
    scavenger.give_back([*leases, Lease("l5", "55", LeaseState.RUNNING, "n5")])
    assert slurm.tools.calls("scancel") == ["scancel 9"], "Slurm lists no job 55 of lease l5"
    slurm.tools.fails("scancel", "scancel: error: Access/permission denied")
    with pytest.raises(SchedulerError, match="permission denied"):
        scavenger.give_back(leases)
    scavenger.give_back([])


def test_an_old_job_id_is_cancelled_only_if_its_job_still_has_the_name_of_the_lease(slurm):
    """A Slurm that has lost its state numbers its jobs from the beginning."""
    scavenger = slurm.ready()
    lease_jobs = {n: world.job("RUNNING", n, f"{PREFIX}l{n}", nodes=f"n{n}") for n in (1, 2)}
    slurm.queue(*lease_jobs.values())
    leases = scavenger.poll().leases
    for tool in ("squeue", "sinfo"):
        slurm.tools.fails(tool, "Unable to contact slurm controller")
    slurm.now += 61
    with pytest.raises(SchedulerError, match="Unable to contact"):
        scavenger.give_back(leases)
    assert slurm.tools.calls("scancel") == []
    slurm.queue(world.job("RUNNING", 1, "their own", nodes="n5"), lease_jobs[2])
    slurm.nodes(idle="n[3-4]", allocated="n[1-2,5-8]")
    scavenger.give_back(leases)
    assert slurm.tools.calls("scancel") == ["scancel 2"]


def test_leases_of_an_owner_are_submitted_and_cancelled_as_the_owner(slurm, tmp_path):
    sudo = tmp_path / "bin" / "as-owner"
    sudo.write_text(
        '#!/bin/sh\nprintf "%s\\n" "as-owner $*" >>"$(dirname "$0")/calls"\nshift\nexec "$@"\n'
    )
    sudo.chmod(0o755)
    scavenger = slurm.ready(submit_as=("as-owner", "{owner}"))
    [lease] = scavenger.take([request(1, owner="ann")])
    assert lease.state is LeaseState.PENDING
    submission = f"as-owner ann {sudo.parent}/sbatch --parsable"
    assert any(
        call.startswith(submission) and "--output=/dev/null" in call for call in slurm.tools.calls()
    )
    slurm.queue(
        world.job(
            "RUNNING",
            int(lease.scheduler_id),
            f"{PREFIX}l1",
            nodes="n1",
            user="ann",
            end=slurm.now + 999,
        )
    )
    scavenger.poll()
    scavenger.give_back([lease])
    assert f"as-owner ann {sudo.parent}/scancel {lease.scheduler_id}" in slurm.tools.calls(), (
        "sudo has a PATH of its own"
    )


def test_jobs_of_others_with_our_name_are_not_ours(slurm):
    scavenger = slurm.ready()
    slurm.queue(
        world.job("RUNNING", 9, f"{PREFIX}l1", nodes="n1", user="mallory", end=slurm.now + 3600)
    )
    assert scavenger.poll().leases == ()


def test_leases_end_before_the_next_known_use(slurm):
    scavenger = slurm.ready(backfill=True, time_min_s=120.0, spare_s=30.0)
    slurm.queue(
        world.job("PENDING", 1, "big", start=slurm.now + 700, planned="n1"),
        world.job("PENDING", 2, "soon", start=slurm.now + 140, planned="n2"),
    )
    leases = scavenger.take([request(1), request(2), request(3)])
    assert [lease.state for lease in leases] == [
        LeaseState.PENDING,
        LeaseState.ENDED,
        LeaseState.PENDING,
    ]
    calls = "\n".join(slurm.tools.calls("sbatch"))
    assert "--time=11 " in calls
    assert "--time=720 " in calls
    assert "--time-min=2" in calls


def test_leases_end_with_the_hours_and_the_duration_asked_for(slurm):
    import time

    slurm.now = time.mktime((2026, 6, 1, 6, 0, 0, 0, 0, -1))
    scavenger = slurm.ready(rules=GapRules(hours=parse_hours(["22:00-07:00"])))
    slurm.now = time.mktime((2026, 6, 1, 6, 20, 0, 0, 0, -1))
    scavenger.take([request(1), request(2, duration_s=600.0)])
    calls = "\n".join(slurm.tools.calls("sbatch"))
    assert "--time=40 " in calls
    assert "--time=10 " in calls


def test_hours_that_are_read_again_end_leases_that_run(slurm):
    import time

    slurm.now = time.mktime((2026, 6, 1, 6, 0, 0, 0, 0, -1))
    scavenger = slurm.ready()
    scavenger.take([request(1)])
    slurm.queue(world.job("RUNNING", 7, f"{world.PREFIX}l1", partition="preemptable", nodes="n1"))
    assert scavenger.poll().leases[0].gone_at is None
    rules = GapRules(hours=parse_hours(["22:00-05:00"]))
    scavenger.settings = replace(scavenger.settings, rules=rules)
    (lease,) = scavenger.poll().leases
    assert lease.reason == "no leases are allowed at this hour"
    assert lease.gone_at is not None
    assert len(slurm.tools.calls("scancel")) == 1


def test_agents_run_as_a_step_where_preemption_would_not_reach_them(slurm):
    slurm.file("config", world.CONFIG.replace(",preempt_send_user_signal", ""))
    slurm.ready().take([request(1)])
    assert "--signal=TERM@10" in slurm.tools.calls("sbatch")[0]
    assert "export MALLETRAIN_AS_STEP=1\n" in slurm.tools.stdin("sbatch").decode()


def test_node_classes_come_from_features(slurm):
    slurm.tools.answers(
        "sinfo",
        world.sinfo(
            "preemptable|up|idle|a100,ib|gpu:4|n1|none", "preemptable|up|idle|v100|gpu:2|n2|none"
        ),
    )
    scavenger = slurm.ready(node_classes=("a100", "v100"))
    assert {gap.node: gap.node_class for gap in scavenger.poll().gaps} == {
        "n1": "a100",
        "n2": "v100",
    }
    scavenger.take([request(2)])
    assert "export MALLETRAIN_NODE_CLASS=v100\n" in slurm.tools.stdin("sbatch").decode()
