"""What polls of the main scheduler show besides gaps and the states of leases: whether it answers,
which leases the daemon cannot use, and which part of a host a slot is.

:class:`PollWatch` decides when a poll counts as missed. :class:`SchedulerHealth` reports it, and a
scheduler that is overloaded: metrics for Prometheus, and an event at the beginning and at the end.
:mod:`scavenger.batch.calls` decides how long the scheduler is not called.

:class:`SilentLeases` decides when a lease has run without an agent for too long, and
:func:`likely_cause` what most likely keeps the agent from reporting. :class:`Strays` are leases
that the main scheduler knows and that are not stored as active. A lease is stored before it is
submitted, so a stray has ended for the daemon: its submission failed although the main scheduler
accepted it, or a poll missed it. Its agent cannot report, and would hold its node until the time
limit. The scavenger records released leases only until the daemon restarts.

:class:`SlotPrices` keeps the prices of the site's kinds of slots, and tells the controller about
changes. A price that the site does not configure is the part of a host that a slot is. The parts
are stored, so that a daemon that starts charges its jobs as before, without waiting for its first
poll.

:mod:`malletrain.daemon.leases.reconciler` decides when to poll, and ends leases.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping
from pathlib import Path

import msgspec

from malletrain.config.units import show_duration
from malletrain.core.events import PricesChanged
from malletrain.daemon.engine.state import SiteState
from malletrain.daemon.engine.transactions import Transactions
from malletrain.daemon.site.backends import agent_program
from malletrain.daemon.site.settings import slot_prices, unpriced_slots
from malletrain.protocol.event_kinds import EventKind
from scavenger.batch.rules import USABLE
from scavenger.interface import Contact, Explanation, Lease, LeaseState


class PollWatch:
    """The polls of one daemon. Times are in seconds since the epoch.

    Args:
        timeout_s: time after which a poll counts as missed, unless the previous one took more than
            half as long as this one, seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._last_duration_s = 0.0
        self._started_at: float | None = None
        """Start of the running poll; None if no poll runs."""
        self._answered_at: float | None = None
        """Time of the last answer; None before the first."""
        self._failed = 0
        self.error = ""
        """Why the last poll failed, as a sentence; empty if it did not."""

    def began(self, now: float) -> None:
        """Record the start of a poll."""
        self._started_at = now

    def answered(self, now: float) -> None:
        """Record the answer to the running poll."""
        self._last_duration_s = now - self._started_at if self._started_at is not None else 0.0
        self._started_at, self._answered_at, self._failed, self.error = None, now, 0, ""

    def failed(self, error: str) -> None:
        """Record the failure of the running poll. ``error``: why, as a sentence."""
        self._started_at, self.error = None, error
        self._failed += 1

    def missed(self, now: float) -> int:
        """Return the number of consecutive polls without an answer, including a late one; 0 if the
        scheduler answers.
        """
        return self._failed + (self._late_s(now) > 0)

    def trouble(self, now: float) -> str:
        """Return what is wrong, as a sentence; empty if the scheduler answers."""
        if not self.missed(now):
            return ""
        late_s = self._late_s(now)
        problem = self.error or f"it has not answered for {show_duration(late_s)}."
        if self._answered_at is None:
            return f"{problem} It has not answered since the daemon's start."
        return f"{problem} Its last answer came {show_duration(now - self._answered_at)} ago."

    def _late_s(self, now: float) -> float:
        """Return for how long the running poll has taken, seconds; 0 if it is not late."""
        took_s = now - self._started_at if self._started_at is not None else 0.0
        return took_s if took_s > max(self._timeout_s, 2 * self._last_duration_s) else 0.0


class SchedulerHealth:
    """The health of one daemon's main scheduler."""

    def __init__(self, state: SiteState, transactions: Transactions) -> None:
        self._state = state
        self._transactions = transactions
        self._busy = ""

    def update(self, contact: Contact, poll_error: str) -> None:
        """Update metrics and record a change. Call it regularly.

        Args:
            contact: calls of the scheduler and pauses between them.
            poll_error: why the last poll failed, as a sentence; empty if it did not.
        """
        metrics, now = self._state.metrics, self._state.clock.now()
        metrics.scheduler_calls(contact.calls)
        for cause, remaining_s in (
            ("busy", contact.busy_s),
            ("refused", contact.refused_s),
            ("nothing", self._state.controller.gaps.backing_off_s(now)),
        ):
            metrics.scheduler_backoff(cause, remaining_s)
        starts = self._state.controller.gaps.failed_starts
        metrics.failed_starts(max((starts.in_a_row(o, now) for o in starts.owners), default=0))
        busy = contact.busy or poll_error
        if bool(busy) == bool(self._busy):
            return
        self._busy = busy
        if busy:
            problem = "has too much to do" if contact.busy else "cannot be asked"
            sentence = (
                f"The main scheduler {problem} ({busy.rstrip('.')}). It is asked more and "
                "more rarely, and for no leases, until it answers again."
            )
            self._record(EventKind.SCHEDULER_BUSY, sentence)
        else:
            sentence = "The main scheduler answers again as it should."
            self._record(EventKind.SCHEDULER_ANSWERS, sentence)

    def _record(self, kind: EventKind, sentence: str) -> None:
        with self._transactions.begin():
            self._state.audit.record(kind, sentence)


RETRY_INTERVAL_S = 30.0
"""Time after which the request to end a lease is repeated, seconds. Its end takes the grace
time.
"""


