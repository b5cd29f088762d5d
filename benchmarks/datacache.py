"""Training data in the memory of the nodes, beside other ways to read it.

    python -m benchmarks.datacache [--data FOLDER] [--samples 6000] [--nodes 1 4]
        [--fractions 0.1 0.25] [--epochs 4] [--delay-ms 5] [--mbit 1000] [--step-ms 20]
        [--churn] [--sweep] [--json FILE]

Fashion-MNIST as single files behind a server on the loopback interface, which takes ``--delay-ms``
to hand out a file and has ``--mbit`` for all clients together. Each virtual node reads its share of
every global batch (128 samples) in one process, without loader workers, and then sleeps
``--step-ms``, the rest of a step. Contenders, one after another:

* **plain**: a ``DataLoader`` over the files;
* **LRU**, **never evict**: the same with a cache in each node's process;
* **tar shards**: shards of 250 files, dealt to the nodes in each epoch, as WebDataset reads them;
* **SHADE's policy**: cached samples are drawn three times an epoch, a model of its released code;
* **DataCache**: with prefetching by the sampler's order;
* **all in memory**: the upper bound.

``samples/s`` is that of the epochs after the first. ``hits`` and ``coverage`` (the part of the data
that an epoch reads) belong together. ``from source`` is what the server hands out in an epoch,
relative to the data. ``expected``: the hits by formula: c for never-evict on one node, LRU's, and
min(1, nodes · c) for DataCache.

``--churn``: two of four nodes are killed (kill -9) and replaced every ``--every`` seconds for
``--seconds``; after that one node's service is killed within an epoch. Every sample must be read
exactly once in each epoch. ``--sweep``: 20 trials in turn on one node.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import end_in_order
from benchmarks.datacache_node import (
    BenchmarkSetting,
    Segment,
    SegmentReport,
    VirtualNode,
)
from benchmarks.datacache_source import IMAGE_BYTES, SourceServer, fashion_mnist
from benchmarks.hit_ratios import lru_hits, never_evict_hits, pooled_hits
from benchmarks.needs import existing

CONTENDERS = (
    "plain",
    "LRU",
    "never evict",
    "tar shards",
    "SHADE's policy",
    "DataCache",
    "all in memory",
)
BATCH = 128
TRIALS = 20
SHARED_MEMORY = Path("/dev/shm")


@dataclass
class Row:
    """One contender."""

    contender: str
    nodes: int
    fraction: float
    samples_per_s: float
    hits: float
    expected: float | None
    coverage: float
    from_source: float
    """Bytes of an epoch from the server, relative to the data."""
    exactly_once: bool


class VirtualJob:
    """Virtual nodes that read together."""

    def __init__(self, contender: str, nodes: int, setting: BenchmarkSetting) -> None:
        self._contender, self.setting, self._number = contender, setting, 0
        self.nodes: list[VirtualNode] = []
        self.add(nodes)

    def add(self, count: int) -> None:
        """Let nodes join."""
        joiners = []
        for _ in range(count):
            self._number += 1
            joiners.append(VirtualNode(f"n{self._number}", self._contender, self.setting))
        for node in joiners:
            node.ready()
        self.nodes += joiners
        self.announce()

    def announce(self) -> None:
        """Tell every node the members of the round."""
        addresses = {node.name: node.address for node in self.nodes}
        for node in self.nodes:
            node.announce(addresses)

    def lose(self, count: int) -> None:
        """Kill nodes."""
        for _ in range(count):
            self.nodes.pop(0).kill()
        self.announce()

    def read(self, epoch: int, position: int = 0, steps: int = 1 << 30) -> list[SegmentReport]:
        """Let all nodes read a part of an epoch."""
        for rank, node in enumerate(self.nodes):
            node.begin(Segment(epoch, position, steps, rank, len(self.nodes)))
        return [node.report() for node in self.nodes]

    def close(self) -> None:
        """Kill all nodes."""
        while self.nodes:
            self.nodes.pop().kill()


def measure(
    contender: str, nodes: int, setting: BenchmarkSetting, server: SourceServer, epochs: int
) -> Row:
    """Run one contender for some epochs."""
    job = VirtualJob(contender, nodes, setting)
    size = setting.samples * (IMAGE_BYTES + 1)
    seconds = hits = reads = 0.0
    coverage: list[float] = []
    exactly_once = True
    try:
        for epoch in range(epochs):
            if epoch == 1:
                before = server.counts().bytes
            began = time.perf_counter()
            reports = job.read(epoch)
            if epoch:
                seconds += time.perf_counter() - began
                hits += sum(report.hits for report in reports)
                reads += sum(report.reads for report in reports)
            numbers = Counter(number for report in reports for number in report.samples)
            coverage.append(len(numbers) / setting.samples)
            exactly_once &= numbers == Counter(range(setting.samples))
        read_bytes = server.counts().bytes - before
    finally:
        job.close()
    memories = [setting.fraction] * nodes
    expected = {
        "LRU": lru_hits(setting.fraction) if nodes == 1 else None,
        "never evict": never_evict_hits(setting.fraction),
        "DataCache": pooled_hits(memories, 1.0),
    }.get(contender)
    return Row(
        contender,
        nodes,
        setting.fraction,
        setting.samples * (epochs - 1) / seconds,
        hits / reads if reads else 0.0,
        expected,
        coverage[-1],
        read_bytes / size / (epochs - 1),
        exactly_once,
    )


def churn(
    setting: BenchmarkSetting, server: SourceServer, seconds: float, every_s: float
) -> dict[str, Any]:
    """Replace two of four nodes repeatedly, once at least. The memory of the nodes has room for
    all of the data.
    """
    setting = replace(setting, fraction=0.5)
    steps_of_epoch = setting.samples // BATCH
    undisturbed = measure("DataCache", 4, setting, server, 3)
    job = VirtualJob("DataCache", 4, setting)
    epoch = position = replaced = 0
    hits = reads = 0
    numbers: Counter[int] = Counter()
    wrong_epochs = 0
    try:
        job.read(0)
        epoch, began = 1, time.monotonic()
        due = began + every_s
        while time.monotonic() < began + seconds or position or not replaced:
            if time.monotonic() > due:
                job.lose(2)
                job.add(2)
                replaced += 2
                due += every_s
            steps = max(1, steps_of_epoch // 10)
            reports = job.read(epoch, position, steps)
            hits += sum(report.hits for report in reports)
            reads += sum(report.reads for report in reports)
            for report in reports:
                numbers.update(report.samples)
            position = sum(numbers.values())
            if position >= setting.samples:
                wrong_epochs += numbers != Counter(range(setting.samples))
                numbers.clear()
                epoch, position = epoch + 1, 0
        churned = hits / reads
        job.nodes[0].kill_service()  # nobody is told
        reports = job.read(epoch)
        killed = Counter(number for report in reports for number in report.samples)
        misses = sum(report.reads - report.hits for report in reports)
    finally:
        job.close()
    return {
        "seconds": seconds,
        "every_s": every_s,
        "replaced": replaced,
        "epochs": epoch - 1,
        "hits_undisturbed": undisturbed.hits,
        "hits": churned,
        "relative": churned / undisturbed.hits,
        "epochs_not_exactly_once": wrong_epochs,
        "killed_owner_exactly_once": killed == Counter(range(setting.samples)),
        "killed_owner_misses": misses / setting.samples,
    }


def sweep(setting: BenchmarkSetting, server: SourceServer) -> dict[str, Any]:
    """Trials in turn on one node, an epoch each, through one store."""
    setting = replace(setting, fraction=1.0)
    size = setting.samples * (IMAGE_BYTES + 1)
    before = server.counts().bytes
    keeper = VirtualNode("n1", "DataCache", setting)  # the lease ends, but its memory stays
    keeper.ready()
    for trial in range(TRIALS):
        node = VirtualNode("n1", "DataCache", setting)
        node.ready()
        node.begin(Segment(trial, 0, 1 << 30, 0, 1))
        node.report()
        node.end_job()
    keeper.kill()
    read_bytes = server.counts().bytes - before
    return {"trials": TRIALS, "from_source": read_bytes / (TRIALS * size)}


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    lines = [
        f"{'contender':<16}{'nodes':>6}{'memory':>8}{'samples/s':>11}{'hits':>8}{'expected':>10}"
        f"{'coverage':>10}{'from source':>13}"
    ]
    for row in rows:
        expected = "" if row.expected is None else f"{row.expected:.1%}"
        lines.append(
            f"{row.contender:<16}{row.nodes:>6}{row.fraction:>8.0%}{row.samples_per_s:>11,.0f}"
            f"{row.hits:>8.1%}{expected:>10}{row.coverage:>10.1%}{row.from_source:>13.1%}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the tables."""
    end_in_order()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data/fashion_mnist"))
    parser.add_argument("--samples", type=int, default=6000)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.1, 0.25])
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--delay-ms", type=float, default=5.0)
    parser.add_argument("--mbit", type=float, default=1000.0)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--churn", action="store_true")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--every", type=float, default=60.0)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = existing(args.data, "--data", "Fashion-MNIST's train-images-idx3-ubyte.gz")
    files = fashion_mnist(folder, args.samples)
    server = SourceServer(files, args.delay_ms / 1e3, args.mbit * 125e3)
    rows: list[Row] = []
    results: dict[str, Any] = {"load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as memory:
        setting = BenchmarkSetting(
            len(files), BATCH, args.step_ms / 1e3, 1.0, server.port, Path(memory)
        )
        try:
            if args.churn:
                results["churn"] = churn(setting, server, args.seconds, args.every)
            if args.sweep:
                results["sweep"] = sweep(setting, server)
            for nodes in args.nodes if not (args.churn or args.sweep) else ():
                for fraction in args.fractions:
                    for contender in args.contenders:
                        one = replace(setting, fraction=fraction)
                        rows.append(measure(contender, nodes, one, server, args.epochs))
                        print(table(rows[-1:]).splitlines()[-1], flush=True)
        finally:
            server.close()
    if rows:
        print(table(rows))
        results["rows"] = [asdict(row) for row in rows]
    print(json.dumps({k: v for k, v in results.items() if k != "rows"}, indent=1))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
