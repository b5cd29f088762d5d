"""Federated rounds on virtual nodes: FedCaSe beside FedAvg and Oort.

    python -m benchmarks.federated [--data FOLDER] [--clients 200] [--round 20] [--nodes 4]
        [--targets 0.7 0.75 0.8] [--rounds 150] [--cache 0.1] [--samples-per-s 2000] [--seed 0]
        [--contenders NAME ...] [--json FILE]

Fashion-MNIST, dealt to the clients by a Dirichlet distribution (0.3); a perceptron with one hidden
layer. Each virtual node is a thread with memory of its own and a source that delivers
``--samples-per-s``; all nodes together have memory for ``--cache`` of the samples. The same clients
train with the same data in the same way. Flower's messages and processes are not part of it, so
that only selection and memory differ. Contenders, one after another:

* **FedAvg + LRU**: clients are drawn uniformly; a client always trains on the same node;
* **FedAvg + never evict**: the same, with a memory that keeps the samples that were read first;
* **Oort + LRU**: clients by utility;
* **FedCaSe**: clients by loss, speed and memory; hot samples in ``malletrain.DataCache``; an epoch
  reads them and 30 % of the others; ε-greedy chooses the ratio of experienced clients and novices;
* **FedCaSe, forest**: the same, but a random forest chooses the ratio. Its fits are part of the
  seconds.

For each of ``--targets`` the table has the rounds and the seconds until the accuracy on the test
images, as a mean of three rounds, has reached it, and the ratio of the seconds to those of the
first contender. A contender ends with the last target, or after ``--rounds``. Seconds are those of
the rounds, measured, without the tests of the model. ``hits`` is the share of reads from memory.
``decile`` is the mean accuracy of the tenth of the clients on whose own samples the last model is
worst.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from fedcase.clients import after_round
from fedcase.coordinator import Coordinator, NodeReport
from fedcase.local_training import LocalOptions, NodeMemory, NodeResult, train_clients
from fedcase.node_cache import NodeCache, ReadAccount
from fedcase.ratio import RULES
from fedcase.task import Arrays, FashionMnist
from fedcase.training_state import new_state

from benchmarks.federated_contenders import Chooser, Oort, SampleMemory, Uniform
from benchmarks.needs import existing, package
from malletrain.protocol import env

RULE_OF = {"FedCaSe": "epsilon-greedy", "FedCaSe, forest": "forest"}
"""Contender with the product's selection → its ratio rule."""
CONTENDERS = ("FedAvg + LRU", "FedAvg + never evict", "Oort + LRU", *RULE_OF)
DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "fashion_mnist"
COLD_SHARE = 0.3
MEAN_OF = 3
"""Rounds over which the accuracy is averaged."""
DEBT_S = 0.004
"""Minimum delay for which a source sleeps, seconds, so that the clock's resolution does not matter.
"""


@dataclass(frozen=True)
class FederatedSetting:
    """One run of the benchmark."""

    round_size: int
    nodes: int
    targets: tuple[float, ...]
    rounds: int
    cache: float
    samples_per_s: float
    seed: int


@dataclass
class FederatedRow:
    """One contender."""

    contender: str
    reached: list[tuple[float, int, float]]
    """Target → rounds and seconds after which it was reached."""
    rounds: int
    seconds: float
    accuracy: float
    hits: float
    source_reads: int
    worst_decile: float


class SlowSource:
    """The task of one node, whose samples come at a limited rate."""

    def __init__(self, task: FashionMnist, samples_per_s: float) -> None:
        self._task, self._pause_s, self._debt_s = task, 1.0 / samples_per_s, 0.0
        self.sample_counts, self.initial_arrays = task.sample_counts, task.initial_arrays
        self.train, self.evaluate = task.train, task.evaluate

    def dataset(self, client: int) -> Any:
        """Return the samples of a client behind the source."""
        return _SlowSamples(self, self._task.dataset(client))

    def wait(self) -> None:
        """Wait for the time of one sample."""
        self._debt_s += self._pause_s
        if self._debt_s > DEBT_S:
            begin = time.perf_counter()
            time.sleep(self._debt_s)
            self._debt_s -= time.perf_counter() - begin


class _SlowSamples:
    def __init__(self, source: SlowSource, samples: Any) -> None:
        self._source, self._samples = source, samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, sample: int) -> Any:
        self._source.wait()
        return self._samples[sample]


