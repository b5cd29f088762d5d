"""Changes at run time: owners change the limits of a job's scale, operators what is leased.

Decides which user may change what, and records a change before it takes effect. The controller
decides the effects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from malletrain.config.model import ConfigError
from malletrain.core.events import JobState, LimitsChanged
from malletrain.core.restraint import EVERY_NODE, Restriction
from malletrain.daemon.admission import (
    MAX_TEXT_LENGTH,
    RequestRefused,
    number,
    problem_of,
    text,
    whole,
)
from malletrain.daemon.core import Core
from malletrain.daemon.lease_reconciler import LeaseReconciler
from malletrain.daemon.reload import Reload, sentence
from malletrain.protocol import env
from malletrain.protocol.bounds import MAX_NODES
from malletrain.protocol.event_kinds import EventKind
from malletrain.store.records import JobRow
from scavenger.hostlist import HostlistError, expand, named

Operation = Callable[[str, Mapping[str, Any]], Awaitable[Any]]


class OperatorActions:
    """The operations by which users change running jobs and leases.

    Args:
        core: the daemon's core.
        leases: requests leases from the main scheduler.
        find: returns the job that a user means by a name or id; arguments: name, user. Raises
            RequestRefused.
        transaction: opens a transaction of the core as the API does.
        reload: reloads the configuration.
    """

    def __init__(
        self,
        core: Core,
        leases: LeaseReconciler,
        find: Callable[[str, str], JobRow],
        transaction: Callable[[], AbstractContextManager[float]],
        reload: Reload,
    ) -> None:
        self._core, self._leases, self._find, self._transaction = core, leases, find, transaction
        self._reloader = reload
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
        core, row = self._core, self._find(text(params, "job"), user)
        if not core.accounts.may_manage(user, row.owner):
            raise RequestRefused(
                f"Job {row.id} belongs to {row.owner}; only its owner or an operator can change "
                "its limits."
            )
        run = core.runs.get(row.id)
        if run is None or JobState(row.state).ended:
            raise RequestRefused(f"Job {row.id} is {row.state} already.")
        if row.state == JobState.PROFILING.value:
            raise RequestRefused(
                f"Job {row.id} is being profiled; its limits can be changed when that is over."
            )
        low, high = (whole(params, n, 0, 0, MAX_NODES + 1) for n in ("min_nodes", "max_nodes"))
        largest = run.spec.largest
        sized = run.spec.mode != "service" and row.started is not None
        if sized and high > largest:
            raise RequestRefused(
                f"Job {row.id} has started with at most {largest} nodes: its batches and the ends "
                f"of its epochs are sized for that number ({env.MAX_WORLD_SIZE}), and more would "
                f"drop or repeat samples. Give it {largest} at most, or cancel it and submit it "
                f"again with --nodes {low}:{high}; it resumes from its snapshot.",
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
        sentence = f"Job {row.id} ({row.name}) may use {low}:{high} nodes, not {before}."
        with self._transaction():
            core.repository.save(run, spec=msgspec.json.encode(spec).decode())
            run.spec, run.rounds.min_nodes = spec, low
            core.audit.record(
                EventKind.JOB_LIMITED, sentence, job=row.id, min_nodes=low, max_nodes=high, by=user
            )
            core.feed(LimitsChanged(row.id, low, high))
        return {"job": row.id, "sentence": sentence}

    # --- restrictions of leasing ---

    async def _pause(self, user: str, params: Mapping[str, Any]) -> dict[str, str]:
        """Stop leasing; with ``release`` give all leases back."""
        hold, release = self._restriction(user, params), params.get("release") is True
        leased = self._leased_nodes() if release else []
        sentence = "Nothing new is leased until 'malletrain resume'. " + (
            _release_sentence(len(leased)) if release else "What is held stays."
        )
        with self._transaction():
            restraint = self._leases.restraints.now.pausing(hold)
            self._core.audit.record(
                EventKind.LEASING_PAUSED, f"{sentence} By {user}.", by=user, release=release
            )
            self._leases.restrain(restraint, leased, f"{user} paused MalleTrain.")
        return {"sentence": sentence}

    async def _resume(self, user: str, params: Mapping[str, Any]) -> dict[str, str]:
        """End a pause, or the restrictions of ``nodes``."""
        self._require_operator(user)
        nodes = self._nodes(params)
        before = self._leases.restraints.now
        if nodes:
            sick = self._core.sick.now(self._core.clock.now()).keys() & set(nodes)
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
        with self._transaction():
            for node in sick:
                self._core.sick.forget(node)
            if not nodes:
                self._core.audit.record(EventKind.LEASING_RESUMED, f"By {user}.", by=user)
            self._record(EventKind.NODE_RESUMED, resumed_nodes, f"By {user}.", user)
            self._leases.restrain(after, (), "")
        return {"sentence": sentence}

    async def _drain(self, user: str, params: Mapping[str, Any]) -> dict[str, str]:
        """Give nodes back, and leave them alone until a time or until they are resumed."""
        hold, nodes = self._restriction(user, params), self._nodes(params)
        if not nodes:
            raise RequestRefused("Name the nodes to drain, or all of them (--all).", "usage")
        leased = [node for node in self._leased_nodes() if EVERY_NODE in nodes or node in nodes]
        restraint = self._leases.restraints.now.draining(nodes, hold)
        sentence = restraint.refusal(nodes[0])
        with self._transaction():
            self._record(EventKind.NODE_DRAINED, nodes, sentence, user, until=hold.until)
            self._leases.restrain(restraint, leased, sentence)
        return {"sentence": f"{_named(nodes)}: {sentence} {_release_sentence(len(leased))}"}

    async def _exclude(self, user: str, params: Mapping[str, Any]) -> dict[str, str]:
        """Take no more leases on nodes."""
        hold, nodes = self._restriction(user, params), self._nodes(params)
        if not nodes or EVERY_NODE in nodes:
            raise RequestRefused("Name the nodes to exclude; 'pause' is for all of them.", "usage")
        restraint = self._leases.restraints.now.excluding(nodes, hold)
        sentence = restraint.refusal(nodes[0])
        with self._transaction():
            self._record(EventKind.NODE_EXCLUDED, nodes, sentence, user)
            self._leases.restrain(restraint, (), "")
        return {"sentence": f"{_named(nodes)}: {sentence} A lease that is held there stays."}

    async def _reload(self, user: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Reload the configuration."""
        self._require_operator(user)
        try:
            config = await asyncio.to_thread(self._reloader.read)
        except ConfigError as error:
            self._reloader.failed(str(error), user)
            raise RequestRefused(f"Nothing has changed. {error}") from None
        with self._transaction():
            changes_ = self._reloader.apply(config, user)
        return {"sentence": sentence(changes_), **changes_}

    def _require_operator(self, user: str) -> None:
        if not self._core.accounts.operates(user):
            raise RequestRefused(
                "Only operators ([daemon] operators in the daemon's configuration) and the user "
                "who runs the daemon can do this."
            )

    def _restriction(self, user: str, params: Mapping[str, Any]) -> Restriction:
        self._require_operator(user)
        now = self._core.clock.now()
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
            restraint = self._leases.restraints.now
            names |= {EVERY_NODE, *restraint.drained, *restraint.excluded}
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
            self._core.audit.record(kind, sentence, node=name, by=user, **data)


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
