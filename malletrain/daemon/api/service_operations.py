"""The operations on services: their members, and what nodes are worth to them.

Decides who may value nodes: only the owner of the service. Decides also when a client that waits
for a change of the members is answered: at once if the version that it knows is not the present
one, else at the next change. For views of the job: what a start costs in plans, and whether nodes
outlast it (:mod:`malletrain.core.start_costs`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from zlib import crc32

import msgspec

from allocator import RescaleCost
from malletrain.core.events import JobState
from malletrain.core.node_values import with_next_nodes
from malletrain.core.pools import Pool
from malletrain.core.records import JobRecord
from malletrain.core.start_costs import LongLivedNodes
from malletrain.daemon.engine.state import SiteState
from malletrain.daemon.engine.transactions import Operation, OperationContext
from malletrain.daemon.engine.unfinished_jobs import ServiceValues
from malletrain.daemon.jobs.admission import RequestRefused, number, text, valued
from malletrain.daemon.jobs.repository import decode_spec
from malletrain.protocol.bounds import MAX_NODES, MAX_WORTH_SIZES
from malletrain.protocol.messages import JobSpec
from malletrain.protocol.views import MembersView, MemberView
from malletrain.store.records import JobRow

MAX_MEMBERS_WAIT_S = 60.0
"""Maximum time for which a request for members waits, seconds."""
MIN_EXPIRES_S, MAX_EXPIRES_S = 1.0, 366 * 86400.0
"""Bounds of the time after which values lapse, seconds."""


class ServiceOperations:
    """The operations on services.

    Args:
        context: finds jobs, and opens transactions.
        values: the values of nodes for services.
    """

    def __init__(self, context: OperationContext, values: ServiceValues) -> None:
        self._state, self._context = context.state, context
        self._values = values
        self.operations: dict[str, Operation] = {
            "members": self._members,
            "worth": self._worth,
        }

    async def _members(self, user: str, params: Mapping[str, Any]) -> MembersView:
        row = self._context.requested(user, params)
        if decode_spec(row.spec).mode != "service":
            raise RequestRefused(
                f"Job {row.id} is no service; its workers are not members of anything."
            )
        last_version = text(params, "since", "")
        deadline = self._state.clock.now() + number(params, "wait_s", 0.0, 0.0, MAX_MEMBERS_WAIT_S)
        while True:
            version = self._version(row)
            remaining_s = deadline - self._state.clock.now()
            if not version or version != last_version or remaining_s <= 0:
                return self._view(user, row, version)
            await self._state.member_news.more(row.id, remaining_s)

    def _version(self, row: JobRow) -> str:
        """Return a text that is different after each change of the members or of what nodes are
        worth, also over restarts of the daemon; empty if the service has ended. ``row``: its row,
        not necessarily the newest.
        """
        run = self._state.runs.get(row.id)
        if run is not None:
            generation, curve = run.rounds.generation, run.spec.curve
        else:
            newest = self._state.store.get_job(row.id) or row
            if JobState(newest.state).ended:
                return ""
            generation, curve = newest.generation, decode_spec(newest.spec).curve
        return f"{generation}-{crc32(json.dumps(curve, sort_keys=True).encode()):08x}"

    def _view(self, user: str, row: JobRow, version: str) -> MembersView:
        state, run = self._state, self._state.runs.get(row.id)
        if run is not None:
            newest, spec, generation = run.row, run.spec, run.rounds.generation
            peers, until = state.rounds.peers(run.rounds.view), run.row.values_until
        else:
            newest = state.store.get_job(row.id) or row
            spec, generation = decode_spec(newest.spec), newest.generation
            peers, until = (), None
        return MembersView(
            row.id,
            generation,
            tuple(
                MemberView(p.node, p.host, p.address, p.gone_in_s, p.loading, p.lasts_s)
                for p in peers
            ),
            state.rounds.job_key_of(row.id) if user == row.owner else "",
            version,
            newest.state,
            {int(nodes): value for nodes, value in (spec.curve or {}).items()},
            None if until is None else max(0.0, until - state.clock.now()),
        )

    async def _worth(self, user: str, params: Mapping[str, Any]) -> dict[str, str]:
        """Set what numbers of nodes are worth to a service."""
        row = self._context.requested(user, params)
        if row.owner != user:
            raise RequestRefused(
                f"Job {row.id} belongs to {row.owner}; only its owner can say what nodes are worth "
                "to it. An operator can change its weight."
            )
        run = self._state.runs.get(row.id)
        spec = decode_spec(row.spec)
        if spec.mode != "service":
            raise RequestRefused(
                f"Job {row.id} is no service; what nodes are worth to it is measured."
            )
        if JobState(row.state).ended:
            raise RequestRefused(f"Job {row.id} is {row.state} already.")
        if run is None:
            raise RequestRefused(
                f"Job {row.id} waits for other jobs; say what nodes are worth once they have "
                "completed."
            )
        spec = valued(run.spec, self._stated(run.spec, row.id, params))
        expires_s = None
        if params.get("expires_s") is not None:
            expires_s = number(params, "expires_s", 0.0, -math.inf, math.inf)
            if not MIN_EXPIRES_S <= expires_s <= MAX_EXPIRES_S:
                raise RequestRefused(
                    f"Values lapse after {MIN_EXPIRES_S:g} s at least and a year at most, not "
                    f"after {expires_s:g} s.",
                    "usage",
                )
        with self._context.transaction():
            sentence = self._values.set(run, spec, expires_s, user)
        return {"sentence": f"Job {row.id} ({row.name}): {sentence}"}

    def _stated(self, spec: JobSpec, job: str, params: Mapping[str, Any]) -> dict[int, float]:
        """Return the values that a request states. Raises RequestRefused."""
        if ("values" in params) == ("next_each" in params):
            raise RequestRefused(
                "Say either what numbers of nodes are worth, or what each of the next nodes is "
                "worth.",
                "usage",
            )
        if "values" in params:
            values = msgspec.convert(params["values"], dict[int, float])
            if not 1 <= len(values) <= MAX_WORTH_SIZES:
                raise RequestRefused(
                    f"The values name {len(values)} sizes; name 1 to {MAX_WORTH_SIZES}.", "usage"
                )
            return values
        each = number(params, "next_each", 0.0, -math.inf, math.inf)
        count = number(params, "next_count", 1, -math.inf, math.inf)
        if each < 0:
            raise RequestRefused(f"A node is worth 0 or more, not {each:g}.", "usage")
        if not (float(count).is_integer() and 1 <= count <= MAX_NODES):
            raise RequestRefused(
                f"The number of the next nodes is 1 to {MAX_NODES:,}, not {count:g}.", "usage"
            )
        present = len(self._state.controller.jobs[job].nodes)
        return with_next_nodes(spec.curve, present, each, int(count))


def nodes_outlast_start(state: SiteState, job: JobRecord) -> bool:
    """Return whether enough of the present nodes outlast a start of a job; True for a job that
    states no start cost.
    """
    spec = job.submitted
    if job.start is None:
        return True

    def may_use(pool: Pool) -> bool:
        return pool.owner == spec.owner and pool.is_of_class(spec.node_class)

    lasting = LongLivedNodes(state.controller.state.usable)
    return lasting.suffice(job.start, job.nodes, job.smallest, may_use)


def plan_pauses(state: SiteState, job_id: str) -> RescaleCost | None:
    """Return the pauses with which plans count for an unfinished service or farm; None for other
    jobs.
    """
    job, run = state.controller.jobs.get(job_id), state.runs.get(job_id)
    if job is None or run is None or run.spec.trains or job.cost is None:
        return None
    if job.start is None:
        return job.cost
    nodes = state.controller.nodes
    node_class = next((nodes[n].pool.node_class for n in job.nodes if n in nodes), "default")
    return replace(job.cost, start_s=job.start.expected_s(node_class))
