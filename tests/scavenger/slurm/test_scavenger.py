"""The scavenger of Slurm against imitated commands: what it makes of a poll, and what it does when
they hang, fail or print garbage.
"""

import pytest

from scavenger.batch.calls import LEASES_BURST
from scavenger.batch.commands import CommandPolicy
from scavenger.batch.lease_script import forget_outputs
from scavenger.batch.rules import GapRules
from scavenger.interface import LeaseState, SchedulerError
from scavenger.slurm.source import asking_environment, submitting_environment
from tests.scavenger.slurm import slurm_world as world
from tests.scavenger.slurm.slurm_world import PREFIX, World, names, request, why
from tests.waiting import PATIENCE_S


@pytest.fixture
def slurm(tmp_path):
    return World(tmp_path)


def test_a_poll_is_three_commands(slurm):
    scavenger = slurm.ready()
    before = len(slurm.tools.calls())
    scavenger.poll()
    assert [line.split()[0] for line in slurm.tools.calls()[before:]] == [
        "squeue",
        "sinfo",
        "scontrol",
    ]


def test_a_node_is_a_gap_after_its_backfill_turn(slurm):
    scavenger = slurm.scavenger()
    assert names(scavenger.poll()) == []
    slurm.now += 2.5
    polled = scavenger.poll()
    assert len(polled.gaps) == 8
    assert polled.idle_nodes == polled.total_nodes == 8
    assert polled.gaps[0].horizon_s > 0
    slurm.nodes(idle="n[1-7]", allocated="n8")
    assert scavenger.poll().idle_nodes == 7
    slurm.nodes(idle="n[1-8]")
    assert "n8" not in names(scavenger.poll()), (
        "it was in use in between, and must wait for its turn again"
    )


def test_polls_follow_the_backfill_cycle_and_the_time_they_take(slurm):
    scavenger = slurm.scavenger(poll_interval_s=1.0)
    assert scavenger.poll_again_s(scavenger.read_state(), 0.01) == 1.0
    assert scavenger.poll_again_s(scavenger.read_state(), 3.0) == 5.0, "one slow answer"
    assert scavenger.poll_again_s(scavenger.read_state(), 3.0) == 10.0, "and another one"
    slurm.file("config", world.CONFIG.replace("bf_interval=2", "bf_interval=60"))
    slurm.now += 400
    assert scavenger.poll_again_s(scavenger.read_state(), 0.01) == 15.0
    assert scavenger.poll().poll_again_s >= 15.0


def test_horizons_end_at_the_next_known_use(slurm):
    scavenger = slurm.ready(rules=GapRules(use_planned=True))
    slurm.queue(world.job("PENDING", 1, "big", start=slurm.now + 200, planned="n1"))
    slurm.file(
        "reservations",
        f"ReservationName=m StartTime={slurm.now + 300:.0f} EndTime={slurm.now + 900:.0f} "
        "Nodes=n2 Flags=MAINT\n",
    )
    polled = scavenger.poll()
    horizon = {gap.node: gap.horizon_s for gap in polled.gaps}
    assert {node: forecast.horizon_s for node, forecast in polled.forecasts.items()} == horizon
    assert horizon["n1"] == 200.0
    assert horizon["n2"] == 300.0
    assert horizon["n3"] > 300.0


def test_planned_nodes_are_left_alone_unless_allowed(slurm):
    slurm.nodes(idle="n1", planned="n2")
    slurm.queue(world.job("PENDING", 1, "big", start=slurm.now + 3600, planned="n2"))
    assert names(slurm.ready().poll()) == ["n1"]
    assert names(slurm.ready(rules=GapRules(use_planned=True)).poll()) == ["n1", "n2"]
    assert names(slurm.ready(backfill=True).poll()) == ["n1", "n2"]


def test_many_gaps_are_taken_a_share_at_each_poll(slurm):
    slurm.file("partitions", world.PARTITIONS.replace("n[1-8]", "n[1-500]"))
    slurm.nodes(idle="n[1-500]")
    polled = slurm.ready(rules=GapRules(max_at_once=30)).poll()
    assert len(polled.gaps) == 30
    assert "30 nodes are requested at once" in why(polled, "n400")["at once"]


