"""Live mode: trainings with malletrain.elastic."""

from __future__ import annotations

import torch
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import malletrain
from malletrain import elastic
from tests.zoo.scripts.parts import (
    BATCH,
    EPOCHS,
    SAMPLES,
    Numbered,
    append,
    evaluate,
    make_model,
    rate,
)
from tests.zoo.trace import Trace


def epoch_scheduler(trace: Trace) -> None:
    """StepLR on all ranks and an evaluation by rank 0, once an epoch."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    sampler = malletrain.ElasticSampler(SAMPLES, global_batch_size=BATCH)
    loader = DataLoader(Numbered(), batch_sampler=sampler)
    run = elastic.Run(
        snapshot="run.pt",
        snapshot_every_s=trace.save_every_s,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        sampler=sampler,
    )
    net = run.ddp(model)
    for epoch in sampler.epochs(EPOCHS):
        for x, y, numbers in run.batches(loader):
            key = (epoch, sampler.position)
            with run.step() as step:
                optimizer.zero_grad()
                loss = mse_loss(net(x), y) * run.loss_weight
                loss.backward()
                optimizer.step()
            if not step.aborted:
                trace.step(key, numbers, rate(optimizer))
        trace.point(f"tail of {epoch}")
        scheduler.step()
        trace.note("scheduler", epoch, lr=rate(optimizer))
        if run.rank == 0:
            trace.note("evaluation", epoch, loss=evaluate(model))
            append("log.csv", f"{epoch},{evaluate(model):.8f}")
    run.save()
    trace.point("saved")
    trace.finish(model)
