"""A sweep by Ray Tune: ASHA under its ResourceChangingScheduler, on a cluster of raylets that come
and go with the trace. Run by the interpreter of Ray's own environment, with a file that says what
to do; prints what it came to as JSON.

Kind to Ray: a trial on several nodes is one process that sleeps as long as so many workers would,
with no communication between them. Checkpoints every five seconds; a trial whose node is taken goes
on from its newest one, as often as it takes.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

CHECKPOINT_S = 5.0
BATCH = 128


def loop(config: dict[str, Any]) -> None:
    """One trial, on as many nodes as Tune says."""
    import ray.tune

    from malletrain import ElasticSampler

    plan = config["plan"]
    lr, hidden = plan["values"][config["trial"]]["lr"], plan["values"][config["trial"]]["hidden"]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    example = runpy.run_path(plan["example"])
    train, test = example["load_digits"]()
    model = nn.Sequential(
        nn.Linear(64, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    sampler = ElasticSampler(len(train), global_batch_size=BATCH, seed=0)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "sampler": sampler}
    if checkpoint := ray.tune.get_checkpoint():
        with checkpoint.as_directory() as folder:
            for name, state in torch.load(Path(folder) / "state.pt").items():
                parts[name].load_state_dict(state)
    nodes = len(ray.tune.get_context().get_trial_resources().bundles)
    counted = Path(plan["folder"]) / f"samples-{os.getpid()}-{time.time_ns()}"
    samples, saved = 0, time.monotonic()
    for epoch in sampler.epochs(plan["epochs"]):
        for images, labels in DataLoader(train, batch_sampler=sampler):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            time.sleep(plan["sample_delay"] * len(labels) / nodes)
            sampler.advance()
            samples += len(labels)
            counted.write_text(str(samples))
        report = {"accuracy": float(example["accuracy"](model, test)), "epoch": epoch + 1}
        if time.monotonic() - saved < CHECKPOINT_S:
            ray.tune.report(report)
            continue
        with tempfile.TemporaryDirectory() as folder:
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save(state, Path(folder) / "state.pt")
            ray.tune.report(report, checkpoint=ray.tune.Checkpoint.from_directory(folder))
        saved = time.monotonic()


class Raylets:
    """Exactly the idle nodes of the trace have a raylet. Ray starts them in a main thread only."""

    def __init__(self, cluster: Any, plan: dict[str, Any]) -> None:
        self._cluster, self._plan = cluster, plan
        self._running: dict[int, tuple[Any, float]] = {}
        self.used_s = 0.0
        self.began = time.monotonic()

    def follow(self, over: threading.Event) -> float:
        """Follow the trace until the sweep is over; when it was, seconds."""
        while not over.wait(0.1):
            now = time.monotonic() - self.began
            idle = {n for n, start, end in self._plan["intervals"] if start <= now < end}
            if now >= self._plan["duration_s"]:
                idle = set(range(self._plan["nodes"]))
            for node in self._running.keys() - idle:
                raylet, since = self._running.pop(node)
                self._cluster.remove_node(raylet, allow_graceful=False)
                self.used_s += now - since
            for node in idle - self._running.keys():
                raylet = self._cluster.add_node(
                    wait=False, num_cpus=1, object_store_memory=80 * 2**20
                )
                self._running[node] = (raylet, now)

        now = time.monotonic() - self.began
        self.used_s += sum(now - since for _, since in self._running.values())
        return now


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("plan", type=Path, help="JSON, written by benchmarks/sweep_ray.py")
    plan = json.loads(parser.parse_args().plan.read_text())
    os.environ |= {"TUNE_DISABLE_SIGINT_HANDLER": "1", "RAY_raylet_start_wait_time_s": "120"}
    # Here, because --help works without Ray.
    import ray
    import ray.tune
    from ray.cluster_utils import Cluster
    from ray.tune.schedulers import ASHAScheduler, ResourceChangingScheduler
    from ray.tune.schedulers.resource_changing_scheduler import DistributeResources

    head = {"num_cpus": 0, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, log_to_driver=False)
    raylets = Raylets(cluster, plan)
    asha = ASHAScheduler(
        time_attr="epoch", grace_period=1, reduction_factor=3, max_t=plan["epochs"]
    )
    tuner = ray.tune.Tuner(
        ray.tune.with_resources(loop, ray.tune.PlacementGroupFactory([{"CPU": 1}])),
        param_space={
            "trial": ray.tune.grid_search(list(range(len(plan["values"])))),
            "plan": plan,
        },
        tune_config=ray.tune.TuneConfig(
            metric="accuracy",
            mode="max",
            scheduler=ResourceChangingScheduler(asha, DistributeResources(add_bundles=True)),
        ),
        run_config=ray.tune.RunConfig(
            storage_path=plan["folder"],
            failure_config=ray.tune.FailureConfig(max_failures=-1),
            verbose=0,
        ),
    )
    over = threading.Event()
    outcomes: list[Any] = []

    def search() -> None:
        try:
            outcomes.append(tuner.fit())
        finally:
            over.set()

    threading.Thread(target=search, daemon=True).start()
    try:
        wall = raylets.follow(over)
    finally:
        ray.shutdown()  # first: the head is not taken from under a driver
        cluster.shutdown()
    (row,) = outcomes
    epochs = [result.metrics.get("epoch", 0) for result in row]
    whole = [r.metrics["accuracy"] for r in row if r.metrics.get("epoch") == plan["epochs"]]
    counted = Path(plan["folder"]).glob("samples-*")
    outcome = {
        "wall_s": wall,
        "best": max(whole, default=0.0),
        "trials": {"complete": len(whole), "pruned": len(epochs) - len(whole)},
        "steps": sum(epochs),
        "processed": sum(float(file.read_text() or 0) for file in counted),
        "used_s": raylets.used_s,
    }
    Path(plan["outcome"]).write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
