"""Coordinates the rounds of a federated training, without a network: a state machine.

Decides which clients a round has, on which nodes they train, and how a finished round changes the
records of the clients and the ratio rule. The caller sends the messages and averages the models:

1. :meth:`Coordinator.begin` draws the clients of the next round.
2. :meth:`Coordinator.assign` assigns drawn clients to the present nodes, at the beginning and after
   each loss.
3. :meth:`Coordinator.accept`, :meth:`Coordinator.fail` and :meth:`Coordinator.keep_only` record
   results, failures and lost nodes.
4. :meth:`Coordinator.finish` returns the state after the complete round, which the caller saves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedcase.clients import ClientFailure, ClientResult, after_round
from fedcase.ratio import RatioRule, reward_of
from fedcase.rounds import ClientState, FederatedRound, NodeAttempt, RoundError
from fedcase.selection import place, select
from fedcase.training_state import RoundRecord, TrainingState


@dataclass(frozen=True)
class NodeReport:
    """What a node reports with a result."""

    results: tuple[ClientResult, ...]
    """One for each client of the attempt whose training did not fail."""
    cached: frozenset[int]
    """Clients whose hot samples are in the node's memory."""
    used_bytes: int = 0
    """Memory that hot samples take on the node, bytes."""
    memory_bytes: int = 0
    """Memory that they may take there, bytes."""
    hot_bytes: int = 0
    """Memory that the hot samples of all clients would take, bytes."""
    failures: tuple[ClientFailure, ...] = ()
    """One for each other client of the attempt."""


def filled_share(reports: Iterable[NodeReport]) -> float:
    """Return how full the caches of the nodes are, 0 to 1: the memory that hot samples use ÷ the
    memory that they could use, which is that of the nodes, but no more than all hot samples need.

    Args:
        reports: the newest one of each present node.
    """
    used = memory = hot = 0
    for report in reports:
        used, memory = used + report.used_bytes, memory + report.memory_bytes
        hot = max(hot, report.hot_bytes)
    possible = min(memory, hot)
    return min(1.0, used / possible) if possible > 0 else 0.0


