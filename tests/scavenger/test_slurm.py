"""The scavenger of Slurm against imitated commands: what it asks for, and what it does when they hang, fail or print garbage."""

import pytest

from scavenger.batch_settings import BatchSettings
from scavenger.commands import Commands, Policy
from scavenger.gap_memory import GapMemory
from scavenger.hours import parse_hours
from scavenger.interface import Lease, LeaseRequest, LeaseState, SchedulerError
from scavenger.lease_script import PLACE, forget_outputs
from scavenger.rules import GapRules
from scavenger.slurm import SlurmScavenger
from scavenger.slurm_job import LeaseOptions
from scavenger.slurm_source import asking_environment, submitting_environment
from tests.scavenger import slurm_world as world
from tests.scavenger.fake_tools import FakeTools

PREFIX = "malletrain-t-"
TEMPLATE = f'#!/bin/sh\n{PLACE}\nexec "$@"\n'


class World:
    """A scavenger on imitated commands, with a clock of its own."""

    def __init__(self, root):
        self.now = 100_000.0
        self.tools = FakeTools(root / "bin", ("squeue", "sinfo", "scontrol", "sdiag", "sbatch", "scancel"))
        self.tools.runs(
            "scontrol",
            'case "$*" in *config*) cat "$here/config"; exit 0;; *partition*) cat "$here/partitions"; exit 0;; '
            '*) cat "$here/reservations"; exit 0;; esac',
        )
        self.tools.runs("sbatch", '[ -f "$here/sbatch.mode" ] || echo $$')
        self.file("config", world.CONFIG)
        self.file("partitions", world.PARTITIONS)
        self.file("reservations", "No reservations in the system\n")
        self.tools.answers("sdiag", "")
        self.queue("")
        self.nodes(idle="n[1-8]")

    def file(self, name, text):
        (self.tools.root / name).write_text(text)

    def queue(self, *jobs):
        self.tools.answers("squeue", "".join(jobs))

    def nodes(self, **states):
        self.tools.answers("sinfo", world.nodes(states))

    def scavenger(self, timeout_s=10.0, tries=1, **settings):
        settings.setdefault("lease", LeaseOptions(partition="preemptable"))
        made = BatchSettings(tag="t", template=TEMPLATE, user="me", submit_rate=1000.0, **settings)
        commands = Commands(Policy(timeout_s, tries, 0.0), self.tools.environment)
        return SlurmScavenger(made, commands, memory=GapMemory(), clock=lambda: self.now, environment=self.tools.environment)

    def ready(self, **settings):
        """A scavenger for which all idle nodes have had their turn."""
        made = self.scavenger(**settings)
        made.poll()
        self.now += 60
        return made


@pytest.fixture
def slurm(tmp_path):
    return World(tmp_path)


def request(number, node=None, **options):
    return LeaseRequest(f"l{number}", node or f"n{number}", ("agent", "a b"), {"A": "1"}, **options)


def names(snapshot):
    return sorted(gap.node for gap in snapshot.gaps)


def why(snapshot, node):
    return {rule: sentence for e in snapshot.explanations if e.node == node for rule, passed, sentence in e.rules if not passed}


def test_a_poll_is_three_commands(slurm):
    scavenger = slurm.ready()
    before = len(slurm.tools.calls())
    scavenger.poll()
    assert [line.split()[0] for line in slurm.tools.calls()[before:]] == ["squeue", "sinfo", "scontrol"]


def test_a_node_is_a_gap_after_its_backfill_turn(slurm):
    scavenger = slurm.scavenger()
    assert names(scavenger.poll()) == []
    slurm.now += 2.5
    snapshot = scavenger.poll()
    assert len(snapshot.gaps) == 8
    assert snapshot.idle_nodes == snapshot.total_nodes == 8
    assert snapshot.gaps[0].horizon_s > 0
    slurm.nodes(idle="n[1-7]", allocated="n8")
    assert scavenger.poll().idle_nodes == 7
    slurm.nodes(idle="n[1-8]")
    assert "n8" not in names(scavenger.poll()), "it was in use in between, and must wait for its turn again"


