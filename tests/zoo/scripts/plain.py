"""Restart mode: ordinary DistributedDataParallel trainings with schedules and evaluations."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import (
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)
from torch.utils.data import DataLoader

import malletrain
from tests.zoo.scripts.parts import (
    BATCH,
    EPOCHS,
    SAMPLES,
    Numbered,
    append,
    evaluate,
    evaluate_together,
    make_model,
    rate,
)
from tests.zoo.trace import Trace


def epoch_scheduler(trace: Trace) -> None:
    """StepLR and an evaluation by rank 0, once an epoch."""
    dist.init_process_group("gloo")
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    sampler = malletrain.ElasticSampler(SAMPLES, global_batch_size=BATCH)
    loader = DataLoader(Numbered(), batch_sampler=sampler)
    snapshot = malletrain.Snapshot(
        "run.pt",
        every_s=trace.save_every_s,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        sampler=sampler,
    )
    snapshot.restore()
    net = DistributedDataParallel(model)
    for epoch in sampler.epochs(EPOCHS):
        for x, y, numbers in loader:
            optimizer.zero_grad()
            loss = mse_loss(net(x), y) * sampler.loss_weight
            loss.backward()
            optimizer.step()
            trace.step((epoch, sampler.position), numbers, rate(optimizer))
            sampler.advance()
            malletrain.report(len(x))
            snapshot.step()
        trace.point(f"tail of {epoch}")
        scheduler.step()
        trace.note("scheduler", epoch, lr=rate(optimizer))
        if dist.get_rank() == 0:
            trace.note("evaluation", epoch, loss=evaluate(model))
            append("log.csv", f"{epoch},{evaluate(model):.8f}")
    snapshot.save()
    trace.point("saved")
    dist.destroy_process_group()
    trace.finish(model)
