"""Translates the site's configuration into the settings of the controller, its planner, the JPA and
the rounds. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from allocator import Goal, MonotonicClock, RescaleCost
from malletrain.config.model import Config
from malletrain.config.schedulers import BatchScheduler
from malletrain.core.planning import Planner, exact, freetrain_plan, freetrain_settings, make_plan
from malletrain.core.pools import DEADLINES_FIRST, REST, Trainer
from malletrain.core.settings import (
    ControllerSettings,
    PlanningSettings,
    ProfilingSettings,
    ShareSettings,
    advisor_config,
)
from malletrain.rounds.interface import RoundSettings
from malletrain.rounds.live import LiveRounds
from malletrain.rounds.restart import RestartRounds
from malletrain.rounds.service import FarmRounds, ServiceRounds
from scavenger.interface import host_of

ROUNDS: dict[str, type[RestartRounds] | type[LiveRounds] | type[ServiceRounds]] = {
    "restart": RestartRounds,
    "live": LiveRounds,
    "service": ServiceRounds,
    "farm": FarmRounds,
}
"""Mode of a job → class of its rounds."""
MOVING_S = 10.0
"""Time that a job has to move off a reclaimed node, in addition to its drain and the end of its
workers, seconds.
"""
TURN_S = 30.0
"""Default time for which an idle node is left to a batch scheduler before it counts as a gap,
seconds: one of its scheduling cycles (``bf_interval`` of Slurm; PBS starts a cycle at once and
periodically).
"""


def controller_settings(config: Config) -> ControllerSettings:
    """Return the settings of the controller."""
    settings = _settings(config)
    return freetrain_settings(settings) if config.allocation.policy == "freetrain" else settings


def planner(config: Config, clock: MonotonicClock) -> Planner:
    """Return the function that computes plans. Its time limit is measured by ``clock``."""
    solver = partial(exact, clock=clock)
    is_freetrain = config.allocation.policy == "freetrain"
    return partial(freetrain_plan if is_freetrain else make_plan, solver=solver)


def _settings(config: Config) -> ControllerSettings:
    a, j, p = config.allocation, config.jobs, config.profiling
    table = config.scheduler.table
    profiling = ProfilingSettings(
        advisor_config(
            precision=p.precision,
            min_time_s=p.min_time,
            max_time_s=p.max_time,
            max_profile_s=p.max_profile,
            rescale_timeout_s=p.rescale_timeout,
            donor_quiet_s=p.donor_quiet,
            max_wait_for_nodes_s=p.patience,
            max_steps=p.max_sizes,
        ),
        kappa=p.kappa,
        when_worth=p.when_worth,
        every_size_up_to=p.every_size_up_to,
        window_s=p.observe_every,
        lease_patience_s=p.lease_patience,
        silence_s=p.silence,
        again_s=p.max_profile,
    )
    return ControllerSettings(
        PlanningSettings(
            t_fwd_s=a.t_fwd,
            cost=RescaleCost(a.rescale_up, a.rescale_down, a.start),
            max_running=j.max_running,
            time_limit_s=a.time_limit,
            prior_exponent=a.prior_exponent,
        ),
        debounce_s=a.debounce,
        min_interval_s=a.min_interval,
        starvation_s=j.starvation,
        turns_apart=j.turns_apart,
        max_tries=j.max_tries,
        retry_window_s=j.retry_window,
        release_after_s=a.release_after,
        min_horizon_s=a.min_horizon,
        lease_wait_s=a.lease_wait,
        rejected_s=a.rejected_for,
        reclaim_s=j.drain_timeout + j.stop_grace + MOVING_S,
        reclaim_every_s=a.reclaim_every,
        reclaim_way_s=ControllerSettings.reclaim_way_s + _main_scheduler_time_s(config),
        min_charge_s=config.accounting.min_charge,
        charge_factor=config.accounting.charge_factor,
        deadline_weight=a.deadline_weight,
        deadline_ahead=a.deadline_ahead,
        min_lease_s=table.min_lease if isinstance(table, BatchScheduler) else 0.0,
        max_leases_per_owner=table.max_leases_per_user if isinstance(table, BatchScheduler) else 0,
        whole_host_classes=frozenset(k.name for k in table.slot_sections if k.whole_host),
        profiling=profiling if p.enabled else None,
        shares=share_settings(config),
        trainers=trainers(config),
    )


def _main_scheduler_time_s(config: Config) -> float:
    """Return the time for which a released node is left to the main scheduler, seconds."""
    if not isinstance(config.scheduler.table, BatchScheduler):
        return 0.0
    return TURN_S if config.gaps.idle_for is None else config.gaps.idle_for


def trainers(config: Config) -> tuple[Trainer, ...]:
    """Return the trainers of the configuration. The one for the remaining users is last."""
    if not config.trainer:
        return ()
    named_classes = frozenset(name for section in config.trainer for name in section.node_classes)
    trainers_ = [
        Trainer(
            section.name,
            Goal.THROUGHPUT if section.objective == "throughput" else Goal.EFFICIENCY,
            DEADLINES_FIRST if section.objective == "deadlines" else None,
            frozenset(section.node_classes) or None,
            frozenset() if section.node_classes else named_classes,
        )
        for section in sorted(config.trainer, key=lambda section: section.rest)
    ]
    if not any(section.rest for section in config.trainer):
        trainers_.append(
            Trainer(REST, Goal(config.allocation.objective), other_classes=named_classes)
        )
    return tuple(trainers_)


def slot_prices(config: Config, parts: Mapping[str, float]) -> dict[str, float]:
    """Return kind of slots → node-hours that one hour of a slot counts.

    Args:
        config: configuration of the site.
        parts: kind → the part of a host that a slot is, as far as it is known.
    """
    return {
        kind.name: kind.price or parts.get(kind.name, 1.0)
        for kind in config.scheduler.table.slot_sections
    }


def unpriced_slots(config: Config, parts: Mapping[str, float]) -> frozenset[str]:
    """Return the kinds of slots whose price is not known yet. Arguments as for
    :func:`slot_prices`.
    """
    sections = config.scheduler.table.slot_sections
    return frozenset(kind.name for kind in sections if not kind.price and kind.name not in parts)


def share_settings(config: Config) -> ShareSettings | None:
    """Return the settings of shares; None if shares are not counted."""
    shares = config.shares
    if shares.by == "off":
        return None
    return ShareSettings(
        shares.weight_of,
        shares.others,
        half_life_s=shares.half_life,
        double_after_s=shares.double_after,
        classes=shares.class_weights,
    )


def round_settings(config: Config) -> RoundSettings:
    """Return the settings of the rounds. A failure is held for half an agent's time-out, because
    the loss of a node may not be known yet.
    """
    jobs = config.jobs
    return RoundSettings(
        warmup_s=jobs.join_timeout,
        drain_s=jobs.drain_timeout,
        join_s=jobs.join_timeout,
        failure_grace_s=config.daemon.agent_timeout / 2,
        stop_s=jobs.stop_grace,
        host_of=host_of,
    )
