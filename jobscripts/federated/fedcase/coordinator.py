"""The rounds of a federated training, without a network. Pure but for the state that it holds.

Decides which clients a round has, on which nodes they train, and what a finished round means for
the records of the clients and the ratio rule. The caller sends and averages:

1. :meth:`Coordinator.begin` draws the clients of the next round.
2. :meth:`Coordinator.assign` gives drawn clients to the present nodes, at the beginning and after
   each loss.
3. :meth:`Coordinator.accept`, :meth:`Coordinator.fail` and :meth:`Coordinator.keep_only` note
   results, failures and lost nodes.
4. :meth:`Coordinator.finish` makes the state of the complete round, which the caller saves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedcase.clients import ClientFailure, ClientResult, after_round
from fedcase.placement import place
from fedcase.ratio import RatioRule, reward_of
from fedcase.rounds import ClientState, FederatedRound, NodeAttempt, RoundError
from fedcase.selection import select
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
    """Return which part of the hot samples that could be in memory is there, 0 to 1. ``reports``:
    the newest one of each present node.
    """
    used = memory = hot = 0
    for report in reports:
        used, memory = used + report.used_bytes, memory + report.memory_bytes
        hot = max(hot, report.hot_bytes)
    possible = min(memory, hot)
    return min(1.0, used / possible) if possible > 0 else 0.0


class Coordinator:
    """Makes rounds from a state on.

    Args:
        state: the state after the last round.
        rule: the ratio rule; it is restored from the state.
        round_size: number of clients of a round.
        most_failures: failed trainings of a client in a round after which it is dropped.
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
        """Whether the round has the share that the rule chose."""
        self._reports: list[NodeReport] = []
        self._drawn_again = 0
        self._reasons: dict[int, str] = {}
        """Client whose training failed in this round → the newest reason."""

    @property
    def round(self) -> FederatedRound:
        """The round that is being made.

        Raises:
            RoundError: none is.
        """
        if self._round is None:
            raise RoundError("No round is being made. Call begin() first.")
        return self._round

    @property
    def filled(self) -> float:
        """Which part of the hot samples that could be in the nodes' memory is there, 0 to 1."""
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
        """Give the drawn clients to the present nodes. Returns an attempt for each node that gets
        some; without nodes, none. A client whose training failed in this round gets an attempt of
        its own: if it ends its process, it ends no other training.
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
        """Note the result of an attempt. Returns whether clients of it are to be averaged. None are
        if the attempt was given up, if the training of each failed, or if the result is not that
        of exactly its clients, which then count as failed.
        """
        failed = {failure.client: failure.reason for failure in report.failures}
        reported = [*(result.client for result in report.results), *failed]
        if sorted(reported) != sorted(attempt.clients):
            self.fail(attempt, "the node's reply is not that of its clients")
            return False
        if not self.round.result(attempt.number, failed):
            return False
        self._reasons.update(failed)
        self._reports.append(report)
        self._newest[attempt.node] = report
        return bool(report.results)

    def fail(self, attempt: NodeAttempt, reason: str) -> None:
        """Note that an attempt ended with an error. ``reason``: why, as words."""
        self._reasons.update(dict.fromkeys(attempt.clients, reason))
        self.round.fail(attempt.number)

    def failure(self, client: int) -> str:
        """Return how often the training of a client failed in this round and why, as a sentence;
        empty if it did not, or not at its last attempt.
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
        """Note which nodes are present. Returns the clients that are drawn again, because they
        trained on others.
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