class Coordinator:
    """Makes the rounds that follow a state.

    Args:
        state: the state after the last round.
        rule: the ratio rule; it is restored from the state.
        round_size: number of clients of a round.
        most_failures: number of failed trainings of a client in a round after which the client is
            dropped from the round.
    """

    def __init__(
        self, state: TrainingState, rule: RatioRule, round_size: int, most_failures: int = 3
    ) -> None:
        self.state, self._rule = state, rule
        self._round_size, self._most_failures = round_size, most_failures
        if state.rule:
            rule.restore(state.rule)
        self._newest: dict[int, NodeReport] = {}
        self._round: FederatedRound | None = None
        self._share = 0.0
        self._rule_decided = False
        """Whether the round really has the share that the rule chose, so that its reward is one of
        the rule.
        """
        self._reports: list[NodeReport] = []
        self._drawn_again = 0
        self._reasons: dict[int, str] = {}
        """Client whose training failed in this round → the newest reason."""

    @property
    def round(self) -> FederatedRound:
        """The current round.

        Raises:
            RoundError: there is none.
        """
        if self._round is None:
            raise RoundError("No round is being made. Call begin() first.")
        return self._round

    @property
    def filled(self) -> float:
        """How full the caches of the nodes are, 0 to 1 (:func:`filled_share`)."""
        return filled_share(self._newest.values())

    @property
    def cached(self) -> dict[int, frozenset[int]]:
        """Node → clients whose hot samples are in its memory."""
        return {node: report.cached for node, report in self._newest.items()}

    def begin(self, nodes: Collection[int]) -> FederatedRound:
        """Draw the clients of the next round. ``nodes``: the present ones."""
        self._forget_absent(nodes)
        self._share = self._rule.choose(self.state.random)
        records = list(self.state.records.values())
        cached = frozenset[int]().union(*self.cached.values())
        clients = select(
            records, self._round_size, self._share, self.filled, cached, self.state.random
        )
        experienced = sum(self.state.records[client].experienced for client in clients)
        self._rule_decided = experienced == round(len(clients) * self._share)
        self._round = FederatedRound(self.state.round + 1, clients, self._most_failures)
        self._reports, self._drawn_again, self._reasons = [], 0, {}
        return self._round

    def assign(self, nodes: Sequence[int]) -> list[NodeAttempt]:
        """Assign the drawn clients to the present nodes. Return an attempt for each node that gets
        clients; no attempt if there are no nodes. A client whose training failed in this round gets
        an attempt of its own: if it crashes its process again, no other client loses its training.
        """
        drawn = self.round.of(ClientState.DRAWN)
        if not drawn or not nodes:
            return []
        samples = {client: self.state.records[client].samples for client in drawn}
        load: dict[int, int] = {}
        for attempt in self.round.open_attempts:
            work = sum(self.state.records[client].samples for client in attempt.clients)
            load[attempt.node] = load.get(attempt.node, 0) + work
        clients_of: dict[tuple[int, int | None], list[int]] = {}
        for client, node in place(samples, nodes, self.cached, load).items():
            alone = client if self.round.failures(client) else None
            clients_of.setdefault((node, alone), []).append(client)
        return [self.round.send(node, clients) for (node, _), clients in clients_of.items()]

    def accept(self, attempt: NodeAttempt, report: NodeReport) -> bool:
        """Record the result of an attempt. Return whether the model in it is to be averaged. It is
        not if the attempt was given up, if the training of each client failed, or if the report
        does not name exactly the clients of the attempt, all of which then count as failed.
        """
        failed = {failure.client: failure.reason for failure in report.failures}
        reported = [*(result.client for result in report.results), *failed]
        if sorted(reported) != sorted(attempt.clients):
            self.fail(attempt, "the node's reply does not name exactly its clients")
            return False
        if not self.round.result(attempt.number, failed):
            return False
        self._reasons.update(failed)
        self._reports.append(report)
        self._newest[attempt.node] = report
        return bool(report.results)

    def fail(self, attempt: NodeAttempt, reason: str) -> None:
        """Record that an attempt ended with an error. ``reason``: why, without a full stop."""
        self._reasons.update(dict.fromkeys(attempt.clients, reason))
        self.round.fail(attempt.number)

    def failure(self, client: int) -> str:
        """Return how often the training of a client failed in this round and why, as a sentence;
        empty if it never failed, or if its last attempt succeeded.
        """
        count, state = self.round.failures(client), self.round.states[client]
        if not count or state is ClientState.AVERAGED:
            return ""
        is_dropped = state is ClientState.DROPPED
        after = "it is left out of the round" if is_dropped else "it is tried again"
        return (
            f"Round {self.round.number}: the training of client {client} failed ({count} of "
            f"{self._most_failures} times; {after}): {self._reasons[client]}."
        )

    def lose(self, attempt: NodeAttempt) -> None:
        """Note that the result of an attempt will not come, through no fault of its clients."""
        self._drawn_again += len(self.round.lose_attempt(attempt.number))

    def keep_only(self, nodes: Collection[int]) -> list[int]:
        """Record which nodes are present. Return the clients that are drawn again, because they
        were training on a node that is gone.
        """
        again: list[int] = []
        for node in {attempt.node for attempt in self.round.open_attempts} - set(nodes):
            again += self.round.lose(node)
        self._drawn_again += len(again)
        self._forget_absent(nodes)
        return again

    def finish(
        self, arrays: Mapping[str, Any], seconds: float, measures: Mapping[str, float] | None = None
    ) -> TrainingState:
        """Return the state after the complete round.

        Args:
            arrays: the averaged model.
            seconds: duration of the round, seconds.
            measures: what the task measured of the model.

        Raises:
            RoundError: the round is not complete, or no client was averaged.
        """
        if not self.round.complete:
            raise RoundError(f"Round {self.round.number} is not complete.")
        results = [result for report in self._reports for result in report.results]
        if not results:
            raise RoundError(
                f"No client of round {self.round.number} could be averaged: the training of each "
                f"failed {self._most_failures} times. The last failure of client "
                f"{max(self._reasons)}: {self._reasons[max(self._reasons)]}."
            )
        state = self.state
        loss = sum(r.loss * r.samples for r in results) / sum(r.samples for r in results)
        reward = reward_of(state.rounds[-1].loss if state.rounds else None, loss, seconds)
        if reward is not None and self._rule_decided:
            self._rule.observe(self._share, reward)
        number = self.round.number
        records = dict(state.records)
        for result in results:
            records[result.client] = after_round(records[result.client], result, number)
        record = RoundRecord(
            number,
            tuple(sorted(result.client for result in results)),
            self._share,
            loss,
            seconds,
            self._drawn_again,
            dict(measures or {}),
        )
        self._round = None
        self.state = TrainingState(
            arrays, records, self._rule.state(), state.random, [*state.rounds, record]
        )
        return self.state

    def _forget_absent(self, nodes: Iterable[int]) -> None:
        present = set(nodes)
        self._newest = {node: its for node, its in self._newest.items() if node in present}
