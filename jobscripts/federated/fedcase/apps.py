"""The two Flower apps: ``server`` runs the rounds, ``client`` trains the clients of a node."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedcase.clients import ClientResult
from fedcase.coordinator import Coordinator, NodeReport
from fedcase.local_training import LocalOptions, train_clients
from fedcase.node_cache import NodeCache
from fedcase.options import TrainingOptions
from fedcase.rules import create_rule
from fedcase.state import StateFolder
from fedcase.strategy import FedCaSe, reply_record
from fedcase.task import Task, load_task
from fedcase.training_state import new_state

server = ServerApp()
client = ClientApp()


@server.main()  # type: ignore[untyped-decorator]
def serve(grid: Grid, context: Context) -> None:
    """Run rounds until the number of rounds in the options count."""
    options = TrainingOptions.read(Path(str(context.run_config["options"])))
    rule = create_rule(options.rule)
    task = load_task(options.task, options.task_options)
    with StateFolder(Path(options.folder)) as folder:
        state = folder.load()
        if state is None:
            counts = list(task.sample_counts())
            state = new_state(task.initial_arrays(), counts, Random(options.seed))
            folder.save(state)
        coordinator = Coordinator(state, rule, options.clients)

        def measure(_number: int, arrays: ArrayRecord) -> MetricRecord:
            return MetricRecord(
                dict(task.evaluate({name: array.numpy() for name, array in arrays.items()}))
            )

        FedCaSe(folder, coordinator).start(
            grid,
            ArrayRecord({name: Array(array) for name, array in state.arrays.items()}),
            options.rounds,
            options.answer_s,
            ConfigRecord({"options": json.dumps(options.for_clients())}),
            evaluate_fn=measure,
        )


@client.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    """Train the clients of a message in turn."""
    config = message.content.config_records["config"]
    options = TrainingOptions(**json.loads(str(config["options"])))
    task = _task(options.task, options.task_options)
    counts = task.sample_counts()
    memory = NodeCache(options.name, options.cache_bytes, options.cache_share)
    arrays = {
        name: array.numpy() for name, array in message.content.array_records["arrays"].items()
    }
    numbers: Any = config["clients"]
    result = train_clients(
        task,
        arrays,
        [int(number) for number in numbers],
        int(config["server-round"]),  # type: ignore[arg-type]
        memory,
        LocalOptions(options.epochs, options.cold_share, options.seed),
    )
    report = NodeReport(
        result.results,
        memory.cached(),
        memory.used(),
        memory.memory,
        _hot_bytes(task, counts, options.cache_share, result.results) if memory.memory else 0,
        result.failures,
    )
    print(f"{result.reads.hits} reads from memory, {result.reads.source_reads} from the source")
    return Message(reply_record(result.arrays, result.results, report), reply_to=message)


def _hot_bytes(task: Task, counts: Any, share: float, results: Sequence[ClientResult]) -> int:
    """Return an estimate of the memory that the hot samples of all clients need, bytes. It is
    computed from the size of one sample of a client that has just trained; 0 if none has.
    """
    if not results:
        return 0
    sample = len(pickle.dumps(task.dataset(results[0].client)[0]))
    return int(sample * sum(round(count * share) for count in counts))


@cache
def _task(name: str, options: str) -> Task:
    return load_task(name, options)