class Strays:
    """The strays of one daemon."""

    def __init__(self) -> None:
        self._requested_at: dict[str, float] = {}
        """Lease → time of the last request to end it."""

    def to_end(self, leases: Iterable[Lease], active: Container[str], now: float) -> list[Lease]:
        """Return the leases to end now.

        Args:
            leases: the leases in the answer of a poll.
            active: ids of the leases that have not ended for the daemon.
            now: time, seconds.
        """
        strays = {
            lease.id: lease
            for lease in leases
            if lease.state is not LeaseState.ENDED and lease.id not in active
        }
        self._requested_at = {
            lease: at for lease, at in self._requested_at.items() if lease in strays
        }
        due = [
            lease
            for lease in strays.values()
            if now - self._requested_at.get(lease.id, -RETRY_INTERVAL_S) >= RETRY_INTERVAL_S
        ]
        self._requested_at.update((lease.id, now) for lease in due)
        return due


_MAX_OUTPUT_BYTES = 2000
_MAX_OUTPUT_LINES = 3
"""Maximum number of bytes and lines of a lease's last output."""
_MAX_POLL_GAP_S = 60.0
"""Maximum time between two polls that is counted, seconds."""


class SilentLeases:
    """Measures for how long leases have run without an agent.

    Args:
        limit_s: maximum time without an agent, seconds.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._waited_s: dict[str, float] = {}
        self._last_poll_at: float | None = None

    def overdue(self, waiting: Iterable[str], now: float) -> list[str]:
        """Return the leases that have run without an agent for too long. Call it at every poll.

        The time of a lease starts at the first poll that finds it without an agent. It starts anew
        if an agent connected in between.

        Args:
            waiting: leases that run without an agent.
            now: time, seconds.

        """
        # In a longer pause between two polls the daemon received no messages either.
        elapsed_s = (
            0.0 if self._last_poll_at is None else min(now - self._last_poll_at, _MAX_POLL_GAP_S)
        )
        self._last_poll_at = now
        self._waited_s = {
            lease: self._waited_s[lease] + elapsed_s if lease in self._waited_s else 0.0
            for lease in waiting
        }
        return [lease for lease, waited in self._waited_s.items() if waited > self.limit_s]

    def reset_timer(self, lease: str) -> None:
        """Reset the timer of a lease. Call it after an attempt to end the lease."""
        self._waited_s[lease] = 0.0


def last_output(path: Path) -> str:
    """Return the last lines of a lease's output file; empty if there is no output here."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _MAX_OUTPUT_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return " / ".join([line for line in lines if line][-_MAX_OUTPUT_LINES:])


def node_problem(explanations: Iterable[Explanation], node: str) -> str:
    """Return the problem that the main scheduler reports of ``node``; empty if there is none."""
    rules = next((one.rules for one in explanations if one.node == node), ())
    return next((words for rule, passed, words in rules if rule == USABLE and not passed), "")


def likely_cause(
    output: str, node: str, endpoint: str, output_file: str = "", problem: str = ""
) -> str:
    """Return why an agent on ``node`` may not report, as sentences that say what to check.

    Args:
        output: last output of the lease; empty if there is none.
        node: node of the lease.
        endpoint: address at which agents reach the daemon.
        output_file: path of the lease's output in its owner's directory; empty if there is none.
        problem: problem that the main scheduler reports of the node; empty if there is none.
    """
    if problem:
        return _ended(f"The main scheduler says of {node}: {problem}")
    if output:
        return _ended(f"It said last: {output}")
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return (
        f"Two causes are likely. {node} cannot connect to {host}: check that no firewall blocks "
        f"port {port}, and that {host} resolves to this machine on the node; if not, set advertise "
        f"in [daemon]. Or {agent_program()[0]} does not start there as the owner of the lease: "
        "check that the node mounts that directory."
        + (f" What the lease printed may be in {output_file}." if output_file else "")
    )


def _ended(sentence: str) -> str:
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."


class SlotPrices:
    """The prices of slots of one daemon.

    Args:
        state: the daemon's state.
        transactions: saves what has changed.
    """

    def __init__(self, state: SiteState, transactions: Transactions) -> None:
        self._state = state
        self._transactions = transactions
        text = state.store.slot_parts()
        self._parts = msgspec.json.decode(text, type=dict[str, float]) if text else {}
        """Kind → part of a host that one slot of it has, according to the polls so far."""
        self._unknown: frozenset[str] = frozenset()
        """Kinds with an unknown price, as last reported to the controller."""
        self._polled = False
        """Whether a poll has reported these parts."""

    def restore(self) -> None:
        """Tell the controller the prices that are known. Call it before jobs and nodes are
        restored.
        """
        self._apply()

    def update(self, parts: Mapping[str, float]) -> None:
        """Store the parts that a poll tells, and tell the controller the prices if they change.

        Args:
            parts: kind → the part of a host that a slot is. A kind that is missing, because its
                hosts are down, keeps its part. One that no poll has named has no slots, and the
                price of a whole node until it has.
        """
        self._polled = True
        all_parts = {**self._parts, **parts}
        if all_parts != self._parts:
            self._parts = all_parts
            with self._transactions.begin():
                self._state.store.put_slot_parts(msgspec.json.encode(all_parts).decode())
        self._apply()

    def _apply(self) -> None:
        config = self._state.config
        prices = slot_prices(config, self._parts)
        unknown = frozenset() if self._polled else unpriced_slots(config, self._parts)
        if (prices, unknown) == (self._state.prices, self._unknown):
            return
        self._state.prices, self._unknown = prices, unknown
        with self._transactions.begin():
            self._state.events.append(PricesChanged(prices, unknown))
