"""Turns a request for a node into the specification of a lease, or refuses it.

Decides the time limit and the environment of a lease, and which leases share a job. Pauses requests
while the main scheduler takes leases back (:class:`PreemptionHold`). Asks no scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

from scavenger.batch.groups import MAX_LEASES_PER_JOB, packs
from scavenger.batch.lease_ledger import LeaseLedger
from scavenger.batch.poll_result import PollConclusions, SiteT
from scavenger.batch.rules import why_not
from scavenger.batch.settings import BatchSettings, OptionsT
from scavenger.batch.slots import CPUS, MEMORY_MB
from scavenger.batch.submission import LeaseSpec
from scavenger.interface import Lease, LeaseRequest, LeaseState, SchedulerError, host_of

HOLD_RANGE_S = (3.0, 15.0)
"""Minimum and maximum pause after a sign of a preemption, seconds. Between them, it is one
scheduling cycle.
"""


class PreemptionHold:
    """Remembers when the main scheduler last took a lease back."""

    def __init__(self) -> None:
        self._at = float("-inf")

    def note(self, now: float) -> None:
        """Note that the main scheduler takes a lease back at ``now``."""
        self._at = now

    def reason(self, hold_s: float, now: float) -> str:
        """Return why no lease may be requested at ``now``; empty if leases may be."""
        since = now - self._at
        return (
            f"the main scheduler took leases back {since:.0f} s ago and may need more nodes"
            if 0 <= since < hold_s
            else ""
        )


def hold_for(cycle_s: float) -> float:
    """Return the pause in seconds if the site configures none."""
    return min(max(cycle_s, HOLD_RANGE_S[0]), HOLD_RANGE_S[1])


def lease_spec(
    request: LeaseRequest,
    view: PollConclusions[SiteT],
    settings: BatchSettings[OptionsT],
    ledger: LeaseLedger,
    step_s: float,
    grace_s: float,
    max_length: tuple[float | None, str] = (None, ""),
) -> LeaseSpec:
    """Return the specification of the lease for a request.

    Args:
        request: the daemon's request.
        view: the poll on which the request is decided.
        settings: settings of the site.
        ledger: the leases.
        step_s: time limits are multiples of this, seconds.
        grace_s: grace time of a preempted lease, seconds.
        max_length: (maximum length of a job where leases run, seconds, or None; what sets it).

    Raises:
        SchedulerError: the lease may not be requested now.
    """
    s, now = settings, view.time
    facts = view.answer.facts.get(request.node)
    if facts is None:
        raise SchedulerError(f"{ledger.scheduler} knows no node {request.node}")
    if reason := why_not(facts, view.rules, view.choice, now):
        raise SchedulerError(f"{request.node} is no longer a gap: {reason}")
    max_length_s, limited_by = max_length
    if max_length_s is not None and max_length_s < min(s.min_length_s, s.time_limit_s):
        raise SchedulerError(
            f"{ledger.scheduler} takes jobs of {max_length_s:g} s at most where leases run "
            f"({limited_by}), and the shortest lease has {s.min_length_s:g} s"
        )
    free_s = None if facts.free_until is None else facts.free_until - now - s.spare_s
    time_limits = free_s, s.rules.hours.remaining_s(now), request.duration_s, max_length_s
    limit_s = s.limit_s(request.id, step_s, *time_limits)
    if limit_s is None:
        raise SchedulerError(f"the gap of {request.node} is too short for a lease by now")
    if reason := ledger.refusal(ledger.user_of(request.id), now):
        raise SchedulerError(reason)
    env = {
        **request.env,
        "MALLETRAIN_LEASE": request.id,
        "MALLETRAIN_NODE": request.node,
        "MALLETRAIN_NODE_CLASS": s.class_of(facts),
        "MALLETRAIN_GRACE_S": f"{grace_s:g}",
    }
    slot = s.slot_kind(facts.kind)
    if slot is not None:
        # The batch script learns its host from the scheduler.
        env["MALLETRAIN_SLOT"] = request.node.removeprefix(f"{host_of(request.node)}/")
        env["MALLETRAIN_SLOT_CPUS"] = str(slot.amounts[CPUS])
        env["MALLETRAIN_SLOT_MEMORY_MB"] = str(slot.amounts[MEMORY_MB])
        if slot.whole_host:  # the batch script sees the GPUs of the host
            env["MALLETRAIN_GPUS"] = str(slot.devices)
    # The files in output_dir belong to this process's user.
    output = (
        s.output_dir / f"{request.id}.out"
        if s.output_dir is not None and request.owner is None
        else None
    )
    return LeaseSpec(
        s.prefix + request.id,
        request.node,
        request.argv,
        env,
        limit_s,
        grace_s,
        output,
        keep_at_home=s.output_dir is not None and output is None,
        lease=request.id,
        owner=request.owner,
        slot=slot,
    )


def refused(lease: str, node: str, reason: str) -> Lease:
    """Return the result for a refused request.

    Args:
        lease: id of the lease.
        node: name of its node.
        reason: words without a full stop.
    """
    return Lease(lease, "", LeaseState.ENDED, node, reason)


def not_yet(pack: Sequence[LeaseSpec], error: SchedulerError) -> list[Lease]:
    """Return the results for leases that are not requested now."""
    return [Lease(spec.lease, "", LeaseState.NOT_YET, spec.node, str(error)) for spec in pack]


def packed(specs: Sequence[LeaseSpec], max_leases: int) -> list[list[LeaseSpec]]:
    """Return which leases share a job: at most ``max_leases`` of one owner and one class of nodes,
    and all slots of a host whose kind has whole hosts.
    """
    whole = [spec for spec in specs if spec.has_whole_host]
    pack_by_host: dict[str, list[LeaseSpec]] = {}
    for pack in _packs(whole, MAX_LEASES_PER_JOB):  # several if their names are too long for one
        pack_by_host.setdefault(pack[0].host, pack)
    others = [spec for spec in specs if not spec.has_whole_host]
    return [*_packs(others, max_leases), *pack_by_host.values()]


def _packs(specs: Sequence[LeaseSpec], max_leases: int) -> list[list[LeaseSpec]]:
    return packs(
        specs,
        max_leases,
        lambda spec: spec.lease,
        lambda spec: (
            spec.owner,
            spec.env["MALLETRAIN_NODE_CLASS"],
            spec.host if spec.has_whole_host else "",
        ),
        lambda spec: spec.limit_s,
    )
