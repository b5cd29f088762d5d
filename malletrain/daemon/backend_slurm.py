"""From the configuration to the scavenger of Slurm."""

from __future__ import annotations

from collections.abc import Iterator

from malletrain.config import Config
from malletrain.daemon.batch import gap_rules, lease_tag, output_dir, reachable, template
from malletrain.keys import user_name
from malletrain.statedir import make_private_dir
from scavenger.commands import Commands, Policy
from scavenger.gap_memory import GapMemory
from scavenger.slurm import SlurmScavenger
from scavenger.slurm_job import LeaseOptions
from scavenger.slurm_settings import SlurmSettings
from scavenger.slurm_source import asking_environment

GRACE_UNKNOWN_S = 30.0
"""What agents are told by the daemon; the scavenger, which knows Slurm's configuration, tells each lease the true one."""


def connect(config: Config) -> SlurmScavenger:
    """The scavenger; asks Slurm nothing. Raises SchedulerError when the site's batch script cannot be read."""
    slurm = config.scheduler.slurm
    commands = Commands(Policy(slurm.command_timeout, slurm.command_tries), asking_environment())
    memory = GapMemory(config.state_dir / "gaps.json", config.gaps.expected_length)
    return SlurmScavenger(settings(config), commands, memory=memory, api=slurm.api)


def prepare(config: Config) -> None:
    """Make the folder for what leases print."""
    if config.scheduler.slurm.keep_output:
        make_private_dir(output_dir(config))


def grace_s(config: Config) -> float:
    """Seconds between the notice of a preemption and its end, as far as the configuration says."""
    return config.scheduler.slurm.grace or GRACE_UNKNOWN_S


def check(config: Config) -> Iterator[tuple[bool, str]]:
    """What works with the running Slurm."""
    yield from reachable(config)
    yield from connect(config).check()


def settings(config: Config) -> SlurmSettings:
    """What the scavenger is told."""
    slurm, gaps = config.scheduler.slurm, config.gaps
    backfill = slurm.mode == "backfill"
    return SlurmSettings(
        tag=lease_tag(config),
        template=template(slurm.script, "slurm"),
        lease=LeaseOptions(
            partition=slurm.partition,
            qos=slurm.qos,
            account=slurm.account,
            constraint=slurm.constraint,
            exclusive=slurm.exclusive,
            gres=slurm.gres,
            options=tuple(slurm.options),
            time_limit_s=slurm.time_limit,
            time_min_s=slurm.time_min if backfill or gaps.use_planned else None,
            nice=slurm.nice,
            grace_s=slurm.grace,
            launch=slurm.launch,
            submit_as=tuple(slurm.submit_as),
            output_dir=output_dir(config) if slurm.keep_output else None,
        ),
        rules=gap_rules(config),
        idle_for_s=gaps.idle_for,
        node_classes=tuple(gaps.classes),
        backfill=backfill,
        spare_s=slurm.spare,
        start_within_s=slurm.start_within,
        submit_rate=slurm.submit_rate,
        max_leases=slurm.max_leases,
        hold_s=gaps.hold,
        wanted_grace_s=config.jobs.drain_timeout + config.jobs.stop_grace,
        poll_interval_s=config.scheduler.poll_interval,
        user=user_name(),
    )
