"""Which scavenger belongs to which kind of main scheduler: the one place where a new kind is added."""

from __future__ import annotations

from collections.abc import Callable

from malletrain.config import Config
from scavenger.interface import Scavenger, SchedulerError
from scavenger.local import LocalScavenger, start_cluster


def connect(config: Config) -> Scavenger:
    """The scavenger for the configured scheduler. Raises SchedulerError with a sentence."""
    return _CONNECT[config.scheduler.kind](config)


def grace_s(config: Config) -> float:
    """Seconds between the notice of a preemption and its end, as configured for the scheduler."""
    return _GRACE[config.scheduler.kind](config)


def _local(config: Config) -> Scavenger:
    local = config.scheduler.local
    scavenger = LocalScavenger(config.cluster_dir)
    if not local.autostart:
        return scavenger
    try:
        scavenger.poll()
    except SchedulerError:
        trace = None if local.trace == "none" else local.trace
        if trace == "synthetic":
            trace = str(_synthetic(config))
        start_cluster(
            config.cluster_dir,
            local.nodes,
            trace=trace,
            speedup=local.speedup,
            grace_s=local.grace,
            notice_fraction=local.notice_fraction,
            seed=local.seed,
        )
    return scavenger


def _synthetic(config: Config) -> str:
    """A week of a made-up machine of as many nodes, written beside the cluster."""
    from scavenger import synth, trace

    path = config.cluster_dir / "synthetic.csv.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    local = config.scheduler.local
    trace.write(synth.demo_trace(local.nodes, 7 * 86400.0, 1.0, local.seed), path)
    return str(path)


_CONNECT: dict[str, Callable[[Config], Scavenger]] = {"local": _local}
_GRACE: dict[str, Callable[[Config], float]] = {"local": lambda config: config.scheduler.local.grace}
