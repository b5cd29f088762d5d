"""Whether ``auto`` finds the best layout of a node: processes, threads and loader workers.

    python -m benchmarks.layout [--models perceptron convolution unet] [--repeats 3] [--seconds 12]
        [--data FOLDER] [--old] [--json FILE]

On an embedded cluster of one node, for each model (``benchmarks/train_layout.py``) and repeat:

* **exhaustive**: a job in each layout that the search can try, with given numbers, for
  ``--seconds`` after its start-up; its own steps say how many samples/s it processes;
* **auto**: a job with ``auto`` for all three. Its search is timed by the daemon, and ends with a
  layout.

``chosen/best`` is the throughput of that layout in the exhaustive table (the median over all
repeats), relative to the best there (target: 0.95); ``chosen/default`` the same relative to the
default (target: 0.98); ``search_s`` the duration of the search (target: 60 s), and
``search/default`` the samples that the job processed in it, relative to a job in the default
layout.

``--old``: four processes with OMP_NUM_THREADS=1, which was the default for several processes,
beside the number of threads that they have now. They differ from six cores on.

Other load on the machine changes the figures; it is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.needs import existing
from benchmarks.train_layout import MODELS
from jpa.layout import LayoutRequest, NodeLayout, candidates, default_layout
from malletrain.launch.cores import allowed_cores
from malletrain.protocol.payloads import TUNABLE
from tests.integration.embedded import Site, site

SCRIPT = Path(__file__).with_name("train_layout.py")
WARMUP_S = 3.0
"""Time after the first step that is not counted, seconds."""
PRELOADED = {"unet": "diffusers.models.unets.unet_2d"}
"""Modules that a node imports once for all processes, by model."""


@dataclass
class Repeat:
    """One exhaustive table and one search."""

    model: str
    repeat: int
    rates: dict[str, float] = field(default_factory=dict)
    """Layout → samples/s, by the job's own steps."""
    default: str = ""
    chosen: str = ""
    search_s: float = 0.0
    search_samples: float = 0.0
    """Samples that the job processed until the end of the search, from its first sample on."""
    reason: str = ""

    def figures(self, rates: dict[str, float]) -> dict[str, float]:
        """The figures of the table that is printed. ``rates``: median samples/s of each layout over
        all repeats.
        """
        chosen, usual = rates[self.chosen], rates[self.default]
        return {
            "chosen/best": chosen / max(rates.values()),
            "chosen/default": chosen / usual,
            "search_s": self.search_s,
            "search/default": self.search_samples / (usual * self.search_s),
        }


class Trainings:
    """Jobs of one model on a site of one node."""

    def __init__(self, embedded: Site, model: str, data: str, seconds: float) -> None:
        self._site, self._model, self._data, self._seconds = embedded, model, data, seconds
        self._enough = embedded.work / "enough"

    def submit(self, repeat: str, **options: object) -> str:
        """Submit a job; return its id."""
        self._enough.unlink(missing_ok=True)
        env = {"MALLETRAIN_PRELOAD": PRELOADED.get(self._model, ""), **options.pop("env", {})}
        arguments = (self._model, self._data, repeat)
        return self._site.submit(SCRIPT, *arguments, profile=False, env=env, **options)

    def end(self, job: str) -> None:
        """End the job."""
        self._enough.touch()
        state = self._site.until_state(job, "completed", "failed").state
        assert state == "completed", self._site.show(job).failure

    def steps(self, job: str, generation: int) -> list[tuple[float, float]]:
        """(time, samples) of each step of a round."""
        path = self._site.work / f"steps-{job}-{generation}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(float(a), float(b)) for a, b in (line.split() for line in lines[:-1])]

    def rate(self, **options: object) -> float:
        """Samples/s of a job with given numbers, after its warm-up."""
        job = self.submit("-", **options)
        needed_s = WARMUP_S + self._seconds

        def is_over() -> bool:
            steps = self.steps(job, 1)
            return len(steps) > 2 and steps[-1][0] - steps[0][0] >= needed_s

        self._site.until(is_over, f"{job} has trained for {needed_s:g} s")
        steps = self.steps(job, 1)
        self.end(job)
        counted = [step for step in steps if step[0] - steps[0][0] >= WARMUP_S]
        return (counted[-1][1] - counted[0][1]) / (counted[-1][0] - counted[0][0])

    def search(self, repeat: Repeat) -> None:
        """Let a job find its layout."""
        job = self.submit(f"{repeat.repeat}-{time.time()}", tuned=TUNABLE, nproc_per_node=0)
        self._site.until(lambda: self._site.events("layout-found", job), "the search ends")
        [event] = self._site.events("layout-found", job)
        repeat.search_samples = self._site.job(job).samples
        repeat.chosen = str(NodeLayout(**event.data["layout"]))
        repeat.search_s, repeat.reason = event.data["seconds"], event.sentence
        self.end(job)