def test_polls_follow_the_backfill_cycle_and_the_time_they_take(slurm):
    scavenger = slurm.scavenger(poll_interval_s=1.0)
    assert scavenger._interval(scavenger._look(), 0.01) == 1.0
    assert scavenger._interval(scavenger._look(), 3.0) == 30.0
    slurm.file("config", world.CONFIG.replace("bf_interval=2", "bf_interval=60"))
    slurm.now += 400
    assert scavenger._interval(scavenger._look(), 0.01) == 15.0
    assert scavenger.poll().poll_again_s >= 15.0


def test_horizons_end_at_the_next_known_use(slurm):
    scavenger = slurm.ready(rules=GapRules(use_planned=True))
    slurm.queue(world.job("PENDING", 1, "big", start=slurm.now + 200, planned="n1"))
    slurm.file("reservations", f"ReservationName=m StartTime={slurm.now + 300:.0f} EndTime={slurm.now + 900:.0f} Nodes=n2 Flags=MAINT\n")
    horizon = {gap.node: gap.horizon_s for gap in scavenger.poll().gaps}
    assert horizon["n1"] == 200.0
    assert horizon["n2"] == 300.0
    assert horizon["n3"] > 300.0


def test_planned_nodes_are_left_alone_unless_allowed(slurm):
    slurm.nodes(idle="n1", planned="n2")
    slurm.queue(world.job("PENDING", 1, "big", start=slurm.now + 3600, planned="n2"))
    assert names(slurm.ready().poll()) == ["n1"]
    assert names(slurm.ready(rules=GapRules(use_planned=True)).poll()) == ["n1", "n2"]
    assert names(slurm.ready(backfill=True).poll()) == ["n1", "n2"]


def test_leases_are_submitted_pinned_and_with_their_command(slurm):
    scavenger = slurm.ready()
    leases = scavenger.take([request(1), request(2)])
    assert [(lease.id, lease.state, lease.node) for lease in leases] == [("l1", LeaseState.PENDING, "n1"), ("l2", LeaseState.PENDING, "n2")]
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
    slurm.queue(world.job("PENDING", int(first.scheduler_id), f"{PREFIX}l1", submitted=slurm.now, wanted="n1"))
    [again] = scavenger.take([request(1)])
    assert (again.id, again.scheduler_id) == ("l1", first.scheduler_id)
    # Also for another process, after a restart of the daemon.
    [other] = slurm.ready().take([request(1)])
    assert other.scheduler_id == first.scheduler_id
    assert len(slurm.tools.calls("sbatch")) == 1


def test_there_are_never_more_requests_than_gaps(slurm):
    scavenger = slurm.ready()
    slurm.nodes(idle="n1", allocated="n[2-8]")
    slurm.queue(world.job("PENDING", 5, f"{PREFIX}l0", submitted=slurm.now, wanted="n1"))
    leases = scavenger.take([request(1), request(2)])
    assert [lease.state for lease in leases] == [LeaseState.ENDED] * 2
    assert "with lease l0" in leases[0].reason
    assert "says it is allocated" in leases[1].reason
    assert slurm.tools.calls("sbatch") == []


def test_no_node_is_asked_for_twice_at_once(slurm):
    scavenger = slurm.ready()
    leases = scavenger.take([request(1), request(2, "n1"), request(3), request(1)])
    assert [lease.state for lease in leases] == [LeaseState.PENDING, LeaseState.ENDED, LeaseState.PENDING, LeaseState.PENDING]
    assert leases[1].reason == "n1 is asked for with lease l1"
    assert leases[3] == leases[0]
    assert len(slurm.tools.calls("sbatch")) == 2
    assert scavenger.take([request(4, "nowhere")])[0].reason == "Slurm knows no node nowhere"


def test_many_gaps_are_taken_a_share_at_each_poll(slurm):
    slurm.file("partitions", world.PARTITIONS.replace("n[1-8]", "n[1-500]"))
    slurm.nodes(idle="n[1-500]")
    snapshot = slurm.ready(rules=GapRules(max_at_once=30)).poll()
    assert len(snapshot.gaps) == 30
    assert "30 nodes are asked for at once" in why(snapshot, "n400")["at once"]


def test_the_submission_rate_is_kept(slurm):
    scavenger = slurm.ready()
    slept = []
    scavenger.commands.sleep = slept.append
    scavenger.submitter.pace.rate = 0.5
    scavenger.take([request(i) for i in range(1, 5)])
    # Nobody really waited, so each is told to wait two seconds longer than the one before.
    assert sorted(round(s) for s in slept) == [0, 2, 4, 6]


