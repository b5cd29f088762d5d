"""From the configuration to the scavenger of Slurm."""

from __future__ import annotations

from malletrain.config import Config
from malletrain.daemon import batch
from scavenger.batch_settings import BatchSettings
from scavenger.commands import Commands
from scavenger.slurm import SlurmScavenger
from scavenger.slurm_job import LeaseOptions
from scavenger.slurm_source import asking_environment


def connect(config: Config) -> SlurmScavenger:
    """The scavenger; asks Slurm nothing. Raises SchedulerError when the site's batch script cannot be read."""
    slurm = config.scheduler.slurm
    commands = Commands(batch.policy(slurm), asking_environment())
    return SlurmScavenger(settings(config), commands, memory=batch.memory(config), api=slurm.api)


def settings(config: Config) -> BatchSettings[LeaseOptions]:
    """What the scavenger is told."""
    slurm = config.scheduler.slurm
    lease = LeaseOptions(
        partition=slurm.partition,
        qos=slurm.qos,
        account=slurm.account,
        constraint=slurm.constraint,
        exclusive=slurm.exclusive,
        gres=slurm.gres,
        options=tuple(slurm.options),
        nice=slurm.nice,
        launch=slurm.launch,
    )
    return batch.settings(config, "slurm", slurm, lease)
