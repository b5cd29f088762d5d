"""Creates the scavenger of each kind of main scheduler from the configuration. To support a new
kind, extend this module.

Decides also under which path leases run the daemon's Python. A virtual environment has its Python
as ``python``, ``python3`` and ``python3.N``; which of them runs this process depends on how the
environment was made, and ``malletrain-lease.conf`` allows only some of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from malletrain.config.model import Config
from malletrain.config.schedulers import BatchScheduler, LocalScheduler
from malletrain.config.slots import SlotSection
from malletrain.core.state_memory import HandOverTime
from malletrain.daemon.site.advertise import advertised
from malletrain.identity.keys import SERVER, KeyFileError, read_key, user_name
from malletrain.identity.state_directory import make_private_dir, write_atomically
from malletrain.protocol.counting import counted
from malletrain.shipped import shipped
from scavenger.batch.calls import CallLog
from scavenger.batch.commands import CommandPolicy, Commands
from scavenger.batch.gap_memory import GapMemory
from scavenger.batch.rules import GapRules, parse_hours
from scavenger.batch.settings import BatchSettings, OptionsT
from scavenger.batch.slots import CPUS, MEMORY_MB, HostResources, SlotKind, kind_finding
from scavenger.embedded.cluster_process import start_cluster
from scavenger.embedded.hosts import GPU, Division
from scavenger.embedded.layout import LEASE_LOG, Layout, node_names
from scavenger.embedded.scavenger import LocalScavenger
from scavenger.hostlist import expand
from scavenger.interface import Scavenger, SchedulerError
from scavenger.pbs import job as pbs_job
from scavenger.pbs import source as pbs_source
from scavenger.pbs.scavenger import PbsScavenger
from scavenger.pbs.site import KILL_DELAY_S
from scavenger.slurm import job as slurm_job
from scavenger.slurm import source as slurm_source
from scavenger.slurm.associations import Associations, read_associations
from scavenger.slurm.limits import most_memory_mb
from scavenger.slurm.parse import OF_THIS_CLUSTER
from scavenger.slurm.scavenger import SlurmScavenger
from scavenger.slurm.site import KILL_WAIT_S, ask_site
from scavenger.trace.replay import read_replay


def agent_program(executable: str = sys.executable, prefix: str = sys.prefix) -> tuple[str, ...]:
    """Return the command that starts an agent, without its options. It begins with
    ``PREFIX/bin/python`` if that is the Python of this process, else with the path of that.
    """
    default = Path(prefix) / "bin" / "python"
    try:
        is_same = default.samefile(executable)
    except OSError:
        is_same = False
    return (str(default) if is_same else executable, "-m", "malletrain.agent")


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
    table = config.scheduler.slurm
    settings = _settings(config, "slurm", table, slurm_job.SlurmLeaseOptions)
    return replace(settings, slots=tuple(map(slot_kind, table.slots)))


def pbs_settings(config: Config) -> BatchSettings[pbs_job.PbsLeaseOptions]:
    """Return the settings of the scavenger of PBS."""
    settings = _settings(config, "pbs", config.scheduler.pbs, pbs_job.PbsLeaseOptions)
    shell = settings.lease.shell or str(shipped("jobscripts/pbs/shell.sh").resolve())
    slots = tuple(map(slot_kind, config.scheduler.pbs.slots))
    return replace(settings, lease=replace(settings.lease, shell=shell), slots=slots)


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


def slot_kind(slots: SlotSection) -> SlotKind:
    """Return the kind of slots that a section describes."""
    amounts: dict[str, int] = {}
    if slots.gpus:
        amounts["gpu"] = slots.gpus
        if slots.gpu_type:
            amounts[f"gpu:{slots.gpu_type}"] = slots.gpus
    for text in slots.gres:
        name, _, count = text.rpartition(":")
        amounts[name] = int(count)
    amounts.update({CPUS: slots.cpus, MEMORY_MB: slots.memory // 2**20})
    hosts = frozenset(name for text in slots.nodes for name in expand(text))
    return SlotKind(slots.name, amounts, slots.beside, hosts, slots.free_memory, slots.whole_host)


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
    return GapMemory(path, gaps.expected_length)


def prepare(config: Config, table: BatchScheduler) -> None:
    """Create the folder for the output of leases."""
    if table.keep_output:
        make_private_dir(output_dir(config))


def slurm_addresses(config: Config) -> list[str]:
    """Return the addresses of Slurm's nodes (NodeAddr). Raises SchedulerError."""
    commands = Commands(_policy(config.scheduler.slurm), slurm_source.asking_environment())
    return commands.ask(["sinfo", "-h", "-a", *OF_THIS_CLUSTER, "-N", "-o", "%o"]).split()