def run(trainings: Trainings, model: str, number: int) -> Repeat:
    """One exhaustive table and one search."""
    request = LayoutRequest(tunes_processes=True, tunes_threads=True, tunes_loaders=True)
    cores = allowed_cores()
    repeat = Repeat(model, number, default=str(default_layout(cores, 0, request)))
    for layout in candidates(cores, 0, request):
        repeat.rates[str(layout)] = trainings.rate(
            nproc_per_node=layout.processes,
            threads=layout.threads,
            loader_workers=layout.loader_workers,
        )
    trainings.search(repeat)
    return repeat


def medians(repeats: list[Repeat]) -> dict[str, float]:
    """Return the median samples/s of each layout over the repeats."""
    names = repeats[0].rates
    return {name: statistics.median(repeat.rates[name] for repeat in repeats) for name in names}


def print_table(repeats: list[Repeat]) -> None:
    """Print the exhaustive table of a model, and what the searches chose."""
    print(f"\n{repeats[0].model} (median of {len(repeats)})")
    chosen, rates = [repeat.chosen for repeat in repeats], medians(repeats)
    for name, rate in rates.items():
        words = [f"chosen {chosen.count(name)} of {len(chosen)}"] if name in chosen else []
        words += ["default"] if name == repeats[0].default else []
        low, high = min(r.rates[name] for r in repeats), max(r.rates[name] for r in repeats)
        print(f"  {name:46} {rate:8.4g} ({low:.4g} to {high:.4g}) samples/s  {', '.join(words)}")
    for repeat in repeats:
        shown = (f"{name} {value:.3g}" for name, value in repeat.figures(rates).items())
        print(f"  repeat {repeat.repeat}: {repeat.chosen}; {', '.join(shown)}")


def old_threads(trainings: Trainings, model: str) -> dict[str, float]:
    """Samples/s of four processes with one thread each, and with the default number."""
    one = trainings.rate(nproc_per_node=4, env={"OMP_NUM_THREADS": "1"})
    usual = trainings.rate(nproc_per_node=4)
    threads = max(1, allowed_cores() // 4)
    print(f"\n{model}, four processes: 1 thread {one:.4g}, {threads} threads {usual:.4g} samples/s")
    return {"one thread": one, "default": usual}


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layout", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST")
    parser.add_argument("--old", action="store_true", help="also four processes of one thread")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    data = (
        "-"
        if options.data is None
        else str(existing(options.data, "--data", "Fashion-MNIST").resolve())
    )
    print(f"{allowed_cores()} cores, load {os.getloadavg()[0]:.2f}", flush=True)
    results: list[dict[str, Any]] = []
    old: dict[str, dict[str, float]] = {}
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder, site(Path(folder), nodes=1) as embedded:
            trainings = Trainings(embedded, model, data, options.seconds)
            repeats = [run(trainings, model, number) for number in range(options.repeats)]
            print_table(repeats)
            if options.old:
                old[model] = old_threads(trainings, model)
        rates = medians(repeats)
        results += [{**asdict(each), "figures": each.figures(rates)} for each in repeats]
    if options.json:
        record = {
            "cores": allowed_cores(),
            "repeats": results,
            "four_processes": old,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
