"""From the configuration to the scavenger of PBS."""

from __future__ import annotations

from collections.abc import Iterator

from malletrain.config import Config
from malletrain.daemon.batch import gap_rules, lease_tag, output_dir, reachable, template
from malletrain.keys import user_name
from malletrain.statedir import make_private_dir
from scavenger.commands import Commands, Policy
from scavenger.gap_memory import GapMemory
from scavenger.pbs import PbsScavenger
from scavenger.pbs_job import LeaseOptions
from scavenger.pbs_settings import PbsSettings
from scavenger.pbs_site import KILL_DELAY_S
from scavenger.pbs_source import asking_environment


def connect(config: Config) -> PbsScavenger:
    """The scavenger; asks PBS nothing. Raises SchedulerError when the site's batch script cannot be read."""
    pbs = config.scheduler.pbs
    commands = Commands(Policy(pbs.command_timeout, pbs.command_tries), asking_environment())
    memory = GapMemory(config.state_dir / "gaps.json", config.gaps.expected_length)
    return PbsScavenger(settings(config), commands, memory=memory, api=pbs.api)


def prepare(config: Config) -> None:
    """Make the folder for what leases print."""
    if config.scheduler.pbs.keep_output:
        make_private_dir(output_dir(config))


def grace_s(config: Config) -> float:
    """Seconds between the notice of a preemption and its end, as far as the configuration says. The scavenger, which knows the queue's
    kill_delay, tells each lease the true one."""
    return config.scheduler.pbs.grace or KILL_DELAY_S


def check(config: Config) -> Iterator[tuple[bool, str]]:
    """What works with the running PBS."""
    yield from reachable(config)
    yield from connect(config).check()


def settings(config: Config) -> PbsSettings:
    """What the scavenger is told."""
    pbs, gaps = config.scheduler.pbs, config.gaps
    backfill = pbs.mode == "backfill"
    return PbsSettings(
        tag=lease_tag(config),
        template=template(pbs.script, "pbs"),
        lease=LeaseOptions(
            queue=pbs.queue,
            account=pbs.account,
            project=pbs.project,
            resources=tuple(pbs.resources),
            select=pbs.select,
            place=pbs.place,
            options=tuple(pbs.options),
            time_limit_s=pbs.time_limit,
            time_min_s=pbs.time_min if backfill or gaps.use_planned else None,
            rerunnable={"auto": None, "yes": True, "no": False}[pbs.rerunnable],
            grace_s=pbs.grace,
            submit_as=tuple(pbs.submit_as),
            output_dir=output_dir(config) if pbs.keep_output else None,
        ),
        rules=gap_rules(config),
        idle_for_s=gaps.idle_for,
        node_classes=tuple(gaps.classes),
        backfill=backfill,
        spare_s=pbs.spare,
        start_within_s=pbs.start_within,
        submit_rate=pbs.submit_rate,
        max_leases=pbs.max_leases,
        hold_s=gaps.hold,
        wanted_grace_s=config.jobs.drain_timeout + config.jobs.stop_grace,
        poll_interval_s=config.scheduler.poll_interval,
        user=user_name(),
    )