def slurm_lease_memory_mb(config: Config) -> int:
    """Return the memory that a lease of a whole node requests, MB; 0: all of it. Raises
    SchedulerError.
    """
    commands = Commands(_policy(config.scheduler.slurm), slurm_source.asking_environment())
    return most_memory_mb(ask_site(commands), slurm_settings(config).lease)


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


def output_file(config: Config, lease: str) -> Path:
    """Return the file with what the lease printed, if it is kept on this machine."""
    if config.scheduler.kind == "local":
        return Layout(config.cluster_dir).lease_directory(lease) / LEASE_LOG
    return output_dir(config) / f"{lease}.out"


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


@dataclass(frozen=True)
class Backend:
    """One kind of main scheduler.

    ``connect``: returns its scavenger; starts nothing. ``prepare``: creates what the daemon needs
    before it polls (may start an embedded cluster). ``can_prepare``: tests whether that would
    succeed, and yields (works, sentence) for each test. ``grace_s``: seconds between the notice of
    a preemption and its end. ``check``: tests whether the scheduler serves the daemon at this
    moment.
    """

    connect: Callable[[Config], Scavenger]
    prepare: Callable[[Config], None]
    can_prepare: Callable[[Config], Iterator[tuple[bool, str]]]
    grace_s: Callable[[Config], float]
    check: Callable[[Config], Iterator[tuple[bool | None, str]]]
    addresses: Callable[[Config], Sequence[str]] | None = None
    """Returns addresses or names of its nodes; None if every node is this machine. Raises
    SchedulerError.
    """

    def host(self, config: Config) -> str:
        """Return the host at which agents and clients reach the daemon. Raises AddressError.

        If the main scheduler does not answer, its nodes are not taken into account.
        """
        nodes: Sequence[str] = ()
        if self.addresses is not None:
            with contextlib.suppress(SchedulerError):
                nodes = self.addresses(config)
        daemon = config.daemon
        return advertised(daemon.listen, daemon.advertise, nodes, all_here=self.addresses is None)


def backend(config: Config) -> Backend:
    """Return the backend of the configured scheduler."""
    return _BACKENDS[config.scheduler.kind]


def notice_of(config: Config, mbit: float = 0.0) -> HandOverTime:
    """Return the time in which a leaving node can hand over its part of a snapshot.

    Args:
        config: the site's configuration. If it does not set the grace time, the main scheduler's
            default applies.
        mbit: measured throughput of the network, Mbit/s; 0 if it was not measured.
    """
    return HandOverTime(config.jobs.drain_timeout, backend(config).grace_s(config), mbit)


def _connect_local(config: Config) -> LocalScavenger:
    return LocalScavenger(config.cluster_dir)


def _is_running(config: Config) -> bool:
    try:
        _connect_local(config).poll()
    except SchedulerError:
        return False
    return True


def _prepare_local(config: Config) -> None:
    local = config.scheduler.local
    if not local.autostart or _is_running(config):
        return
    start_cluster(
        config.cluster_dir,
        local.nodes,
        division=division(local),
        trace=local.trace,
        speedup=local.speedup,
        grace_s=local.grace,
        notice_fraction=local.notice_fraction,
        seed=local.seed,
    )