def test_a_limit_of_the_site_ends_the_asking_for_a_while(slurm):
    scavenger = slurm.ready()
    slurm.tools.fails("sbatch", "sbatch: error: QOSMaxSubmitJobPerUserLimit")
    leases = scavenger.take([request(1)])
    assert "QOSMaxSubmitJobPerUserLimit" in leases[0].reason
    calls = len(slurm.tools.calls("sbatch"))
    assert scavenger.take([request(2)])[0].state is LeaseState.ENDED
    assert len(slurm.tools.calls("sbatch")) == calls
    snapshot = scavenger.poll()
    assert snapshot.gaps == ()
    assert "refuses more jobs" in why(snapshot, "n3")["at once"]
    slurm.now += 301
    assert len(scavenger.poll().gaps) == 8


def test_one_refusal_does_not_fail_the_others(slurm):
    scavenger = slurm.ready()
    slurm.tools.runs("sbatch", 'case "$*" in *nodelist=n2*) echo "no such node" >&2; exit 1;; esac; echo 7; exit 0')
    leases = scavenger.take([request(1), request(2), request(3)])
    assert [lease.state for lease in leases] == [LeaseState.PENDING, LeaseState.ENDED, LeaseState.PENDING]
    assert "no such node" in leases[1].reason


def test_a_submission_without_an_answer_is_cancelled_should_it_turn_up(slurm):
    scavenger = slurm.ready(timeout_s=0.5)
    slurm.tools.hangs("sbatch")
    [lease] = scavenger.take([request(1)])
    assert lease.state is LeaseState.ENDED
    assert "gave no answer" in lease.reason
    slurm.queue(world.job("RUNNING", 77, f"{PREFIX}l1", nodes="n1", end=slurm.now + 3600))
    snapshot = scavenger.poll()
    assert [(lease.id, lease.state) for lease in snapshot.leases] == [("l1", LeaseState.ENDED)]
    assert slurm.tools.calls("scancel") == ["scancel 77"]


def test_leases_that_do_not_start_in_time_are_withdrawn(slurm):
    scavenger = slurm.ready(start_within_s=60.0)
    slurm.queue(world.job("PENDING", 9, f"{PREFIX}l1", submitted=slurm.now - 30, wanted="n1", reason="Priority"))
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


def test_while_slurm_takes_leases_back_for_an_unknown_job_no_other_is_asked_for(slurm):
    scavenger = slurm.ready()
    running = world.job("RUNNING", 9, f"{PREFIX}l1", nodes="n1", end=slurm.now + 3600)
    waiting = world.job("PENDING", 10, f"{PREFIX}l2", submitted=slurm.now, wanted="n2")
    slurm.nodes(idle="n[2-8]", allocated="n1")
    slurm.queue(running, waiting)
    assert len(scavenger.poll().gaps) == 6
    slurm.queue(world.job("RUNNING", 9, f"{PREFIX}l1", nodes="n1", end=slurm.now + 10), waiting)
    leases = scavenger.take([request(3)])
    assert "took leases back" in leases[0].reason
    snapshot = scavenger.poll()
    assert snapshot.gaps == ()
    assert {lease.id: lease.state for lease in snapshot.leases} == {"l1": LeaseState.RUNNING, "l2": LeaseState.ENDED}
    assert slurm.tools.calls("scancel") == ["scancel 10"]
    slurm.queue()
    slurm.nodes(idle="n[1-8]")
    slurm.now += 3.5
    assert len(scavenger.poll().gaps) == 7


def test_idle_nodes_are_left_to_the_job_that_slurm_is_about_to_start(slurm):
    scavenger = slurm.ready()
    running = [world.job("RUNNING", 20 + i, f"{PREFIX}l{i}", nodes=f"n{i}", end=slurm.now + 9999) for i in (1, 2)]
    slurm.nodes(idle="n[3-8]", allocated="n[1-2]")
    slurm.queue(*running)
    assert len(scavenger.poll().gaps) == 6
    # It needs five nodes: the two that it preempts leases on, and three of the idle ones.
    leaving = [world.job("RUNNING", 20 + i, f"{PREFIX}l{i}", nodes=f"n{i}", end=slurm.now + 10) for i in (1, 2)]
    waiting = world.job("PENDING", 31, f"{PREFIX}l3", submitted=slurm.now, wanted="n3")
    main = world.job("PENDING", 5, "main", count=5, start=slurm.now, planned="n[1-3]", reason="Resources")
    slurm.queue(*leaving, waiting, main)
    snapshot = scavenger.poll()
    assert names(snapshot) == ["n6", "n7", "n8"]
    assert why(snapshot, "n4")["hold"] == "Slurm is about to start job 5, which needs 5 nodes"
    assert slurm.tools.calls("scancel") == ["scancel 31"], "the lease that waits for one of them is withdrawn"
    # Whatever keeps the job from starting, it does not keep nodes for ever.
    slurm.now += 61
    assert len(scavenger.poll().gaps) >= 5


