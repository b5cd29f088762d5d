"""Leases that run without a message from their agents.

Decides when such a lease has run in vain for too long, and what most likely keeps its agent from
reporting. :mod:`malletrain.daemon.lease_actions` ends it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from malletrain.daemon.agent_python import agent_program
from scavenger.batch.rules import USABLE
from scavenger.interface import Explanation

_KEPT_BYTES = 2000
_KEPT_LINES = 3
_LONGEST_PAUSE_S = 60.0


class Unheard:
    """Since when which lease has run without an agent.

    Args:
        limit_s: how long it may, in seconds.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._waited: dict[str, float] = {}
        self._looked: float | None = None

    def overdue(self, waiting: Iterable[str], now: float) -> list[str]:
        """Those of the leases that run without an agent, ``waiting``, that have done so for too
        long. To be called at every poll: the time counts from when a lease was first seen so, and
        anew when its agent was there meanwhile.
        """
        # In a longer pause between two polls it was the daemon that did not listen.
        since = 0.0 if self._looked is None else min(now - self._looked, _LONGEST_PAUSE_S)
        self._looked = now
        self._waited = {
            lease: self._waited[lease] + since if lease in self._waited else 0.0
            for lease in waiting
        }
        return [lease for lease, waited in self._waited.items() if waited > self.limit_s]

    def anew(self, lease: str) -> None:
        """Something was done about the lease: its time counts from now."""
        self._waited[lease] = 0.0


def last_words(folder: Path, lease: str) -> str:
    """The last lines that the lease printed, where they are kept here; empty: there are none."""
    try:
        with (folder / f"{lease}.out").open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _KEPT_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return " / ".join([line for line in lines if line][-_KEPT_LINES:])


def trouble_of(explanations: Iterable[Explanation], node: str) -> str:
    """What the main scheduler says is wrong with ``node``; empty when it says nothing."""
    rules = next((one.rules for one in explanations if one.node == node), ())
    return next((words for rule, passed, words in rules if rule == USABLE and not passed), "")


def likely_cause(
    words: str, node: str, endpoint: str, output_file: str = "", trouble: str = ""
) -> str:
    """Why an agent on ``node`` may not report, as sentences that say what to look at.

    Args:
        trouble: what the main scheduler says is wrong with the node; empty: nothing.
        words: the last that the lease printed; empty: nothing is known.
        endpoint: where agents are told to reach the daemon.
        output_file: where the owner of the lease finds what it printed; empty: nowhere.
    """
    if trouble:
        return f"The main scheduler says of {node}: {trouble}."
    if words:
        return f"It said last: {words}"
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return (
        f"Either {node} cannot connect to {host} (see whether a firewall keeps it from port "
        f"{port}, and whether {host} means this machine there; else set advertise in [daemon]), or "
        f"{agent_program()[0]} does not start there for the owner of the lease (see whether the "
        "node shares that directory)."
        + (f" What the lease printed may be in {output_file}." if output_file else "")
    )
