"""The scavenger of the embedded cluster: the client of :mod:`scavenger.embedded.cluster`.

Every virtual node that the cluster shows as idle is a gap, because its main scheduler has no queue.
This module decides nothing about leases.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from scavenger.batch.slots import parts_of_hosts
from scavenger.embedded.layout import (
    FORMAT_VERSION,
    Layout,
    cluster_alive,
    read_json,
    request_name,
    write_json,
)
from scavenger.horizon import GapWatch, SurvivalEstimator
from scavenger.interface import (
    Contact,
    Explanation,
    Gap,
    Lease,
    LeaseRequest,
    LeaseState,
    PollResult,
    SchedulerError,
    host_of,
    kind_of,
)

ANSWER_TIMEOUT_S = 60.0
SILENT_S = 30.0
"""Maximum age of the cluster's state, seconds. A running cluster writes it every few seconds; with
an older state it counts as not answering.
"""


class LocalScavenger:
    """A connection to the embedded cluster. There can be several, in any process.

    Args:
        directory: directory of the cluster's files.
        timeout_s: time limit of an answer, seconds.
        estimator: learns from the gaps in :meth:`poll` and gives each gap its horizon; None:
            horizons are unknown.
        silent_s: age of the cluster's state from which the cluster counts as silent, seconds.
    """

    name = "local"

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        timeout_s: float = ANSWER_TIMEOUT_S,
        estimator: SurvivalEstimator | None = None,
        silent_s: float = SILENT_S,
    ) -> None:
        self.layout = Layout(Path(directory).resolve())
        self.silent_s = silent_s
        self.timeout_s = timeout_s
        self._watch = None if estimator is None else GapWatch(estimator)

    def poll(self) -> PollResult:
        """Return the present gaps and leases. Raises SchedulerError if no cluster runs in the
        directory or it does not answer.
        """
        state = self.state()
        age_s = time.time() - float(state["time"])
        if age_s > self.silent_s:
            raise SchedulerError(
                f"The embedded cluster in {self.layout.root} (process {state['pid']}) has not "
                f"written its state for {age_s:.0f} s: it stands still, or its disk is full; see "
                f"{self.layout.log}."
            )
        nodes = state["nodes"]
        now = float(state["time"])
        watch = self._watch
        if watch is not None:
            watch.update(
                {
                    name: float(n["idle_since"])
                    for name, n in nodes.items()
                    if n["idle_since"] is not None
                },
                now,
            )
        return PollResult(
            time=now,
            gaps=tuple(
                Gap(
                    name,
                    float(n["idle_since"]),
                    None if watch is None else watch.horizon(float(n["idle_since"]), now),
                    kind_of(name) or "default",
                    host_of(name) if kind_of(name) else None,
                )
                for name, n in nodes.items()
                if n["state"] == "idle"
            ),
            leases=tuple(_lease(lease_id, record) for lease_id, record in state["leases"].items()),
            total_nodes=len(nodes),
            kind_parts=parts_of_hosts(nodes),
            idle_nodes=sum(n["idle_since"] is not None for n in nodes.values()),
            explanations=tuple(
                Explanation(
                    name,
                    n["state"],
                    n["state"] == "idle",
                    (
                        (
                            "idle",
                            n["state"] == "idle",
                            _sentence(name, n),
                        ),
                    ),
                )
                for name, n in nodes.items()
            ),
        )

    def know(
        self, leases: Mapping[str, str], nodes: Mapping[str, str], jobs: Mapping[str, str]
    ) -> None:
        """Do nothing: all leases belong to one user."""

    def take(self, requests: Sequence[LeaseRequest]) -> list[Lease]:
        """Start leases. A refused one (its node is no longer idle) is returned as ENDED, with the
        reason.
        """
        if not requests:
            return []
        answer = self._ask(
            {
                "kind": "take",
                "requests": [
                    {
                        "id": r.id,
                        "node": r.node,
                        "argv": list(r.argv),
                        "env": dict(r.env),
                        "duration_s": r.duration_s,
                    }
                    for r in requests
                ],
            }
        )
        return [_lease(record["id"], record) for record in answer["leases"]]

    def give_back(self, leases: Sequence[Lease]) -> None:
        """Ask the leases to leave (SIGTERM, SIGKILL after the grace time). Return before they have
        left.
        """
        if leases:
            self._ask({"kind": "release", "leases": [lease.id for lease in leases]})

    def contact(self) -> Contact:
        """Return an empty condition: the cluster is MalleTrain's own and needs no limits."""
        return Contact()

    def check(self) -> list[tuple[bool | None, str]]:
        """Return whether a cluster runs in the directory and answers."""
        try:
            state = self.state()
        except SchedulerError as error:
            return [(False, str(error))]
        age = time.time() - float(state["time"])
        size = describe_size(state["nodes"])
        findings: list[tuple[bool | None, str]] = [
            (
                True,
                f"An embedded cluster of {size} runs in {self.layout.root} (process "
                f"{state['pid']}).",
            )
        ]
        try:
            self._ask({"kind": "release", "leases": []})
            findings.append((True, f"It answers requests; its state is {age:.1f} s old."))
        except SchedulerError as error:
            findings.append((False, str(error)))
        grace = float(state["grace_s"])
        findings.append(
            (
                grace >= 1.0,
                f"Preempted leases have {grace:g} s to leave"
                + (
                    "."
                    if grace >= 1.0
                    else ", too short for a snapshot: start the cluster with a longer --grace."
                ),
            )
        )
        return findings

    def options(self) -> dict[str, Any]:
        """Return the cluster's options: ``nodes``, ``trace``, ``speedup``, ``grace``,
        ``notice_fraction``, ``seed``; for a cluster of an earlier version only the two that it
        reports. Raises SchedulerError if no cluster runs in the directory.
        """
        state = self.state()
        defaults = {"nodes": len(state["nodes"]), "grace": float(state["grace_s"])}
        return dict(state.get("options", defaults))

    def totals(self) -> dict[str, float]:
        """Return the cluster's own counts: node-seconds offered, leased and used in grace time,
        leases, preemptions, orphans.
        """
        return {k: float(v) for k, v in self.state(must_run=False)["totals"].items()}

    def state(self, must_run: bool = True) -> dict[str, Any]:
        """Return the state that the cluster last wrote (cluster.json). Raises SchedulerError if
        there is none, or if no cluster runs and ``must_run``.
        """
        try:
            state = read_json(self.layout.state)
        except (OSError, ValueError) as error:
            raise SchedulerError(
                f"The state of the embedded cluster in {self.layout.root} cannot be read: {error}."
            ) from None
        if state is None:
            raise SchedulerError(
                f"No embedded cluster has run in {self.layout.root}. {self._how_to_start()}"
            )
        if not isinstance(state, dict) or state.get("format") != FORMAT_VERSION:
            raise SchedulerError(
                f"{self.layout.state} was not written by this version of the embedded cluster. "
                f"{self._how_to_start()}"
            )
        if must_run and not cluster_alive(state):
            condition = (
                "was stopped"
                if state["state"] == "stopped"
                else f"is gone (process {state['pid']})"
            )
            raise SchedulerError(
                f"The embedded cluster in {self.layout.root} {condition}. {self._how_to_start()}"
            )
        return state

    def _how_to_start(self) -> str:
        return f"Start it with: python -m scavenger.embedded --dir {self.layout.root} --nodes 6"

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.state()
        name = request_name()
        try:
            write_json(self.layout.spool / name, {"format": FORMAT_VERSION, **request})
        except OSError as error:
            raise SchedulerError(
                f"A request to the cluster in {self.layout.root} could not be written: {error}."
            ) from None
        path = self.layout.answers / name
        deadline = time.monotonic() + self.timeout_s
        while True:
            answer = read_json(path)
            if answer is not None:
                path.unlink(missing_ok=True)
                break
            if time.monotonic() > deadline:
                # Withdraw the request, so that it is not executed after the caller got an error.
                (self.layout.spool / name).unlink(missing_ok=True)
                self.state()
                raise SchedulerError(
                    f"The cluster in {self.layout.root} gave no answer within "
                    f"{self.timeout_s:g} s; see {self.layout.log}."
                )
            time.sleep(0.01)
        if not answer["ok"]:
            raise SchedulerError(f"The embedded cluster refused: {answer['error']}")
        return dict(answer)


