"""The code of the workers of test_script_end.py: a live training, and the code that writes its
results after it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import malletrain.elastic as elastic
from malletrain import ElasticSampler
from tests.malletrain.elastic.scripts import data

STEPS, EPOCHS, BATCH = 4, 2, 16


def train(folder: str, waits: dict[int, str]) -> None:
    """Train, then write ``result-RANK`` on each rank. ``waits``: by rank, a file for which it waits
    after the first half of its result.
    """
    home = Path(folder)
    set_ = data(STEPS * BATCH)
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = ElasticSampler(len(set_), global_batch_size=BATCH, seed=5)
    run = elastic.Run(
        snapshot=str(home / "run.pt"),
        snapshot_every_s=0.0,
        model=model,
        optimizer=optimizer,
        sampler=sampler,
    )
    net = run.ddp(model)
    for _ in sampler.epochs(EPOCHS):
        for x, y, _numbers in run.batches(DataLoader(set_, batch_sampler=sampler)):
            with run.step():
                optimizer.zero_grad()
                (((net(x) - y) ** 2).mean() * run.loss_weight).backward()
                optimizer.step()
    with (home / f"result-{run.rank}").open("w") as file:
        file.write("first\n")
        file.flush()
        if run.rank in waits:
            while not (home / waits[run.rank]).exists():
                time.sleep(0.005)
        file.write("second\n")
    (home / f"wrote-{os.getpid()}").touch()