def test_while_slurm_takes_leases_back_for_an_unknown_job_no_other_is_asked_for(slurm):
    scavenger = slurm.ready()
    running = world.job("RUNNING", 9, f"{PREFIX}l1", nodes="n1", end=slurm.now + 3600)
    waiting = world.job("PENDING", 10, f"{PREFIX}l2", submitted=slurm.now, requested_nodes="n2")
    slurm.nodes(idle="n[2-8]", allocated="n1")
    slurm.queue(running, waiting)
    assert len(scavenger.poll().gaps) == 6
    slurm.queue(world.job("RUNNING", 9, f"{PREFIX}l1", nodes="n1", end=slurm.now + 10), waiting)
    slurm.now += 1
    leases = scavenger.take([request(3)])
    assert "took leases back" in leases[0].reason
    polled = scavenger.poll()
    assert polled.gaps == ()
    assert {lease.id: lease.state for lease in polled.leases} == {
        "l1": LeaseState.RUNNING,
        "l2": LeaseState.ENDED,
    }
    assert slurm.tools.calls("scancel") == ["scancel 10"]
    slurm.queue()
    slurm.nodes(idle="n[1-8]")
    slurm.now += 3.5
    assert len(scavenger.poll().gaps) == 7


def test_idle_nodes_are_left_to_the_job_that_slurm_is_about_to_start(slurm):
    scavenger = slurm.ready()
    running = [
        world.job("RUNNING", 20 + i, f"{PREFIX}l{i}", nodes=f"n{i}", end=slurm.now + 9999)
        for i in (1, 2)
    ]
    slurm.nodes(idle="n[3-8]", allocated="n[1-2]")
    slurm.queue(*running)
    assert len(scavenger.poll().gaps) == 6
    # It needs five nodes: the two that it preempts leases on, and three of the idle ones.
    leaving = [
        world.job("RUNNING", 20 + i, f"{PREFIX}l{i}", nodes=f"n{i}", end=slurm.now + 10)
        for i in (1, 2)
    ]
    waiting = world.job("PENDING", 31, f"{PREFIX}l3", submitted=slurm.now, requested_nodes="n3")
    main = world.job(
        "PENDING", 5, "main", count=5, start=slurm.now, planned="n[1-3]", reason="Resources"
    )
    slurm.queue(*leaving, waiting, main)
    polled = scavenger.poll()
    assert names(polled) == ["n6", "n7", "n8"]
    assert why(polled, "n4")["hold"] == "Slurm is about to start job 5, which needs 5 nodes"
    assert slurm.tools.calls("scancel") == ["scancel 31"], (
        "the lease that waits for one of them is withdrawn"
    )
    # Whatever keeps the job from starting, it does not keep nodes for ever.
    slurm.now += 61
    assert len(scavenger.poll().gaps) >= 5


def test_a_job_that_is_to_start_while_slurm_answers_is_about_to_start(slurm):
    """Each cycle of Slurm sets the expected start of such a job to its own present."""
    scavenger = slurm.ready()
    slurm.nodes(idle="n[3-8]", allocated="n[1-2]")
    read = scavenger.source.read

    class SlowSource:
        name = "slow"

        def read(self, prefix):
            slurm.now += 5
            leases = (
                world.job("RUNNING", 20 + i, f"{PREFIX}l{i}", nodes=f"n{i}", end=slurm.now + 999)
                for i in (1, 2)
            )
            waiting = {"count": 5, "planned": "n[1-2]", "reason": "Resources"}
            slurm.queue(*leases, world.job("PENDING", 5, "main", start=slurm.now, **waiting))
            return read(prefix)

    scavenger.source = SlowSource()
    polled = scavenger.poll()
    assert names(polled) == ["n8"]
    assert why(polled, "n5")["hold"] == "Slurm is about to start job 5, which needs 5 nodes"


def test_leases_are_asked_to_leave_for_a_job_that_slurm_lets_wait(slurm):
    scavenger = slurm.ready()
    slurm.nodes(idle="n1", allocated="n[2-8]")
    leases = [
        world.job("RUNNING", 20 + i, f"{PREFIX}l{i}", nodes=f"n{i}", end=slurm.now + 9999)
        for i in range(2, 9)
    ]
    stuck = world.job(
        "PENDING", 5, "main", count=3, start=slurm.now, planned="n[1-3]", reason="Resources"
    )
    slurm.queue(*leases, stuck)
    polled = scavenger.poll()
    assert polled.gaps == ()
    assert "about to start job 5, which needs 3 nodes" in why(polled, "n1")["hold"]
    assert scavenger.poll_again_s(scavenger.read_state(), 0.01) <= 2.0
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


