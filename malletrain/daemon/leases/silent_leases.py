"""Detects leases that the daemon cannot use: running without a message from their agents, or known
to the main scheduler and not stored as active.

Decides when a lease has run without an agent for too long, and what most likely keeps its agent
from reporting; :mod:`malletrain.daemon.leases.actions` ends it.

A lease is stored before it is submitted, so one that is not stored as running has ended for the
daemon: its submission failed although the main scheduler accepted it, or a poll missed it. Its
agent cannot report, and would hold its node until the time limit. The scavenger records released
leases only until the daemon restarts. Decides which of these to end now;
:mod:`malletrain.daemon.leases.reconciler` ends them.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from pathlib import Path

from malletrain.daemon.site.backends import agent_program
from scavenger.batch.rules import USABLE
from scavenger.interface import Explanation, Lease, LeaseState

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