def describe_size(nodes: Collection[str]) -> str:
    """Return ``6 nodes``, or ``2 nodes with 8 slots``.

    Args:
        nodes: names of the nodes and slots of a cluster.
    """
    hosts = {host_of(name) for name in nodes}
    slots = sum(bool(kind_of(name)) for name in nodes)
    size = f"{len(hosts)} node{'s' if len(hosts) != 1 else ''}"
    return f"{size} with {slots} slots" if slots else size


def _sentence(name: str, record: Mapping[str, Any]) -> str:
    sentences = _SLOT_SENTENCES if kind_of(name) else _SENTENCES
    return sentences[record["state"]].format(
        lease=record["lease"], explanation=record.get("explanation", "")
    )


_SLOT_SENTENCES = {
    "idle": "its host is {explanation}",
    "busy": "the slot is in use or does not fit beside what is in use on its host: {explanation}",
    "leased": "MalleTrain holds the slot with lease {lease}",
}
_SENTENCES = {
    "idle": "the main scheduler does not use the node",
    "busy": "the main scheduler uses the node, or is clearing it",
    "leased": "MalleTrain holds the node with lease {lease}",
}


def _lease(lease_id: str, record: dict[str, Any]) -> Lease:
    pid = record.get("pid") or 0
    return Lease(
        lease_id,
        str(pid) if pid else "",
        LeaseState(record["state"]),
        record["node"],
        record["reason"],
        record.get("gone_at") if record["state"] == "running" else None,
    )