@pytest.mark.parametrize("tool", ["squeue", "sinfo", "scontrol"])
@pytest.mark.parametrize("trouble", ["fails", "hangs", "prints garbage"])
def test_a_failed_poll_changes_nothing(slurm, tool, trouble):
    scavenger = slurm.ready()
    if tool == "scontrol":
        slurm.tools.runs(
            "scontrol",
            {"fails": "exit 1", "hangs": "exec sleep 600"}.get(trouble, "echo rubbish; exit 0"),
        )
    elif trouble == "fails":
        slurm.tools.fails(tool, "Unable to contact slurm controller (connect failure)")
    elif trouble == "hangs":
        slurm.tools.hangs(tool)
    else:
        slurm.tools.answers(tool, "<html>504</html>")
    if trouble == "hangs":
        scavenger.commands.policy = CommandPolicy(0.5, 1, 0.0)
    slurm.now += 5
    with pytest.raises(SchedulerError) as error:
        scavenger.poll()
    assert str(error.value).endswith((".", "failure)"))
    with pytest.raises(SchedulerError):
        scavenger.take([request(1)])
    assert slurm.tools.calls("sbatch") == []
    slurm.tools.works(tool)
    scavenger.commands.policy = CommandPolicy(PATIENCE_S, 1, 0.0)
    slurm.queue("")
    slurm.nodes(idle="n[1-8]")
    slurm.tools.runs("scontrol", 'cat "$here/reservations"; exit 0')
    slurm.now += 5
    assert len(scavenger.poll().gaps) == 8, "the nodes are as long idle as they were"


@pytest.mark.parametrize("tool", ["squeue", "sinfo"])
def test_the_same_failure_is_told_in_the_same_words_at_every_poll(slurm, tool):
    scavenger = slurm.ready()
    slurm.tools.fails(tool, "Unable to contact slurm controller (connect failure)")
    messages = set()
    for _ in range(3):
        slurm.now += 5
        with pytest.raises(SchedulerError) as error:
            scavenger.poll()
        messages.add(str(error.value))
    assert len(messages) == 1


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


def test_old_outputs_are_forgotten(slurm, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "scavenger.batch.scavenger.forget_outputs", lambda folder: forget_outputs(folder, 3)
    )
    folder = tmp_path / "leases"
    folder.mkdir()
    for i in range(6):
        (folder / f"l{i}.out").touch()
    slurm.scavenger(output_dir=folder).poll()
    assert len(list(folder.iterdir())) == 3


def test_outputs_that_cannot_be_deleted_or_listed_stop_no_poll(slurm, tmp_path, monkeypatch):
    """Such as on a disk that was mounted read-only after an error, or on NFS."""
    monkeypatch.setattr(
        "scavenger.batch.scavenger.forget_outputs", lambda folder: forget_outputs(folder, 0)
    )
    folder = tmp_path / "leases"
    (folder / "l1.out").mkdir(parents=True)
    (folder / "l2.out").touch()
    polled = slurm.scavenger(output_dir=folder).poll()
    assert [path.name for path in folder.iterdir()] == ["l1.out"]
    assert polled.trouble.startswith(f"Old outputs of leases in {folder} cannot be deleted")
    polled = slurm.scavenger(output_dir=tmp_path / ("x" * 300)).poll()
    assert polled.trouble.endswith("cannot be listed: File name too long.")


def test_the_environment_of_commands():
    variables = {"PATH": "/bin", "SLURM_CONF": "/c", "LANG": "de_DE", "HOME": "/h"}
    # Of sites without a configuration file, or with tokens or sackd.
    variables |= {"SLURM_CONF_SERVER": "ctl:6817", "SLURM_JWT": "x", "SLURM_SACK_SOCKET": "/run/s"}
    mine = {**variables, "SLURM_JOB_ID": "7", "SBATCH_PARTITION": "x", "SQUEUE_FORMAT": "%i"}
    assert asking_environment(mine) == {
        **variables,
        "SLURM_TIME_FORMAT": "%s",
        "SLURM_BITSTR_LEN": "1024",
        "LC_ALL": "C",
    }
    assert submitting_environment(mine) == variables


def test_a_mass_cancel_puts_off_no_regular_poll(slurm):
    one = slurm.ready()
    one.commands.calls.count("scancel", "ok", requests=200)
    assert one.poll_again_s(one.read_state(), 0.01) == one.settings.poll_interval_s
    assert one.poll().max_new_leases == LEASES_BURST, "those that are reserved"
    assert one.contact().poll_after_s > 5


def test_leases_that_a_plugin_moves_to_another_partition_leave_and_none_is_taken(tmp_path):
    """A job_submit plugin sends whole nodes to a partition whose jobs are never preempted."""
    slurm = world.World(tmp_path)
    one = slurm.ready()
    [lease] = one.take([world.request(1)])
    moved = {"start": slurm.now, "end": slurm.now + 3600, "nodes": "n1", "partition": "long"}
    slurm.nodes(idle="n[2-8]", allocated="n1")
    slurm.queue(world.job("RUNNING", lease.scheduler_id, "malletrain-t-l1", **moved))
    poll = one.poll()
    assert world.names(poll) == []
    assert "lease l1 is in partition long, not in preemptable" in world.why(poll, "n2")["hold"]
    assert any("--signal=TERM" in call for call in slurm.tools.calls("scancel"))
