"""Changes at run time: owners change their jobs, operators what is leased and the configuration.

Decides which user may change what and which requests are valid, and records a change before it
takes effect. :mod:`malletrain.core` decides what a change does to the plan.

Of a configuration that is reloaded, :class:`Reload` decides which keys take effect at once. The
others take effect at a restart, during which jobs continue. An invalid file changes nothing. Both
are reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec
import structlog

from malletrain.config.model import Config, ConfigError, changes, load_config, with_changes
from malletrain.core.events import JobState, Tick
from malletrain.core.goals import OwnerGoals
from malletrain.core.unleased_nodes import EVERY_NODE, Restriction
from malletrain.daemon.api.job_views import JobViews
from malletrain.daemon.api.notices import Notices
from malletrain.daemon.engine.state import SiteState
from malletrain.daemon.engine.transactions import Operation, OperationContext, Transactions
from malletrain.daemon.engine.unfinished_jobs import UnfinishedJobs, outcome
from malletrain.daemon.jobs.admission import (
    MAX_TEXT_LENGTH,
    RequestRefused,
    linked,
    number,
    problem_of,
    text,
    weighed,
    whole,
)
from malletrain.daemon.jobs.goals import HOUR_S, goals_problem
from malletrain.daemon.jobs.repository import Retention, decode_spec, not_completed
from malletrain.daemon.leases.reconciler import LeaseReconciler
from malletrain.daemon.site import logs
from malletrain.daemon.site.backends import gap_rules
from malletrain.protocol import env, messages
from malletrain.protocol.bounds import MAX_NODES
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.messages import JobSpec
from malletrain.protocol.views import JobView
from malletrain.store.records import JobRow
from scavenger.batch.scavenger import BatchScavenger
from scavenger.hostlist import HostlistError, expand, named
from scavenger.interface import Scavenger

log = structlog.get_logger(__name__)


class JobChanges:
    """Operations on one unfinished job.

    Args:
        context: finds jobs, and opens transactions.
        jobs: changes unfinished jobs.
        views: creates the answers.
    """

    def __init__(self, context: OperationContext, jobs: UnfinishedJobs, views: JobViews) -> None:
        self._state, self._context = context.state, context
        self._jobs = jobs
        self._views = views
        self.operations: dict[str, Operation] = {
            "weigh": self._weigh,
            "extend": self._extend,
            "link": self._link,
        }

    async def _weigh(self, user: str, params: Mapping[str, Any]) -> JobView:
        """Change the weight of an unfinished job."""
        row = self._context.managed(user, params, "weigh it")
        if row.id not in self._state.runs:
            raise RequestRefused(f"Job {row.id} is {row.state} already.")
        spec = weighed(decode_spec(row.spec), params.get("weight"))
        with self._context.transaction():
            self._jobs.reweigh(row.id, spec)
        return self._views.view(user, self._state.store.get_job(row.id) or row, spec)

    async def _extend(self, user: str, params: Mapping[str, Any]) -> dict[str, JobView]:
        row = self._context.managed(user, params, "extend it")
        if JobState(row.state).ended:
            raise RequestRefused(f"Job {row.id} is {row.state} already.")
        changes = msgspec.convert(params["changes"], dict[str, float | None])
        new_goals, stated = extended(self._state, row, changes)
        with self._context.transaction():
            self._state.audit.record(
                EventKind.JOB_EXTENDED,
                _goals_sentence(new_goals),
                job=row.id,
                deadline=new_goals.deadline,
                budget_nh=None if new_goals.budget_s is None else new_goals.budget_s / HOUR_S,
                work=new_goals.work,
            )
            self._jobs.extend(row.id, new_goals, stated=stated)
        return {"job": self._views.view(user, self._state.store.get_job(row.id) or row)}

    async def _link(self, user: str, params: Mapping[str, Any]) -> dict[str, str]:
        """Give an unfinished job a link, or remove one."""
        name, url = text(params, "name"), text(params, "url")
        row = self._context.managed(user, params, "change the links of it")
        run = self._state.runs.get(row.id)
        if JobState(row.state).ended:
            raise RequestRefused(f"Job {row.id} is {row.state} already.")
        if run is None:
            raise RequestRefused(
                f"Job {row.id} waits for other jobs; give it a link once they have completed."
            )
        spec = linked(run.spec, name, url)
        if spec.links != run.spec.links:
            with self._context.transaction():
                self._jobs.relink(row.id, spec)
        ending = f"links to {url}" if url else "has no link of this name"
        return {"sentence": f"Job {row.id} ({row.name}): {name} {ending}."}


def arrays_of(jobs: Iterable[tuple[str, JobSpec]]) -> dict[tuple[str, int], list[str]]:
    """Return (prefix of the job names, number of digits of the index) → ids of the jobs, for each
    array.
    """
    arrays: dict[tuple[str, int], list[str]] = {}
    for job, spec in jobs:
        index = spec.env.get(env.ARRAY_INDEX, "")
        if index and spec.name.endswith(f"-{index}"):
            arrays.setdefault((spec.name[: -len(index) - 1], len(index)), []).append(job)
    return arrays


def jobs_of_array(arrays: Mapping[tuple[str, int], list[str]], name: str) -> list[str]:
    """Return the ids of the jobs of the array that was submitted as ``name``."""
    digits = sorted({count for _, count in arrays})
    return [job for n in digits for job in arrays.get((name[: 63 - n], n), ())]


def dependencies(state: SiteState, predecessors: Sequence[JobRow]) -> tuple[str, ...]:
    """Return the ids of the jobs that a new job waits for. Raises RequestRefused."""
    for row in not_completed(state.store, [row.id for row in predecessors]):
        if JobState(row.state).ended:
            raise RequestRefused(
                f"Job {row.id} ({row.name}) {outcome(row)}, so a job after it would never start."
            )
    return tuple(dict.fromkeys(row.id for row in predecessors))


KEYS = ("deadline", "budget_nh", "more_nh", "work")


def goals_of(spec: messages.JobSpec) -> OwnerGoals:
    """Return the goals in a job's specification."""
    budget_s = None if spec.budget_nh is None else spec.budget_nh * HOUR_S
    return OwnerGoals(spec.deadline, budget_s, spec.work)


