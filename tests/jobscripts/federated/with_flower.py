"""``FedCaSe`` with Flower's own messages and nodes in memory. Run by test_strategy.py with the
Python that has Flower; prints what happened as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

import numpy as np
from fedcase import strategy
from fedcase.clients import ClientFailure, ClientResult
from fedcase.coordinator import Coordinator, NodeReport
from fedcase.ratio import EpsilonGreedy
from fedcase.state import StateFolder
from fedcase.strategy import FedCaSe, reply_record
from fedcase.training_state import new_state
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord
from flwr.common.constant import ErrorCode
from flwr.supercore.task_identity import TaskIdentity

strategy.POLL_S = 0.0
TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1


class Nodes:
    """Nodes that answer at the next look, but for those that do as ``script`` says, one word a
    message: ``leave`` (the node is gone, and answers late), ``crash``, ``refuse``, ``raise`` (the
    training of the first client raises), ``raise-all``.
    """

    def __init__(self, script):
        self.script, self.present, self.sent, self.replies = script, {11, 12}, [], {}
        self.late = []

    def get_node_ids(self):
        return list(self.present)

    def push_messages(self, messages):
        names = []
        for message in messages:
            word = self.script.pop(0) if self.script else ""
            names.append(None if word == "refuse" else f"m{len(self.sent)}")
            clients = list(message.content["config"]["clients"])
            self.sent.append([message.metadata.dst_node_id, clients, word])
            if word == "refuse":
                continue
            message.metadata.__dict__["_message_id"] = names[-1]
            if word == "leave":
                self.present.discard(message.metadata.dst_node_id)
                self.present.add(message.metadata.dst_node_id + 10)
                self.late.append(names[-1])
            if word == "crash":
                error = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "it raised")
                self.replies[names[-1]] = Message(error, reply_to=message)
            else:
                self.replies[names[-1]] = Message(
                    self._trained(message, clients, word), reply_to=message
                )
        return names

    def pull_messages(self, names):
        late, self.late = self.late, []
        return [self.replies.pop(name) for name in names if name in self.replies.keys() - late]

    @staticmethod
    def _trained(message, clients, word):
        arrays = message.content["arrays"]
        failed = clients if word == "raise-all" else clients[: word == "raise"]
        failures = tuple(ClientFailure(client, "ValueError: no labels") for client in failed)
        clients = [client for client in clients if client not in failed]
        results = tuple(ClientResult(client, client + 1, 2.0, 1.0) for client in clients)
        # A client adds its number: the average shows who was averaged with which weight.
        total = sum(r.samples for r in results)
        report = NodeReport(results, frozenset(clients), 1, 2, 3, failures)
        if not results:
            return reply_record({}, results, report)
        step = sum(r.client * r.samples for r in results) / total
        after = {name: array.numpy() + step for name, array in arrays.items()}
        return reply_record(after, results, report)


def main(folder, rounds, script):
    with StateFolder(Path(folder)) as state_folder:
        state = state_folder.load()
        if state is None:
            state = new_state({"w": np.zeros(2)}, list(range(1, 9)), Random(3))
            state_folder.save(state)
        nodes = Nodes(script)
        result = FedCaSe(state_folder, Coordinator(state, EpsilonGreedy(), 4)).start(
            nodes,
            ArrayRecord({name: Array(np.asarray(a)) for name, a in state.arrays.items()}),
            rounds,
            evaluate_fn=lambda number, arrays: MetricRecord({"w": float(arrays["w"].numpy()[0])}),
        )
        after = state_folder.load()
    print(
        json.dumps(
            {
                "sent": nodes.sent,
                "rounds": [[r.number, r.clients, r.drawn_again, r.measures] for r in after.rounds],
                "model": after.arrays["w"].tolist(),
                "result": result.arrays["w"].numpy().tolist(),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
