"""From the configuration to the scavenger of Slurm."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from malletrain.config import Config
from malletrain.keys import SERVER, KeyFileError, read_key, user_name
from malletrain.statedir import make_private_dir
from scavenger.commands import Commands, Policy
from scavenger.gap_memory import GapMemory
from scavenger.hostlist import expand
from scavenger.hours import parse_hours
from scavenger.interface import SchedulerError
from scavenger.rules import GapRules
from scavenger.slurm import SlurmScavenger
from scavenger.slurm_job import LeaseOptions
from scavenger.slurm_settings import SlurmSettings
from scavenger.slurm_source import asking_environment

LOOPBACK = ("127.", "localhost", "[::1]")
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
        make_private_dir(_output_dir(config))


def grace_s(config: Config) -> float:
    """Seconds between the notice of a preemption and its end, as far as the configuration says."""
    return config.scheduler.slurm.grace or GRACE_UNKNOWN_S


def check(config: Config) -> Iterator[tuple[bool, str]]:
    """What works with the running Slurm."""
    host = config.daemon.listen.removeprefix("tcp://")
    if host.startswith(LOOPBACK) and not config.daemon.advertise:
        yield False, (
            f"Agents on other nodes cannot reach the daemon at {host}; in [daemon] set listen to an address that they can reach, such as "
            '"tcp://0.0.0.0:7443" (and advertise = "127.0.0.1" where all nodes are this machine).'
        )
    yield from connect(config).check()


def settings(config: Config) -> SlurmSettings:
    """What the scavenger is told."""
    slurm, gaps = config.scheduler.slurm, config.gaps
    backfill = slurm.mode == "backfill"
    return SlurmSettings(
        tag=_tag(config),
        template=_template(slurm.script),
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
            output_dir=_output_dir(config) if slurm.keep_output else None,
        ),
        rules=GapRules(
            partitions=frozenset(gaps.partitions),
            features=frozenset(gaps.features),
            nodes=frozenset(name for text in gaps.nodes for name in expand(text)),
            exclude=frozenset(name for text in gaps.exclude for name in expand(text)),
            reserve=gaps.reserve,
            hours=parse_hours(gaps.hours),
            use_planned=gaps.use_planned,
            max_at_once=gaps.max_at_once,
        ),
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


def _output_dir(config: Config) -> Path:
    return config.state_dir.absolute() / "leases"


def _template(script: Path | None) -> str:
    if script is None:
        return (files("jobscripts") / "slurm" / "lease.sh").read_text("utf-8")
    try:
        return script.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SchedulerError(f"The batch script {script} of the leases cannot be read: {error}.") from None


def _tag(config: Config) -> str:
    """What tells the leases of this daemon from those of others: of its key, or of its place as long as it has none."""
    try:
        text = read_key(config.state_dir / "keys" / SERVER).public
    except KeyFileError:
        text = str(config.state_dir.absolute())
    return hashlib.sha256(text.encode()).hexdigest()[:8]