def extended(
    state: SiteState, row: JobRow, changes: Mapping[str, float | None]
) -> tuple[OwnerGoals, bool]:
    """Return the new goals of the job, and whether its owner stated its work. Raises
    RequestRefused.

    Args:
        state: the daemon's state.
        row: row of the job.
        changes: goal (one of ``KEYS``) → new value; None removes the goal.
    """
    unknown = sorted(set(changes) - set(KEYS))
    if unknown or not changes:
        raise RequestRefused(f"A job is extended by some of {', '.join(KEYS)}.", "usage")
    goals, stated = state.goals.of(row.id)
    fields: dict[str, Any] = {}
    if "deadline" in changes:
        fields["deadline"] = changes["deadline"]
    if "budget_nh" in changes:
        hours = changes["budget_nh"]
        fields["budget_s"] = None if hours is None else hours * HOUR_S
    if (more := changes.get("more_nh")) is not None:
        if goals.budget_s is None:
            raise RequestRefused(
                f"Job {row.id} has no budget that could be raised; give one, such as 200nh.",
                "usage",
            )
        fields["budget_s"] = goals.budget_s + more * HOUR_S
    if "work" in changes:
        fields["work"], stated = changes["work"], changes["work"] is not None
    new_goals = replace(goals, **fields)
    changed = OwnerGoals(**fields)  # unchanged goals may be invalid by now
    if problem := goals_problem(changed, decode_spec(row.spec).mode, state.clock.now()):
        raise RequestRefused(problem, "usage")
    return new_goals, stated


def _goals_sentence(goals: OwnerGoals) -> str:
    parts = [
        "no deadline" if goals.deadline is None else f"the deadline {_utc(goals.deadline)}",
        "no budget" if goals.budget_s is None else f"a budget of {goals.budget_s / HOUR_S:.4g} nh",
    ]
    return f"The job has {parts[0]} and {parts[1]} from now on."


