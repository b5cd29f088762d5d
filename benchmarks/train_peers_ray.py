"""The training of benchmarks/peers.py under Ray Train's elastic mode: the driver and its loop.

Written after Ray's own examples: checkpoints by ``report``, one more when a node is told to leave,
unlimited failures. Connects to the cluster named by RAY_ADDRESS; a node of it has one ``slot``.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import torch

from benchmarks.peers_training import Log, arguments, loss_of, network, share

LOOK_EVERY = 5
"""Number of steps between two checks for a notice, which all ranks make together."""


def loop(settings: dict[str, Any]) -> None:
    """Train on every worker."""
    import ray.train
    import ray.train.torch

    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    model, optimizer = network(settings["mb"])
    step = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    net = ray.train.torch.prepare_model(model)
    log = Log(settings["folder"])
    saved, notified = torch.tensor([time.monotonic()]), False

    def save() -> None:
        with tempfile.TemporaryDirectory() as folder:
            made = None
            if rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "step": step}, os.path.join(folder, "state.pt"))
                made = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"step": step}, checkpoint=made)

    while True:
        step += 1
        samples = share(step, rank, world)
        log.draw(step, world, rank, samples)
        optimizer.zero_grad()
        loss_of(net, samples).backward()
        time.sleep(settings["step_s"])
        optimizer.step()
        log.done(step, world, rank)
        if step % LOOK_EVERY:
            continue
        due = torch.tensor([float(time.monotonic() - saved.item() >= settings["every_s"])])
        if world > 1:
            torch.distributed.broadcast(due, 0)
        leaving = ray.train.get_preemption_info() is not None
        if due.item() or (leaving and not notified):
            save()
            saved.fill_(time.monotonic())
            notified = notified or leaving


def main() -> None:
    args = arguments(__doc__)
    # here, so that --help works without Ray
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(log_to_driver=True)
    TorchTrainer(
        loop,
        train_loop_config={
            "mb": args.mb,
            "step_s": args.step_s,
            "every_s": args.checkpoint_every_s,
            "folder": args.folder,
        },
        scaling_config=ScalingConfig(
            num_workers=(1, args.max_ranks),
            elastic_resize_monitor_interval_s=1.0,
            resources_per_worker={"slot": 1},
        ),
        torch_config=TorchConfig(backend="gloo", timeout_s=60),
        run_config=RunConfig(
            storage_path=args.checkpoint,
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


if __name__ == "__main__":
    main()