def test_leases_are_asked_to_leave_for_a_job_that_slurm_lets_wait(slurm):
    scavenger = slurm.ready()
    slurm.nodes(idle="n1", allocated="n[2-8]")
    leases = [world.job("RUNNING", 20 + i, f"{PREFIX}l{i}", nodes=f"n{i}", end=slurm.now + 9999) for i in range(2, 9)]
    stuck = world.job("PENDING", 5, "main", count=3, start=slurm.now, planned="n[1-3]", reason="Resources")
    slurm.queue(*leases, stuck)
    snapshot = scavenger.poll()
    assert snapshot.gaps == ()
    assert "about to start job 5, which needs 3 nodes" in why(snapshot, "n1")["hold"]
    assert scavenger._interval(scavenger._look(), 0.01) <= 2.0
    assert slurm.tools.calls("scancel") == [], "Slurm may be just starting it"
    slurm.now += 2.5
    scavenger.poll()
    assert slurm.tools.calls("scancel") == ["scancel --signal=TERM --batch 22 23"]
    slurm.now += 2
    scavenger.poll()
    assert len(slurm.tools.calls("scancel")) == 1, "they are on their way"
    # One that does not leave within the grace time is cancelled.
    slurm.queue(leases[0], stuck)
    slurm.now += 10
    scavenger.poll()
    assert slurm.tools.calls("scancel")[1:] == ["scancel 22"]


def test_giving_back_cancels_and_forgives_what_has_ended(slurm):
    scavenger = slurm.ready()
    slurm.queue(
        world.job("RUNNING", 9, f"{PREFIX}l1", nodes="n1", end=slurm.now + 3600), world.job("COMPLETED", 8, f"{PREFIX}l2", nodes="n2")
    )
    leases = list(scavenger.poll().leases)
    slurm.tools.fails("scancel", "scancel: error: Kill job error on job id 9: Invalid job id specified")
    scavenger.give_back([*leases, Lease("l5", "55", LeaseState.RUNNING, "n5")])
    assert slurm.tools.calls("scancel") == ["scancel 9 55"]
    slurm.tools.fails("scancel", "scancel: error: Access/permission denied")
    with pytest.raises(SchedulerError, match="permission denied"):
        scavenger.give_back(leases)
    scavenger.give_back([])


def test_leases_of_an_owner_are_submitted_and_cancelled_as_the_owner(slurm, tmp_path):
    sudo = tmp_path / "bin" / "as-owner"
    sudo.write_text('#!/bin/sh\nprintf "%s\\n" "as-owner $*" >>"$(dirname "$0")/calls"\nshift\nexec "$@"\n')
    sudo.chmod(0o755)
    scavenger = slurm.ready(submit_as=("as-owner", "{owner}"))
    [lease] = scavenger.take([request(1, owner="ann")])
    assert lease.state is LeaseState.PENDING
    submission = f"as-owner ann {sudo.parent}/sbatch --parsable"
    assert any(call.startswith(submission) and "--output=/dev/null" in call for call in slurm.tools.calls())
    slurm.queue(world.job("RUNNING", int(lease.scheduler_id), f"{PREFIX}l1", nodes="n1", user="ann", end=slurm.now + 999))
    scavenger.poll()
    scavenger.give_back([lease])
    assert f"as-owner ann {sudo.parent}/scancel {lease.scheduler_id}" in slurm.tools.calls(), "sudo has a PATH of its own"


def test_jobs_of_others_with_our_name_are_not_ours(slurm):
    scavenger = slurm.ready()
    slurm.queue(world.job("RUNNING", 9, f"{PREFIX}l1", nodes="n1", user="mallory", end=slurm.now + 3600))
    assert scavenger.poll().leases == ()


