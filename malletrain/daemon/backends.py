"""Which scavenger belongs to which kind of main scheduler: the one place where a new kind is
added.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from malletrain.config.model import Config
from malletrain.config.schedulers import BatchScheduler
from malletrain.daemon import batch
from malletrain.daemon.advertise import advertised
from scavenger.embedded.cluster_process import start_cluster
from scavenger.embedded.scavenger import LocalScavenger
from scavenger.interface import Scavenger, SchedulerError
from scavenger.pbs.site import KILL_DELAY_S
from scavenger.slurm.site import KILL_WAIT_S


@dataclass(frozen=True)
class Backend:
    """One kind of main scheduler.

    ``connect``: its scavenger; starts nothing. ``prepare``: what must be there before the daemon
    polls (may start an embedded cluster). ``grace_s``: seconds between the notice of a preemption
    and its end. ``check``: (works, sentence) per thing tested.
    """

    connect: Callable[[Config], Scavenger]
    prepare: Callable[[Config], None]
    grace_s: Callable[[Config], float]
    check: Callable[[Config], Iterator[tuple[bool, str]]]
    addresses: Callable[[Config], Sequence[str]] | None = None
    """Addresses or names of its nodes, as it has them; None: every node is this machine. Raises
    SchedulerError.
    """

    def host(self, config: Config) -> str:
        """The host that agents and clients are told to reach the daemon at. Raises AddressError.

        A main scheduler that does not answer says nothing of its nodes.
        """
        nodes: Sequence[str] = ()
        if self.addresses is not None:
            with contextlib.suppress(SchedulerError):
                nodes = self.addresses(config)
        daemon = config.daemon
        return advertised(daemon.listen, daemon.advertise, nodes, all_here=self.addresses is None)


def backend(config: Config) -> Backend:
    """The backend of the configured scheduler."""
    return _BACKENDS[config.scheduler.kind]


def _connect_local(config: Config) -> Scavenger:
    return LocalScavenger(config.cluster_dir)


def _runs(config: Config) -> bool:
    try:
        _connect_local(config).poll()
    except SchedulerError:
        return False
    return True


def _prepare_local(config: Config) -> None:
    local = config.scheduler.local
    if not local.autostart or _runs(config):
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


def _check_local(config: Config) -> Iterator[tuple[bool, str]]:
    if config.scheduler.local.autostart and not _runs(config):
        yield (
            True,
            f"An embedded cluster of {config.scheduler.local.nodes} nodes will be started in "
            f"{config.cluster_dir}.",
        )
    else:
        yield from _connect_local(config).check()


def _of_batch(
    connect: Callable[[Config], Scavenger],
    table: Callable[[Config], BatchScheduler],
    default_grace_s: float,
    addresses: Callable[[Config], Sequence[str]],
) -> Backend:
    """The backend of a batch scheduler. ``default_grace_s``: what agents are told by the daemon
    where the configuration says nothing; the scavenger, which asks the scheduler, tells each lease
    the true one.
    """

    return Backend(
        connect,
        lambda config: batch.prepare(config, table(config)),
        lambda config: table(config).grace or default_grace_s,
        lambda config: iter(connect(config).check()),
        addresses,
    )


_BACKENDS = {
    "local": Backend(
        _connect_local, _prepare_local, lambda config: config.scheduler.local.grace, _check_local
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
