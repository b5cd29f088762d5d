"""The training of benchmarks/requeue.py for Slurm alone: a checkpoint on SIGTERM. At the end of
each step the tasks agree whether one of them was signalled. Then the first one saves, and all end;
the batch script requeues the job.
"""

from __future__ import annotations

import signal

SIGNALS: list[int] = []
if __name__ == "__main__":  # before torch is imported, which takes seconds
    signal.signal(signal.SIGTERM, lambda number, _: SIGNALS.append(number))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.requeue_slurm import SlurmTraining  # noqa: E402
from benchmarks.requeue_training import arguments  # noqa: E402


def is_leaving(world: int) -> bool:
    """Return whether a task of the job was signalled. All tasks get the same answer."""
    if world == 1:
        return bool(SIGNALS)
    signalled = torch.tensor(len(SIGNALS))
    dist.all_reduce(signalled)
    return bool(signalled)


def main() -> None:
    training = SlurmTraining(arguments(__doc__))
    for _ in training.steps():
        leaving = is_leaving(training.world)
        if leaving or training.is_checkpoint_due():
            training.save(training.state())
        if leaving:
            return


if __name__ == "__main__":
    main()