class VirtualNodes:
    """Threads that train clients at the same time, each with its own source and memory."""

    def __init__(
        self, task: FashionMnist, memories: Sequence[NodeMemory], setting: FederatedSetting
    ) -> None:
        self._sources = [SlowSource(task, setting.samples_per_s) for _ in memories]
        self.memories = memories
        self._pool = ThreadPoolExecutor(len(memories))

    def train(
        self, arrays: Arrays, clients_of: dict[int, list[int]], number: int, options: LocalOptions
    ) -> dict[int, NodeResult]:
        """Return the result of each node that has clients."""
        futures = {
            node: self._pool.submit(
                train_clients,
                self._sources[node],
                arrays,
                clients,
                number,
                self.memories[node],
                options,
            )
            for node, clients in clients_of.items()
            if clients
        }
        results = {node: future.result() for node, future in futures.items()}
        for failure in (failure for result in results.values() for failure in result.failures):
            raise RuntimeError(f"The training of client {failure.client} failed: {failure.reason}.")
        return results

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def average(results: Sequence[NodeResult]) -> dict[str, Any]:
    """Return the average of the nodes by their numbers of samples, as in FedAvg."""
    weights = [sum(one.samples for one in result.results) for result in results]
    return {
        name: np.average(
            [np.asarray(result.arrays[name]) for result in results], axis=0, weights=weights
        ).astype(np.float32)
        for name in results[0].arrays
    }


