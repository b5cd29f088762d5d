"""Creates the scavenger of a batch scheduler from the configuration."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

from malletrain.config.model import Config
from malletrain.config.schedulers import BatchScheduler
from malletrain.identity.keys import SERVER, KeyFileError, read_key, user_name
from malletrain.identity.state_directory import make_private_dir, write_atomically
from malletrain.shipped import shipped
from scavenger.batch.calls import CallLog
from scavenger.batch.commands import CommandPolicy, Commands
from scavenger.batch.gap_memory import GapMemory
from scavenger.batch.hours import parse_hours
from scavenger.batch.rules import GapRules
from scavenger.batch.settings import BatchSettings, OptionsT
from scavenger.hostlist import expand
from scavenger.interface import SchedulerError
from scavenger.pbs import job as pbs_job
from scavenger.pbs import source as pbs_source
from scavenger.pbs.scavenger import PbsScavenger
from scavenger.slurm import job as slurm_job
from scavenger.slurm import source as slurm_source
from scavenger.slurm.associations import Associations, read_associations
from scavenger.slurm.scavenger import SlurmScavenger

LEASE_TAG = "lease-tag"
"""File of the state directory with the lease tag of its database."""
_MOM = re.compile(r"^ +Mom = (\S+)$", re.MULTILINE)
"""The line with the host of a vnode in the output of pbsnodes."""


def connect_slurm(config: Config) -> SlurmScavenger:
    """Return the scavenger of Slurm without a request to Slurm. Raises SchedulerError if the site's
    batch script cannot be read.
    """
    table = config.scheduler.slurm
    settings = slurm_settings(config)
    commands = _commands(table, slurm_source.asking_environment(), settings.max_pause_s)
    return SlurmScavenger(settings, commands, memory=_memory(config), api=table.api)


def connect_pbs(config: Config) -> PbsScavenger:
    """Return the scavenger of PBS without a request to PBS. Raises SchedulerError if the site's
    batch script cannot be read.
    """
    table = config.scheduler.pbs
    settings = pbs_settings(config)
    commands = _commands(table, pbs_source.asking_environment(), settings.max_pause_s)
    return PbsScavenger(settings, commands, memory=_memory(config), api=table.api)


def slurm_settings(config: Config) -> BatchSettings[slurm_job.SlurmLeaseOptions]:
    """Return the settings of the scavenger of Slurm."""
    return _settings(config, "slurm", config.scheduler.slurm, slurm_job.SlurmLeaseOptions)


def pbs_settings(config: Config) -> BatchSettings[pbs_job.PbsLeaseOptions]:
    """Return the settings of the scavenger of PBS."""
    settings = _settings(config, "pbs", config.scheduler.pbs, pbs_job.PbsLeaseOptions)
    shell = settings.lease.shell or str(shipped("jobscripts/pbs/shell.sh").resolve())
    return replace(settings, lease=replace(settings.lease, shell=shell))


def _settings(
    config: Config, kind: str, table: BatchScheduler, options: type[OptionsT]
) -> BatchSettings[OptionsT]:
    """Return the settings from the ``table`` of this ``kind`` of scheduler and from the sections
    for all kinds. ``options``: class of the options that only this kind has; each of its fields is
    a key of the table.
    """
    gaps = config.gaps
    option_values = {f.name: getattr(table, f.name) for f in fields(options)}  # type: ignore[arg-type]
    backfill = table.mode == "backfill"
    return BatchSettings(
        tag=lease_tag(config),
        template=template(table.script, kind),
        lease=options(
            **{
                name: tuple(value) if isinstance(value, list) else value
                for name, value in option_values.items()
            }
        ),
        rules=gap_rules(config),
        user=user_name(),
        submit_as=tuple(table.submit_as),
        output_dir=output_dir(config) if table.keep_output else None,
        idle_for_s=gaps.idle_for,
        node_classes=tuple(gaps.classes),
        backfill=backfill,
        spare_s=table.spare,
        time_limit_s=table.time_limit,
        lease_s=table.lease_time,
        time_min_s=table.time_min if backfill or gaps.use_planned else None,
        start_within_s=table.start_within,
        submit_rate=table.submit_rate,
        submit_burst=table.submit_burst,
        request_rate=table.request_rate,
        min_lease_s=table.min_lease,
        max_leases=table.max_leases,
        shape=table.lease_shape,
        shared_by=table.lease_nodes,
        max_leases_per_user=table.max_leases_per_user,
        hold_s=gaps.hold,
        grace_s=table.grace,
        needed_grace_s=config.jobs.drain_timeout + config.jobs.stop_grace,
        poll_interval_s=config.scheduler.poll_interval,
    )


def _policy(table: BatchScheduler) -> CommandPolicy:
    """Return the time-out and the number of tries of the scheduler's commands."""
    return CommandPolicy(table.command_timeout, table.command_tries)


