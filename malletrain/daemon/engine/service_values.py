"""What nodes are worth to services, as their processes and owners state it at run time.

A value may lapse: then the last values without such a limit apply again, so that a service whose
dispatcher has died does not hold nodes for ever. Decides when values lapse;
:mod:`malletrain.daemon.engine.unfinished_jobs` changes the bid, which is stored in the job's
specification.
"""

from __future__ import annotations

import msgspec

from malletrain.daemon.engine.state import SiteState
from malletrain.daemon.engine.transactions import Transactions
from malletrain.daemon.engine.unfinished_jobs import UnfinishedJobs
from malletrain.daemon.jobs.repository import ActiveJob
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.messages import JobSpec

MAX_SIZES_NAMED = 4
"""Maximum number of sizes that a sentence names."""


class ServiceValues:
    """The values of nodes for the services of one daemon.

    Args:
        state: the daemon's state.
        transactions: saves changes.
        jobs: changes unfinished jobs.
    """

    def __init__(self, state: SiteState, transactions: Transactions, jobs: UnfinishedJobs) -> None:
        self._state = state
        self._transactions = transactions
        self._jobs = jobs

    def set(self, run: ActiveJob, spec: JobSpec, expires_s: float | None, user: str = "") -> str:
        """Set the values of nodes for a service. Call it within a transaction.

        Args:
            run: the service.
            spec: its specification with the new values
                (:func:`malletrain.daemon.jobs.admission.valued`).
            expires_s: time after which they lapse unless they are set again, seconds; None: never.
            user: user who states them, for the audit log; empty for a process of the service.

        Returns:
            What the values are now, as a sentence.
        """
        before = run.row.values_until
        lasting = dict(run.row.lasting_values) if before is not None else run.spec.curve or {}
        if expires_s is None:
            until, lasting = None, {}
        else:
            until = self._state.clock.now() + expires_s
        changed = spec.curve != run.spec.curve
        sentence = values_sentence(spec, expires_s)
        if user and (changed or (until is None) != (before is None)):
            self._state.audit.record(
                EventKind.NODES_VALUED,
                sentence,
                job=run.row.id,
                by=user,
                values=spec.curve,
                expires_s=expires_s,
            )
        if changed:
            self._jobs.revalue(run.row.id, spec)
        if changed or until != before or lasting != run.row.lasting_values:
            self._state.repository.save(run, values_until=until, lasting_values=lasting)
        return sentence

    def expire(self, now: float) -> None:
        """Let values lapse whose time is over. Call it about every half second."""
        for run in list(self._state.runs.values()):
            until = run.row.values_until
            if until is None or now < until:
                continue
            with self._transactions.begin():
                spec = msgspec.structs.replace(run.spec, curve=dict(run.row.lasting_values))
                sentence = "They were not renewed in time. " + values_sentence(spec, None)
                self._state.audit.record(
                    EventKind.VALUES_LAPSED, sentence, job=run.row.id, values=spec.curve
                )
                self._jobs.revalue(run.row.id, spec)
                self._state.repository.save(run, values_until=None, lasting_values={})


def values_sentence(spec: JobSpec, expires_s: float | None) -> str:
    """Return what nodes are worth to a service, as sentences.

    Args:
        spec: its specification.
        expires_s: time after which the values lapse, seconds; None: never.
    """
    pairs = sorted((int(nodes), value) for nodes, value in (spec.curve or {}).items())
    if not any(value for _, value in pairs):
        sentence = "Nodes are worth nothing to the service; it gives all of them back."
    else:
        named = [f"{nodes} at {value:g}" for nodes, value in pairs]
        if len(named) > MAX_SIZES_NAMED:
            named = [*named[: MAX_SIZES_NAMED - 1], "…", named[-1]]
        sentence = f"Numbers of nodes are valued so: {', '.join(named)}."
    if expires_s is not None:
        sentence += f" The values lapse in {expires_s:g} s unless they are set again."
    return sentence
