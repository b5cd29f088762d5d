import json
from pathlib import Path

import pytest

from scavenger.interface import LeaseState, SchedulerError
from scavenger.slurm.site import clock_ahead_s, read_site, settled
from tests.scavenger.slurm import slurm_world as world
from tests.scavenger.slurm.slurm_world import PREFIX, World


def test_what_is_configured():
    site = read_site(world.CONFIG, world.PARTITIONS, world.SDIAG)
    assert site.version == (22, 5)
    assert site.preempt_type == "partition_prio"
    assert site.user_signal
    assert site.kill_wait_s == 5.0
    assert site.backfill_cycle_s == pytest.approx(2.83), (
        "bf_interval, and the last cycle, which is longer than the mean one"
    )
    assert site.hidden == frozenset()
    batch, low = site.partitions["batch"], site.partitions["preemptable"]
    assert (batch.tier, low.tier, low.up, len(low.nodes), low.max_time_s) == (
        10,
        1,
        True,
        8,
        86400.0,
    )
    assert site.preempt_mode_of("preemptable") == "CANCEL"
    assert site.preempt_mode_of("batch") == "OFF"
    assert site.grace_of("preemptable") == 10.0
    assert site.grace_of("batch") == 5.0, "KillWait where there is no GraceTime"


def test_defaults_of_slurm():
    site = read_site(
        "SLURM_VERSION = 20.11.9\nSchedulerType = sched/backfill\nPrivateData = "
        "jobs,nodes\nPreemptType = preempt/none\n",
        "",
    )
    assert site.version == (20, 11)
    assert site.backfill_cycle_s == 30.0
    assert not site.user_signal
    assert site.hidden == {"jobs", "nodes"}
    assert site.preempt_type == "none"


def test_a_setting_without_a_value_leaves_the_next_line_alone():
    site = read_site("PowerPlugin =\nPreemptMode = CANCEL\nX=\t\nSLURM_VERSION = 23.02.1\n", "")
    assert site.settings == {
        "PowerPlugin": "",
        "PreemptMode": "CANCEL",
        "X": "",
        "SLURM_VERSION": "23.02.1",
    }
    assert site.preempt_mode == "CANCEL"


@pytest.mark.parametrize(
    ("printed", "mode"),
    [
        ("CANCEL", "CANCEL"),
        ("GANG,SUSPEND", "SUSPEND"),
        ("PRIORITY,CANCEL", "CANCEL"),
        ("PRIORITY", "OFF"),
        ("WITHIN,REQUEUE", "REQUEUE"),
    ],
)
def test_what_happens_to_a_preempted_job(printed, mode):
    """Modes as preempt_mode_string() of Slurm 25.05 writes them."""
    site = read_site(f"PreemptMode = {printed}\nSLURM_VERSION = 25.05.8\n", "")
    assert site.preempt_mode_of("any") == mode


def test_without_backfill():
    assert (
        read_site("SLURM_VERSION = 23.02.1\nSchedulerType = sched/builtin\n", "").backfill_cycle_s
        is None
    )
    off = (
        "SLURM_VERSION = 23.02.1\nSchedulerType = sched/backfill\nSchedulerParameters = "
        "bf_interval=-1\n"
    )
    assert read_site(off, "").backfill_cycle_s is None


def test_garbage_is_refused():
    with pytest.raises(SchedulerError, match="SLURM_VERSION"):
        read_site("slurm_load_ctl_conf error: Unable to contact", "")


@pytest.mark.skipif(not world.RECORDED.is_dir(), reason="no recordings of a real Slurm are at hand")
def test_the_recordings_of_a_real_slurm():
    partitions = (world.RECORDED / "scontrol_show_partition.txt").read_text().replace("\n   ", " ")
    site = read_site(
        (world.RECORDED / "scontrol_show_config.txt").read_text(),
        partitions,
        (world.RECORDED / "sdiag.txt").read_text(),
    )
    assert site.version == (22, 5)
    assert site.backfill_cycle_s == pytest.approx(2.0001, abs=1e-4)
    assert sorted(site.partitions) == ["batch", "preemptable", "requeue", "suspend"]
    assert site.grace_of("preemptable") == 10.0
    assert site.user_signal


