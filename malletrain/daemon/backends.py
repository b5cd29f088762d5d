"""Maps each kind of main scheduler to its scavenger. To support a new kind, extend this module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from malletrain.config.model import Config
from malletrain.config.schedulers import BatchScheduler
from malletrain.core.state_memory import HandOverTime
from malletrain.daemon import batch
from malletrain.daemon.advertise import advertised
from scavenger.embedded.cluster_process import start_cluster
from scavenger.embedded.layout import node_names
from scavenger.embedded.replaying import read_replay
from scavenger.embedded.scavenger import LocalScavenger
from scavenger.interface import Scavenger, SchedulerError
from scavenger.pbs.site import KILL_DELAY_S
from scavenger.slurm.site import KILL_WAIT_S


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
    check: Callable[[Config], Iterator[tuple[bool, str]]]
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
    if local.trace is not None:
        try:
            read_replay(
                local.trace, node_names(local.nodes), speedup=local.speedup, seed=local.seed
            )
        except (OSError, ValueError) as error:
            yield False, f"{error} Correct trace in [scheduler.local]."
            return
    yield (
        True,
        f"An embedded cluster of {local.nodes} nodes will be started in {config.cluster_dir}.",
    )


def _changed_options(config: Config) -> str:
    """Return the differences between the running cluster and [scheduler.local]; empty if there are
    none.
    """
    local, running_options = config.scheduler.local, _connect_local(config).options()
    options = {
        "nodes": local.nodes,
        "trace": None if local.trace is None else str(local.trace.resolve()),
        "speedup": local.speedup,
        "grace": local.grace,
        "notice_fraction": local.notice_fraction,
        "seed": local.seed,
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


def _check_local(config: Config) -> Iterator[tuple[bool, str]]:
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
        lambda config: batch.prepare(config, table(config)),
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
        batch.connect_slurm,
        lambda config: config.scheduler.slurm,
        KILL_WAIT_S,
        batch.slurm_addresses,
    ),
    "pbs": _of_batch(
        batch.connect_pbs, lambda config: config.scheduler.pbs, KILL_DELAY_S, batch.pbs_addresses
    ),
}
