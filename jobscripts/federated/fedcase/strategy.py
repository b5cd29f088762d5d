"""``FedCaSe``: a Flower strategy that carries out the rounds of :mod:`fedcase.coordinator`.

One message has all clients that a node trains together. Its reply has the average of their models
and their number of samples, so that Flower's FedAvg of the replies is the average of all clients.
Decides when a node has not answered in time, and which errors mean that it is gone. The coordinator
decides everything else, from the nodes that the SuperLink lists and from the replies.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from logging import INFO, WARNING
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.message_type import MessageType
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from flwr.supercore import log

from fedcase.clients import ClientFailure, ClientResult
from fedcase.coordinator import Coordinator, NodeReport
from fedcase.rounds import NodeAttempt
from fedcase.state import StateFolder
from fedcase.training_state import TrainingState

FAILURES = {
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION,
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION,
    ErrorCode.INVALID_FAB,
    ErrorCode.CLIENT_APP_CRASHED,
}
"""Errors that count as a failed training; the others mean that the node is gone."""
POLL_S = 0.5
"""Seconds between two checks for replies and nodes."""


class FedCaSe(FedAvg):
    """FedAvg over clients that are chosen by loss, speed and cached data.

    Args:
        folder: where the state is saved after each round; its lock is held.
        coordinator: draws and places the clients; it begins at its state.
    """

    def __init__(self, folder: StateFolder, coordinator: Coordinator) -> None:
        super().__init__(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
        self._folder, self._coordinator = folder, coordinator
        self._sent: list[NodeAttempt] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a message for each node that gets drawn clients."""
        self._sent = self._coordinator.assign(sorted(grid.get_node_ids()))
        return [self._message(attempt, server_round, arrays, config) for attempt in self._sent]

    def _message(
        self, attempt: NodeAttempt, number: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> Message:
        own = ConfigRecord(dict(config))
        own["server-round"], own["attempt"] = number, attempt.number
        own["clients"] = list(attempt.clients)
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: own})
        return Message(content, dst_node_id=attempt.node, message_type=MessageType.TRAIN)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Make rounds after the saved state, until ``num_rounds`` count.

        Args:
            grid: the nodes.
            initial_arrays: the model after the last round that counts.
            num_rounds: number of the last round.
            timeout: seconds after which the clients of a node that is present but does not answer
                count as failed.
            train_config: sent with each message.
            evaluate_config: not used; clients do not evaluate.
            evaluate_fn: evaluates the model after each round, at the server.
        """
        result, arrays = Result(), initial_arrays
        for number in range(self._coordinator.state.round + 1, num_rounds + 1):
            begin = time.monotonic()
            replies = self._train(grid, number, arrays, train_config or ConfigRecord(), timeout)
            averaged, metrics = self.aggregate_train(number, replies)
            measures: MetricRecord | None = None
            if averaged is not None:
                arrays = averaged
                measures = evaluate_fn(number, arrays) if evaluate_fn else None
            state = self._coordinator.finish(
                {name: array.numpy() for name, array in arrays.items()},
                time.monotonic() - begin,
                {name: float(value) for name, value in (measures or {}).items()},  # type: ignore[arg-type]
            )
            self._folder.save(state)
            _note(result, state, metrics, measures)
        result.arrays = arrays
        return result

    def _train(
        self, grid: Grid, number: int, arrays: ArrayRecord, config: ConfigRecord, timeout: float
    ) -> list[Message]:
        """Return the replies that count, once the round is complete."""
        coordinator = self._coordinator
        round_ = coordinator.begin(list(grid.get_node_ids()))
        accepted: list[Message] = []
        awaited: dict[str, tuple[NodeAttempt, float]] = {}
        while not round_.complete:
            coordinator.keep_only(list(grid.get_node_ids()))
            messages = list(self.configure_train(number, arrays, config, grid))
            now = time.monotonic()
            for message_id, attempt in zip(grid.push_messages(messages), self._sent, strict=True):
                if message_id is None:  # the node has left meanwhile
                    coordinator.lose(attempt)
                else:
                    awaited[message_id] = attempt, now
            is_open = {attempt.number for attempt in round_.open_attempts}
            awaited = {m: one for m, one in awaited.items() if one[0].number in is_open}
            for reply in grid.pull_messages(list(awaited)) if awaited else ():
                attempt, _ = awaited.pop(reply.metadata.reply_to_message_id)
                if reply.has_error():
                    self._note_error(reply, attempt)
                else:
                    if coordinator.accept(attempt, report_of(reply)):
                        accepted.append(reply)
                    self._note_failures(attempt)
            for attempt, since in awaited.values():
                if now - since > timeout:
                    coordinator.fail(attempt, f"its node did not answer within {timeout:g} s")
                    self._note_failures(attempt)
            if not round_.complete:
                time.sleep(POLL_S)
        return accepted

    def _note_error(self, reply: Message, attempt: NodeAttempt) -> None:
        log(INFO, "Node %s, clients %s: %s", attempt.node, attempt.clients, reply.error.reason)
        if reply.error.code in FAILURES:
            words = " ".join(str(reply.error.reason).split()).rstrip(".")
            self._coordinator.fail(attempt, words or "its node gives no reason")
            self._note_failures(attempt)
        else:
            self._coordinator.lose(attempt)

    def _note_failures(self, attempt: NodeAttempt) -> None:
        for client in attempt.clients:
            if sentence := self._coordinator.failure(client):
                log(WARNING, "Node %s. %s", attempt.node, sentence)


def _note(
    result: Result,
    state: TrainingState,
    metrics: MetricRecord | None,
    measures: MetricRecord | None,
) -> None:
    last = state.rounds[-1]
    if metrics is not None:
        result.train_metrics_clientapp[last.number] = metrics
    if measures is not None:
        result.evaluate_metrics_serverapp[last.number] = measures
    log(
        INFO,
        "Round %d: %d clients in %.1f s, loss %.4f %s",
        last.number,
        len(last.clients),
        last.seconds,
        last.loss,
        last.measures,
    )


def reply_record(
    arrays: Any, results: Iterable[ClientResult], report: NodeReport, arrays_key: str = "arrays"
) -> RecordDict:
    """Return the reply of a node: its report, which :func:`report_of` reads, and the average of its
    clients. If the training of each client failed, the reply has no model.
    """
    each = list(results)
    samples = sum(one.samples for one in each)
    facts = {
        "clients": [[one.client, one.samples, one.loss, one.seconds] for one in each],
        "cached": sorted(report.cached),
        "memory": [report.used_bytes, report.memory_bytes, report.hot_bytes],
        "failures": [[failure.client, failure.reason] for failure in report.failures],
    }
    loss = sum(one.loss * one.samples for one in each) / samples if samples else 0.0
    return RecordDict(
        {
            arrays_key: ArrayRecord({name: Array(array) for name, array in arrays.items()}),
            "metrics": MetricRecord({"num-examples": samples, "train-loss": loss}),
            "node": ConfigRecord({"report": json.dumps(facts)}),
        }
    )


def report_of(reply: Message) -> NodeReport:
    """Return the report in a node's reply; one without results if it is damaged."""
    try:
        facts = json.loads(str(reply.content.config_records["node"]["report"]))
        used, memory, hot = facts["memory"]
        return NodeReport(
            tuple(
                ClientResult(int(client), int(samples), float(loss), float(seconds))
                for client, samples, loss, seconds in facts["clients"]
            ),
            frozenset(int(client) for client in facts["cached"]),
            int(used),
            int(memory),
            int(hot),
            tuple(ClientFailure(int(client), str(why)) for client, why in facts["failures"]),
        )
    except (KeyError, TypeError, ValueError):
        return NodeReport((), frozenset())