class _Course:
    """The progress of a contender."""

    def __init__(self, contender: str, task: FashionMnist, setting: FederatedSetting) -> None:
        self._contender, self._task, self._setting = contender, task, setting
        self._seconds, self._accuracies = 0.0, [0.0] * MEAN_OF
        self._reached: list[tuple[float, int, float]] = []
        self._reads = ReadAccount()
        self._arrays: Arrays = {}

    @property
    def over(self) -> bool:
        """Whether all targets are reached or the rounds are over."""
        done = self._rounds >= self._setting.rounds
        return done or len(self._reached) == len(self._setting.targets)

    @property
    def _rounds(self) -> int:
        return len(self._accuracies) - MEAN_OF

    @property
    def _accuracy(self) -> float:
        return sum(self._accuracies[-MEAN_OF:]) / MEAN_OF

    def add(self, arrays: Arrays, seconds: float, results: Sequence[NodeResult]) -> None:
        """Record a round."""
        self._arrays = arrays
        self._seconds += seconds
        for result in results:
            self._reads.add(result.reads)
        self._accuracies.append(self._task.evaluate(arrays)["accuracy"])
        for target in sorted(self._setting.targets)[len(self._reached) :]:
            if self._accuracy >= target:
                self._reached.append((target, self._rounds, self._seconds))

    def row(self) -> FederatedRow:
        """Return the row of the table."""
        each = sorted(self._task.accuracy_of_clients(self._arrays))
        reads = self._reads.hits + self._reads.source_reads
        return FederatedRow(
            self._contender,
            self._reached,
            self._rounds,
            self._seconds,
            self._accuracy,
            self._reads.hits / reads if reads else 0.0,
            self._reads.source_reads,
            float(np.mean(each[: max(1, len(each) // 10)])),
        )


def run_chooser(
    contender: str, chooser: Chooser, evict: bool, task: FashionMnist, setting: FederatedSetting
) -> FederatedRow:
    """Run FedAvg or Oort. A client trains on the same node each time."""
    total = sum(task.sample_counts())
    capacity = int(total * setting.cache / setting.nodes)
    nodes = VirtualNodes(
        task, [SampleMemory(capacity, evict) for _ in range(setting.nodes)], setting
    )
    random = Random(setting.seed)
    state = new_state(task.initial_arrays(), task.sample_counts(), random)
    records, arrays = dict(state.records), state.arrays
    options = LocalOptions(seed=setting.seed)
    course, number = _Course(contender, task, setting), 0
    while not course.over:
        number += 1
        clients = chooser.choose(list(records.values()), setting.round_size, number, random)
        clients_of: dict[int, list[int]] = {}
        for client in clients:
            clients_of.setdefault(client % setting.nodes, []).append(client)
        begin = time.perf_counter()
        results = list(nodes.train(arrays, clients_of, number, options).values())
        arrays = average(results)
        course.add(arrays, time.perf_counter() - begin, results)
        for result in results:
            for one in result.results:
                records[one.client] = after_round(records[one.client], one, number)
    nodes.close()
    return course.row()


def run_fedcase(
    contender: str, task: FashionMnist, setting: FederatedSetting, folder: Path
) -> FederatedRow:
    """Run FedCaSe with the contender's ratio rule, and the samples of all nodes in ``folder``."""
    total = sum(task.sample_counts())
    sample_bytes = len(pickle.dumps(task.dataset(0)[0]))
    memory = int(total * setting.cache / setting.nodes * (sample_bytes + 256))
    memories = [
        NodeCache(f"n{node}", memory, setting.cache, folder / f"n{node}")
        for node in range(setting.nodes)
    ]
    hot_bytes = int(total * setting.cache * sample_bytes)
    nodes = VirtualNodes(task, memories, setting)
    state = new_state(task.initial_arrays(), task.sample_counts(), Random(setting.seed))
    coordinator = Coordinator(state, RULES[RULE_OF[contender]](), setting.round_size)
    options = LocalOptions(cold_share=COLD_SHARE, seed=setting.seed)
    course, present = _Course(contender, task, setting), range(setting.nodes)
    while not course.over:
        begin = time.perf_counter()
        number = coordinator.begin(present).number
        attempts = {attempt.node: attempt for attempt in coordinator.assign(present)}
        clients_of = {node: list(attempt.clients) for node, attempt in attempts.items()}
        results = nodes.train(coordinator.state.arrays, clients_of, number, options)
        for node, result in results.items():
            own = memories[node]
            report = NodeReport(result.results, own.cached(), own.used(), memory, hot_bytes)
            coordinator.accept(attempts[node], report)
        seconds = time.perf_counter() - begin
        state = coordinator.finish(average(list(results.values())), seconds)
        course.add(state.arrays, time.perf_counter() - begin, list(results.values()))
    nodes.close()
    return course.row()


def run(contender: str, task: FashionMnist, setting: FederatedSetting) -> FederatedRow:
    """Run one contender."""
    if contender == "Oort + LRU":
        return run_chooser(contender, Oort(), True, task, setting)
    if contender not in RULE_OF:
        return run_chooser(contender, Uniform(), contender.endswith("LRU"), task, setting)
    folder = Path(tempfile.mkdtemp(prefix="federated-", dir="/dev/shm"))
    before = os.environ.get(env.DATA)
    os.environ[env.DATA] = str(folder)
    try:
        return run_fedcase(contender, task, setting, folder)
    finally:
        os.environ.pop(env.DATA)
        if before is not None:
            os.environ[env.DATA] = before
        shutil.rmtree(folder)


def show(rows: Sequence[FederatedRow]) -> str:
    """Return the table, with ratios of times to those of the first contender."""
    targets = [target for target, _, _ in max(rows, key=lambda row: len(row.reached)).reached]
    head = "".join(f"{f'to {target:g}: rounds, s, ratio':>28}" for target in targets)
    lines = [f"{'contender':22}{head}{'rounds':>8}{'accuracy':>10}{'hits':>8}{'decile':>8}"]
    first = {target: seconds for target, _, seconds in rows[0].reached}
    for row in rows:
        own = {target: (rounds, seconds) for target, rounds, seconds in row.reached}
        cells = ""
        for target in targets:
            rounds, seconds = own.get(target, (0, 0.0))
            ratio = f"{seconds / first[target]:.2f}" if target in first else "-"
            cells += f"{f'{rounds}, {seconds:.1f}, {ratio}' if rounds else 'not reached':>28}"
        lines.append(
            f"{row.contender:22}{cells}{row.rounds:>8}{row.accuracy:>10.3f}{row.hits:>8.1%}"
            f"{row.worst_decile:>8.3f}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the contenders and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.federated",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--round", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--targets", type=float, nargs="+", default=(0.7, 0.75, 0.8))
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--cache", type=float, default=0.1)
    parser.add_argument("--samples-per-s", type=float, default=2000.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    folder = existing(options.data, "--data", "Fashion-MNIST (the four .gz files)")
    if "FedCaSe, forest" in options.contenders:
        package("sklearn.ensemble")  # a second of imports that is not part of a round
    task = FashionMnist(str(folder), options.clients, seed=options.seed)
    setting = FederatedSetting(
        options.round,
        options.nodes,
        tuple(options.targets),
        options.rounds,
        options.cache,
        options.samples_per_s,
        options.seed,
    )
    # Each virtual node is one thread; more threads in one node would wait for each other.
    from threadpoolctl import threadpool_limits

    rows = []
    for contender in options.contenders:
        with threadpool_limits(1):
            rows.append(run(contender, task, setting))
        print(json.dumps(asdict(rows[-1])), file=sys.stderr, flush=True)
    print(show(rows))
    if options.json:
        content = {"setting": asdict(setting), "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
