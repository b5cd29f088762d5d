"""The code of the ranks of ``many_ranks``: a training that reads tars with two loader workers."""

import glob
import os
import signal

import torch
import torch.distributed as dist

import malletrain
from malletrain.training.stream_sources import tar_records


def number_of(record):
    return int(record["txt"])


def run(folder, steps=None, killed_at=None):
    """Train this number of steps, or to the end of the epoch, with a snapshot after each. Each
    step's samples are appended to a log at once. Rank 2 is killed in the middle of step
    ``killed_at``.
    """
    stream = malletrain.ElasticStream(
        sorted(glob.glob(f"{folder}/*.tar")),
        tar_records,
        decode=number_of,
        global_batch_size=12,
        num_workers=2,
        max_world_size=4,
        collate_fn=torch.tensor,
    )
    snapshot = malletrain.Snapshot(f"{folder}/x.pt", every_s=0, stream=stream)
    snapshot.restore()
    rank, done = dist.get_rank(), 0
    with open(f"{folder}/rank{rank}.log", "a", buffering=1) as log:
        for _ in stream.epochs(1):
            for numbers in stream:
                if done == steps:  # the snapshot is taken: this batch was requested
                    return stream.samples, stream.epoch
                done += 1
                if done == killed_at:
                    dist.barrier()  # the snapshot of the step before is on disk
                log.write("".join(f"{number}\n" for number in numbers.tolist()))
                if done == killed_at and rank == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                dist.all_reduce(torch.ones(1))
                stream.advance()
                snapshot.step()
    return stream.samples, stream.epoch
