import pytest

from scavenger.interface import SchedulerError
from scavenger.slurm.site import read_site
from tests.scavenger.slurm import slurm_world as world


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
