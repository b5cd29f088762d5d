"""From the configuration to the scavenger of PBS."""

from __future__ import annotations

from malletrain.config import Config
from malletrain.daemon import batch
from scavenger.batch_settings import BatchSettings
from scavenger.commands import Commands
from scavenger.pbs import PbsScavenger
from scavenger.pbs_job import LeaseOptions
from scavenger.pbs_source import asking_environment


def connect(config: Config) -> PbsScavenger:
    """The scavenger; asks PBS nothing. Raises SchedulerError when the site's batch script cannot be read."""
    pbs = config.scheduler.pbs
    commands = Commands(batch.policy(pbs), asking_environment())
    return PbsScavenger(settings(config), commands, memory=batch.memory(config), api=pbs.api)


def settings(config: Config) -> BatchSettings[LeaseOptions]:
    """What the scavenger is told."""
    pbs = config.scheduler.pbs
    lease = LeaseOptions(
        queue=pbs.queue,
        account=pbs.account,
        project=pbs.project,
        resources=tuple(pbs.resources),
        select=pbs.select,
        place=pbs.place,
        options=tuple(pbs.options),
        rerunnable={"auto": None, "yes": True, "no": False}[pbs.rerunnable],
    )
    return batch.settings(config, "pbs", pbs, lease)