def _commands(
    table: BatchScheduler, environment: Mapping[str, str], max_pause_s: float
) -> Commands:
    """Return the runner of a scavenger's commands. ``max_pause_s``: maximum pause before the
    next request to a busy or silent scheduler, seconds.
    """
    return Commands(_policy(table), environment, calls=CallLog(max_backoff_s=max_pause_s))


def _memory(config: Config) -> GapMemory:
    """Return the record of the site's earlier gaps."""
    gaps = config.gaps
    path = config.state_dir / "gaps.json"
    return GapMemory(path, gaps.expected_length, foretells=gaps.lifetimes)


def prepare(config: Config, table: BatchScheduler) -> None:
    """Create the folder for the output of leases."""
    if table.keep_output:
        make_private_dir(output_dir(config))


def slurm_addresses(config: Config) -> list[str]:
    """Return the addresses of Slurm's nodes (NodeAddr). Raises SchedulerError."""
    commands = Commands(_policy(config.scheduler.slurm), slurm_source.asking_environment())
    return commands.ask(["sinfo", "-h", "-a", "-N", "-o", "%o"]).split()


def slurm_associations(config: Config) -> Associations:
    """Return Slurm's accounts and shares. Raises SchedulerError."""
    commands = Commands(_policy(config.scheduler.slurm), slurm_source.asking_environment())
    return read_associations(commands)


def pbs_addresses(config: Config) -> list[str]:
    """Return the hosts of PBS's vnodes. Raises SchedulerError."""
    commands = Commands(_policy(config.scheduler.pbs), pbs_source.asking_environment())
    printed = commands.ask(["pbsnodes", "-a", "-v"])
    return _MOM.findall(printed)


def gap_rules(config: Config) -> GapRules:
    """Return the rules of section [gaps]."""
    gaps = config.gaps
    return GapRules(
        partitions=frozenset(gaps.partitions),
        features=frozenset(gaps.features),
        nodes=frozenset(name for text in gaps.nodes for name in expand(text)),
        exclude=frozenset(name for text in gaps.exclude for name in expand(text)),
        reserve=gaps.reserve,
        hours=parse_hours(gaps.hours),
        use_planned=gaps.use_planned,
        max_at_once=gaps.max_at_once,
    )


def output_dir(config: Config) -> Path:
    """Return the folder for the output of leases."""
    return config.state_dir.absolute() / "leases"


def template(script: Path | None, kind: str) -> str:
    """Return the batch script of the leases: the site's own, else the default for this ``kind``.
    Raises SchedulerError.
    """
    try:
        return (script or shipped(f"jobscripts/{kind}/lease.sh")).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SchedulerError(
            f"The batch script {script or kind} of the leases cannot be read: {error}."
        ) from None


def lease_tag(config: Config) -> str:
    """Return the tag that distinguishes the leases of this daemon from those of others: that of its
    database, else one derived from its key, or from its state directory if it has no key yet.
    """
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if tag := (config.state_dir / LEASE_TAG).read_text("utf-8").strip():
            return tag
    try:
        text = read_key(config.state_dir / "keys" / SERVER).public
    except KeyFileError:
        text = str(config.state_dir.absolute())
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def write_lease_tag(config: Config, tag: str) -> None:
    """Store the tag for future leases of this daemon; empty for the one derived from its key.
    Raises OSError.
    """
    path = config.state_dir / LEASE_TAG
    if not tag:
        path.unlink(missing_ok=True)
    elif lease_tag(config) != tag or not path.exists():
        write_atomically(path, tag + "\n")