@pytest.mark.parametrize("tool", ["squeue", "sinfo", "scontrol"])
@pytest.mark.parametrize("trouble", ["fails", "hangs", "prints garbage"])
def test_a_failed_poll_changes_nothing(slurm, tool, trouble):
    scavenger = slurm.ready(timeout_s=0.5 if trouble == "hangs" else 10.0)
    if tool == "scontrol":
        slurm.tools.runs("scontrol", {"fails": "exit 1", "hangs": "exec sleep 600"}.get(trouble, "echo rubbish; exit 0"))
    elif trouble == "fails":
        slurm.tools.fails(tool, "Unable to contact slurm controller (connect failure)")
    elif trouble == "hangs":
        slurm.tools.hangs(tool)
    else:
        slurm.tools.answers(tool, "<html>504</html>")
    slurm.now += 5
    with pytest.raises(SchedulerError) as error:
        scavenger.poll()
    assert str(error.value).endswith((".", "failure)"))
    with pytest.raises(SchedulerError):
        scavenger.take([request(1)])
    assert slurm.tools.calls("sbatch") == []
    slurm.tools.works(tool)
    slurm.queue("")
    slurm.nodes(idle="n[1-8]")
    slurm.tools.runs("scontrol", 'cat "$here/reservations"; exit 0')
    slurm.now += 5
    assert len(scavenger.poll().gaps) == 8, "the nodes are as long idle as they were"


def test_what_is_configured_may_fail_later_but_not_at_first(slurm):
    slurm.file("config", "slurm_load_ctl_conf error")
    scavenger = slurm.scavenger()
    with pytest.raises(SchedulerError, match="SLURM_VERSION"):
        scavenger.poll()
    slurm.file("config", world.CONFIG)
    scavenger.poll()
    slurm.file("config", "")
    slurm.now += 1000
    scavenger.poll()


def test_leases_end_before_the_next_known_use(slurm):
    scavenger = slurm.ready(backfill=True, time_min_s=120.0, spare_s=30.0)
    slurm.queue(
        world.job("PENDING", 1, "big", start=slurm.now + 700, planned="n1"),
        world.job("PENDING", 2, "soon", start=slurm.now + 140, planned="n2"),
    )
    leases = scavenger.take([request(1), request(2), request(3)])
    assert [lease.state for lease in leases] == [LeaseState.PENDING, LeaseState.ENDED, LeaseState.PENDING]
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


def test_agents_run_as_a_step_where_preemption_would_not_reach_them(slurm):
    slurm.file("config", world.CONFIG.replace(",preempt_send_user_signal", ""))
    slurm.ready().take([request(1)])
    assert "--signal=TERM@10" in slurm.tools.calls("sbatch")[0]
    assert "export MALLETRAIN_AS_STEP=1\n" in slurm.tools.stdin("sbatch").decode()


def test_node_classes_come_from_features(slurm):
    slurm.tools.answers("sinfo", world.sinfo("preemptable|up|idle|a100,ib|gpu:4|n1|none", "preemptable|up|idle|v100|gpu:2|n2|none"))
    scavenger = slurm.ready(node_classes=("a100", "v100"))
    assert {gap.node: gap.node_class for gap in scavenger.poll().gaps} == {"n1": "a100", "n2": "v100"}
    scavenger.take([request(2)])
    assert "export MALLETRAIN_NODE_CLASS=v100\n" in slurm.tools.stdin("sbatch").decode()


def test_old_outputs_are_forgotten(slurm, tmp_path, monkeypatch):
    monkeypatch.setattr("scavenger.batch.forget_outputs", lambda folder: forget_outputs(folder, 3))
    folder = tmp_path / "leases"
    folder.mkdir()
    for i in range(6):
        (folder / f"l{i}.out").touch()
    slurm.scavenger(output_dir=folder).poll()
    assert len(list(folder.iterdir())) == 3


def test_the_environment_of_commands():
    kept = {"PATH": "/bin", "SLURM_CONF": "/c", "LANG": "de_DE", "HOME": "/h"}
    mine = {**kept, "SLURM_JOB_ID": "7", "SBATCH_PARTITION": "x", "SQUEUE_FORMAT": "%i"}
    assert asking_environment(mine) == {**kept, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}
    assert submitting_environment(mine) == kept
