"""The training of benchmarks/peers.py under Ray Train with torchft's replica groups: the driver and
its loop.

One worker is one replica group, with the loop of train_peers_torchft.py. The number of workers is
fixed: a Ray Train whose number of workers changes restarts all of them (Ray 2.60). When a worker is
lost, the others train on, and Ray starts another one as soon as a node has room. Connects to the
cluster named by RAY_ADDRESS; a node of it has one ``slot``.
"""

from __future__ import annotations

from typing import Any

from benchmarks.peers_training import arguments
from benchmarks.train_peers_torchft import train


def loop(settings: dict[str, Any]) -> None:
    """Train on every worker."""
    train(settings["folder"], settings["mb"], settings["step_s"], lambda: False)


def main() -> None:
    args = arguments(__doc__)
    # here, so that --help works without Ray
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.train.v2.torch.torchft_config import TorchftConfig

    ray.init(log_to_driver=True)
    TorchTrainer(
        loop,
        train_loop_config={"mb": args.mb, "step_s": args.step_s, "folder": args.folder},
        scaling_config=ScalingConfig(num_workers=args.max_ranks, resources_per_worker={"slot": 1}),
        # the times of the contender torchft
        torch_config=TorchftConfig(
            {
                "min_replicas": 1,
                "heartbeat_timeout_ms": 500,
                "join_timeout_ms": 1000,
                "quorum_tick_ms": 50,
            },
            backend="gloo",
            timeout_s=60,
        ),
        run_config=RunConfig(
            storage_path=args.checkpoint, failure_config=FailureConfig(max_failures=-1)
        ),
    ).fit()


if __name__ == "__main__":
    main()