def _can_prepare_local(config: Config) -> Iterator[tuple[bool, str]]:
    local = config.scheduler.local
    if not local.autostart:
        return
    if _is_running(config):
        if changed := _changed_options(config):
            yield (
                False,
                f"The embedded cluster in {config.cluster_dir} still runs as it was started: "
                f"{changed}. Stop it with 'malletrain cluster stop', so that it is started again "
                "(jobs resume from their snapshots), or restore [scheduler.local].",
            )
        return
    names = node_names(local.nodes)
    for kind in division(local).kinds:
        hosts = dict.fromkeys(names, HostResources(division(local).total, {}))
        works, sentence = kind_finding(kind, hosts, "scheduler.local", "this cluster")
        yield works, sentence
        if not works:
            return
    if local.trace is not None:
        try:
            read_replay(local.trace, names, speedup=local.speedup, seed=local.seed)
        except (OSError, ValueError) as error:
            yield False, f"{error} Correct trace in [scheduler.local]."
            return
    yield (
        True,
        f"An embedded cluster of {counted(local.nodes, 'node')} will be started in "
        f"{config.cluster_dir}.",
    )


def division(local: LocalScheduler) -> Division:
    """Return what each virtual node has, and its kinds of slots."""
    total = {CPUS: local.node_cpus, MEMORY_MB: local.node_memory // 2**20}
    if local.node_gpus:
        total = {GPU: local.node_gpus, **total}
    return Division(total, tuple(map(slot_kind, local.slots))) if local.slots else Division()


def _changed_options(config: Config) -> str:
    """Return the differences between the running cluster and [scheduler.local]; empty if there are
    none.
    """
    local = config.scheduler.local
    running_options = {"slots": Division().to_json(), **_connect_local(config).options()}
    options = {
        "nodes": local.nodes,
        "trace": None if local.trace is None else str(local.trace.resolve()),
        "speedup": local.speedup,
        "grace": local.grace,
        "notice_fraction": local.notice_fraction,
        "seed": local.seed,
        "slots": division(local).to_json(),
    }
    return ", ".join(
        f"{name} is {_shown(running_options[name])} there and {_shown(value)} in the configuration"
        for name, value in options.items()
        if name in running_options and running_options[name] != value
    )


def _shown(value: object) -> str:
    if value is None:
        return "not given"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _check_local(config: Config) -> Iterator[tuple[bool | None, str]]:
    if _is_running(config) or not config.scheduler.local.autostart:
        yield from _connect_local(config).check()


def _of_batch(
    connect: Callable[[Config], Scavenger],
    table: Callable[[Config], BatchScheduler],
    default_grace_s: float,
    addresses: Callable[[Config], Sequence[str]],
) -> Backend:
    """Return the backend of a batch scheduler.

    Args:
        connect: returns the scavenger.
        table: returns the scheduler's table of the configuration.
        default_grace_s: grace time for agents if the configuration does not set one, seconds. The
            scavenger queries the scheduler and passes the actual value to each lease.
        addresses: returns addresses or names of the nodes.

    """

    def can_prepare(config: Config) -> Iterator[tuple[bool, str]]:
        connect(config)  # reads the batch script of the leases
        yield from ()

    return Backend(
        connect,
        lambda config: prepare(config, table(config)),
        can_prepare,
        lambda config: table(config).grace or default_grace_s,
        lambda config: iter(connect(config).check()),
        addresses,
    )


_BACKENDS = {
    "local": Backend(
        _connect_local,
        _prepare_local,
        _can_prepare_local,
        lambda config: config.scheduler.local.grace,
        _check_local,
    ),
    "slurm": _of_batch(
        connect_slurm,
        lambda config: config.scheduler.slurm,
        KILL_WAIT_S,
        slurm_addresses,
    ),
    "pbs": _of_batch(connect_pbs, lambda config: config.scheduler.pbs, KILL_DELAY_S, pbs_addresses),
}