def _utc(moment: float) -> str:
    return datetime.fromtimestamp(moment, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


class OperatorActions:
    """The operations by which users change running jobs and leases.

    Args:
        context: finds jobs, and opens transactions.
        jobs: changes unfinished jobs.
        leases: requests leases from the main scheduler.
        reload: reloads the configuration.
    """

    def __init__(
        self,
        context: OperationContext,
        jobs: UnfinishedJobs,
        leases: LeaseReconciler,
        reload: Reload,
    ) -> None:
        self._state, self._context = context.state, context
        self._jobs, self._leases, self._reloader = jobs, leases, reload
        self.operations: dict[str, Operation] = {
            "scale": self._scale,
            "pause": self._pause,
            "resume": self._resume,
            "drain": self._drain,
            "exclude": self._exclude,
            "reload": self._reload,
        }

    async def _scale(self, user: str, params: Mapping[str, Any]) -> dict[str, str]:
        """Change the limits of a job's scale."""
        state, row = self._state, self._context.managed(user, params, "change its limits")
        run = state.runs.get(row.id)
        if run is None or JobState(row.state).ended:
            raise RequestRefused(f"Job {row.id} is {row.state} already.")
        if row.state == JobState.PROFILING.value:
            raise RequestRefused(
                f"Job {row.id} is being profiled; its limits can be changed when that is over."
            )
        low, high = (whole(params, n, 0, 0, MAX_NODES + 1) for n in ("min_nodes", "max_nodes"))
        largest, noun = run.spec.largest, run.spec.size_noun
        sized = run.spec.trains and row.started is not None
        if sized and high > largest:
            raise RequestRefused(
                f"Job {row.id} has started with at most {largest} {noun}: its batches and the ends "
                f"of its epochs are sized for that number ({env.MAX_WORLD_SIZE}), and more would "
                f"drop or repeat samples. Give it {largest} at most, or cancel it and submit it "
                f"again with {run.spec.size_option} {low}:{high}; it resumes from its snapshot.",
                "usage",
            )
        sizes = run.spec.profile_sizes
        if sizes is not None:
            sizes = tuple(k for k in sizes if low <= k <= high) or None
        spec = msgspec.structs.replace(
            run.spec,
            min_nodes=low,
            max_nodes=high,
            profile_sizes=sizes,
            sized_for=largest if sized and high < largest else 0,
        )
        if problem := problem_of(spec, files=False):
            raise RequestRefused(problem, "usage")
        before = f"{run.spec.min_nodes}:{run.spec.max_nodes}"
        instead = "as before" if before == f"{low}:{high}" else f"not {before}"
        sentence = f"Job {row.id} ({row.name}) may use {low}:{high} {noun}, {instead}."
        with self._context.transaction():
            state.audit.record(
                EventKind.JOB_LIMITED, sentence, job=row.id, min_nodes=low, max_nodes=high, by=user
            )
            self._jobs.limit(row.id, spec)
        return {"job": row.id, "sentence": sentence}

    # --- restrictions of leasing ---

    async def _pause(self, user: str, params: Mapping[str, Any]) -> dict[str, str]:
        """Stop leasing; with ``release`` give all leases back."""
        hold, release = self._restriction(user, params), params.get("release") is True
        leased = self._leased_nodes() if release else []
        sentence = "Nothing new is leased until 'malletrain resume'. " + (
            _release_sentence(len(leased)) if release else "What is held stays."
        )
        with self._context.transaction():
            restrictions = self._leases.restrictions.now.pausing(hold)
            self._state.audit.record(
                EventKind.LEASING_PAUSED, f"{sentence} By {user}.", by=user, release=release
            )
            self._leases.restrict(restrictions, leased, f"{user} paused MalleTrain.")
        return {"sentence": sentence}

    async def _resume(self, user: str, params: Mapping[str, Any]) -> dict[str, str]:
        """End a pause, or the restrictions of ``nodes``."""
        self._require_operator(user)
        nodes = self._nodes(params)
        before = self._leases.restrictions.now
        if nodes:
            sick = self._state.sick.now(self._state.clock.now()).keys() & set(nodes)
            resumed_nodes = sorted({*before.drained, *before.excluded} & set(nodes) | sick)
            after = before.resuming(resumed_nodes)
            missing = sorted(set(nodes) - set(resumed_nodes))
            sentence = f"May be leased again: {_named(resumed_nodes) or 'nothing'}." + (
                f" Neither drained nor excluded, nor sick: {_named(missing)}." if missing else ""
            )
        else:
            resumed_nodes, after, sick = [], before.pausing(None), set()
            remaining = after.sentence()
            word = "is over" if before.paused else "was not there"
            sentence = f"The pause {word}.{f' Still so: {remaining}' if remaining else ''}"
        if after == before and not sick:
            raise RequestRefused(sentence)
        with self._context.transaction():
            for node in sick:
                self._state.sick.forget(node)
            if not nodes:
                self._state.audit.record(EventKind.LEASING_RESUMED, f"By {user}.", by=user)
            self._record(EventKind.NODE_RESUMED, resumed_nodes, f"By {user}.", user)
            self._leases.restrict(after, (), "")
        return {"sentence": sentence}

    async def _drain(self, user: str, params: Mapping[str, Any]) -> dict[str, str]:
        """Give nodes back, and leave them alone until a time or until they are resumed."""
        hold, nodes = self._restriction(user, params), self._nodes(params)
        if not nodes:
            raise RequestRefused("Name the nodes to drain, or all of them (--all).", "usage")
        leased = [node for node in self._leased_nodes() if EVERY_NODE in nodes or node in nodes]
        restrictions = self._leases.restrictions.now.draining(nodes, hold)
        sentence = restrictions.refusal(nodes[0])
        with self._context.transaction():
            self._record(EventKind.NODE_DRAINED, nodes, sentence, user, until=hold.until)
            self._leases.restrict(restrictions, leased, sentence)
        return {"sentence": f"{_named(nodes)}: {sentence} {_release_sentence(len(leased))}"}

    async def _exclude(self, user: str, params: Mapping[str, Any]) -> dict[str, str]:
        """Take no more leases on nodes."""
        hold, nodes = self._restriction(user, params), self._nodes(params)
        if not nodes or EVERY_NODE in nodes:
            raise RequestRefused("Name the nodes to exclude; 'pause' is for all of them.", "usage")
        restrictions = self._leases.restrictions.now.excluding(nodes, hold)
        sentence = restrictions.refusal(nodes[0])
        with self._context.transaction():
            self._record(EventKind.NODE_EXCLUDED, nodes, sentence, user)
            self._leases.restrict(restrictions, (), "")
        return {"sentence": f"{_named(nodes)}: {sentence} A lease that is held there stays."}

    async def _reload(self, user: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Reload the configuration."""
        self._require_operator(user)
        try:
            config = await asyncio.to_thread(self._reloader.read)
        except ConfigError as error:
            self._reloader.failed(str(error), user)
            raise RequestRefused(f"Nothing has changed. {error}") from None
        with self._context.transaction():
            changes_ = self._reloader.apply(config, user)
        return {"sentence": _effects_sentence(changes_), **changes_}

    def _require_operator(self, user: str) -> None:
        if not self._state.accounts.operates(user):
            raise RequestRefused(
                "Only operators ([daemon] operators in the daemon's configuration) and the user "
                "who runs the daemon can do this."
            )

    def _restriction(self, user: str, params: Mapping[str, Any]) -> Restriction:
        self._require_operator(user)
        now = self._state.clock.now()
        until = None
        if params.get("until") is not None:
            until = number(params, "until", 0.0, 0.0, 1e11)
            if until <= now:
                raise RequestRefused("The end of the restriction is in the past.", "usage")
        return Restriction(user, now, until, text(params, "why", ""))

    def _nodes(self, params: Mapping[str, Any]) -> list[str]:
        nodes = msgspec.convert(params.get("nodes", []), list[str])
        if len(nodes) > MAX_NODES or any(not 0 < len(name) <= MAX_TEXT_LENGTH for name in nodes):
            raise RequestRefused("The request's 'nodes' is not a valid list of nodes.", "usage")
        names = {row.node for row in self._leases.active.values()}
        if self._leases.last_poll is not None:
            names |= {each.node for each in self._leases.last_poll.explanations}
            restrictions = self._leases.restrictions.now
            names |= {EVERY_NODE, *restrictions.drained, *restrictions.excluded}
            nodes = [each for name in nodes for each in _expanded(name, names)]
            if unknown := [name for name in nodes if name not in names]:
                raise RequestRefused(
                    f"The main scheduler knows no node {named(unknown)}; 'malletrain nodes "
                    "--explain' lists all."
                )
        return nodes

    def _leased_nodes(self) -> list[str]:
        return [row.node for row in self._leases.active.values()]

    def _record(
        self, kind: EventKind, nodes: list[str], sentence: str, user: str, **data: Any
    ) -> None:
        for node in nodes:
            name = "" if node == EVERY_NODE else node
            self._state.audit.record(kind, sentence, node=name, by=user, **data)


def _expanded(name: str, names: Collection[str]) -> tuple[str, ...]:
    """Return the nodes that an operator names: one node, or a list such as n[1-4]."""
    if name in names:
        return (name,)
    try:
        return expand(name)
    except HostlistError as error:
        raise RequestRefused(str(error), "usage") from None


def _named(nodes: list[str]) -> str:
    if EVERY_NODE not in nodes:
        return named(nodes)
    others = [node for node in nodes if node != EVERY_NODE]
    return f"all nodes, {named(others)}" if others else "all nodes"


def _release_sentence(leases: int) -> str:
    """Return what happens to a number of leases, as a sentence."""
    if leases == 0:
        return "There is no lease to give back."
    if leases == 1:
        return "1 lease is given back once its job has moved off."
    return f"{leases} leases are given back once their jobs have moved off."


AT_ONCE = frozenset(
    {
        *("daemon.log_level", "daemon.log_format", "daemon.operators"),
        *("gaps.partitions", "gaps.features", "gaps.nodes", "gaps.exclude"),
        *("gaps.reserve", "gaps.hours", "gaps.max_at_once", "gaps.idle_for", "gaps.hold"),
        *("jobs.max_running", "jobs.max_tries", "jobs.retry_window"),
        *("jobs.warmup_timeout", "jobs.no_progress_warning", "jobs.keep_logs"),
        *("accounting.watts", "accounting.keep"),
        *("notify.sendmail", "notify.webhooks"),
    }
)
"""Keys that take effect when they are reloaded."""

NEXT_JOBS = frozenset(
    {
        *("allocation.objective", "quotas.user_jobs", "quotas.account_jobs"),
        *("containers.runtime", "containers.image", "containers.binds", "containers.options"),
    }
)
"""Keys that take effect for jobs that are submitted after the reload."""


class Reload:
    """Reloads the configuration of one daemon. ``path``: file with which it was started; None if it
    was started without one.
    """

    def __init__(
        self,
        path: Path | None,
        state: SiteState,
        transactions: Transactions,
        scavenger: Scavenger,
        notices: Notices,
        retention: Retention,
        log_file: logs.RotatedLog | None = None,
    ) -> None:
        self._path = path
        self._state = state
        self._transactions = transactions
        self._scavenger = scavenger
        self._notices = notices
        self._retention = retention
        self._log_file = log_file

    def read(self) -> Config:
        """Read the configuration file. May take long.

        Raises:
            ConfigError: the file is invalid; the message has all errors.
            RequestRefused: there is no file.
        """
        if self._path is None:
            raise RequestRefused("The daemon was started without a configuration file.")
        return load_config(self._path)

    def apply(self, config: Config, by: str) -> dict[str, list[str]]:
        """Apply the changes that need no restart.

        Args:
            config: the new configuration.
            by: who reloads it, for the audit log.

        Returns:
            ``applied``, ``next_jobs`` and ``restart`` → a line for each key that takes effect at
            once, for the next jobs, and at a restart.

        """
        differences = changes(self._state.config, config)
        reloaded_keys = differences.keys() & (AT_ONCE | NEXT_JOBS)
        if reloaded_keys:
            self._take_over(with_changes(self._state.config, config, reloaded_keys))
        effects = {
            "applied": _lines(differences, differences.keys() & AT_ONCE),
            "next_jobs": _lines(differences, differences.keys() & NEXT_JOBS),
            "restart": _lines(differences, differences.keys() - reloaded_keys),
        }
        with self._transactions.begin() as now:
            if "jobs.max_running" in reloaded_keys:
                self._state.controller.state.plan_soon(now)
                self._transactions.feed(Tick())
            self._state.audit.record(
                EventKind.CONFIGURATION_RELOADED,
                f"{_effects_sentence(effects)} By {by}.",
                by=by,
                changes=effects,
            )
        return effects

    def failed(self, why: str, by: str) -> None:
        """Log that the file is invalid."""
        log.warning("configuration not reloaded", reason=why, by=by)

    def _take_over(self, config: Config) -> None:
        state = self._state
        state.config = config
        logs.configure(config.daemon.log_level, config.daemon.log_format, self._log_file)
        state.accounts.appoint(config.daemon.operators)
        controller = state.controller
        controller.settings = replace(
            controller.settings,
            max_tries=config.jobs.max_tries,
            retry_window_s=config.jobs.retry_window,
        )
        controller.queue.allow(config.jobs.max_running)
        state.rounds.configure(config)
        state.parties.limit(config.quotas)
        self._notices.settings = config.notify
        self._retention.keep_s = config.accounting.keep
        self._retention.keep_logs_s = config.jobs.keep_logs
        if isinstance(self._scavenger, BatchScavenger):
            self._scavenger.settings = replace(
                self._scavenger.settings,
                rules=gap_rules(config),
                idle_for_s=config.gaps.idle_for,
                hold_s=config.gaps.hold,
            )


def _effects_sentence(effects: Mapping[str, list[str]]) -> str:
    """Return the effects of a reload as a sentence."""
    words = (("applied", "applied"), ("next_jobs", "for the next jobs"), ("restart", "to restart"))
    counts = [f"{len(effects[name])} {word}" for name, word in words if effects[name]]
    if not counts:
        return "The configuration has not changed."
    return f"The configuration was read again: {', '.join(counts)}."


def _lines(differences: Mapping[str, str], names: Collection[str]) -> list[str]:
    return [f"{name}: {differences[name]}" for name in sorted(names)]