RECORDED = Path(__file__).parent / "recorded" / "22.05.8.json"
PRINTED_AT = 1795795963


@pytest.mark.parametrize(
    ("asked_at", "answered_at", "ahead_s"),
    [
        (PRINTED_AT + 0.4, PRINTED_AT + 0.6, 0.0),
        (PRINTED_AT - 60.0, PRINTED_AT - 59.0, 60.0),
        (PRINTED_AT + 30.0, PRINTED_AT + 31.0, -30.0),
        (PRINTED_AT - 60.0, PRINTED_AT - 40.0, None),
        (PRINTED_AT, PRINTED_AT - 10.0, None),
    ],
    ids=["equal", "ahead", "behind", "a slow answer", "a clock that is set meanwhile"],
)
def test_what_sdiag_says_of_the_clock(asked_at, answered_at, ahead_s):
    statistics = json.loads(RECORDED.read_text())["sdiag"]
    assert clock_ahead_s(statistics, asked_at, answered_at) == ahead_s
    assert clock_ahead_s("sdiag: Access denied", asked_at, answered_at) is None


@pytest.mark.parametrize(
    ("measured_s", "before_s", "used_s"),
    [(0.7, 0.0, 0.0), (60.4, 0.0, 60.4), (61.0, 60.4, 60.4), (None, 60.4, 60.4), (0.3, 60.4, 0.0)],
)
def test_the_difference_is_kept_until_it_changes_by_more_than_can_be_measured(
    measured_s, before_s, used_s
):
    assert settled(measured_s, before_s) == used_s


def test_leases_and_reservations_are_read_on_the_clock_of_this_host(tmp_path):
    slurm = World(tmp_path)
    ahead_s = 60.0
    there = slurm.now + ahead_s
    slurm.tools.answers("sdiag", f"sdiag output at some day ({there:.0f})\n{world.SDIAG}")
    scavenger = slurm.ready()
    there += 60.0
    slurm.queue(
        world.job("RUNNING", 9, f"{PREFIX}l1", nodes="n1", end=there + 3600),
        world.job("RUNNING", 8, f"{PREFIX}l2", nodes="n2", end=there + 9),
    )
    slurm.file(
        "reservations",
        f"ReservationName=m StartTime={there + 20:.0f} EndTime={there + 999:.0f} Nodes=n1 "
        "Flags=MAINT,SPEC_NODES\n",
    )
    leases = {lease.id: lease for lease in scavenger.poll().leases}
    assert leases["l1"].reason == "a reservation of its node begins in 20 s"
    assert leases["l2"].state is LeaseState.RUNNING
    assert leases["l2"].gone_at == pytest.approx(slurm.now + 9, abs=1)
    works, sentence = next(each for each in scavenger.check() if "clock" in each[1])
    assert works is None
    assert "60 s ahead of that of this host" in sentence


def test_a_clock_that_is_set_makes_no_lease_look_preempted(tmp_path):
    slurm = World(tmp_path)
    scavenger = slurm.ready()
    end = slurm.now + 7200
    slurm.queue(world.job("RUNNING", 9, f"{PREFIX}l1", nodes="n1", end=end))
    assert scavenger.read_state().answer.hold == ""
    slurm.now += 301
    slurm.tools.answers("sdiag", f"sdiag output at some day ({slurm.now + 60:.0f})\n")
    assert scavenger.read_state().answer.hold == ""


def test_a_hold_goes_on_when_the_measured_difference_changes(tmp_path):
    slurm = World(tmp_path)
    scavenger = slurm.ready(hold_s=60.0)

    def polled(ahead_s, left_s):
        slurm.tools.answers("sdiag", f"sdiag output at some day ({slurm.now + ahead_s:.0f})\n")
        slurm.queue(
            world.job("RUNNING", 9, f"{PREFIX}l1", nodes="n1", end=slurm.now + 60.0 + left_s)
        )
        return scavenger.read_state()

    slurm.now += 241
    polled(60.0, 7200.0)
    slurm.now += 295
    assert "took leases back 0 s ago" in polled(60.0, 30.0).answer.hold
    slurm.now += 10
    view = polled(63.0, 20.0)
    assert view.site.clock_ahead_s == pytest.approx(63.0, abs=1.0)
    assert "took leases back 10 s ago" in view.answer.hold
