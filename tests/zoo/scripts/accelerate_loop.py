"""Restart mode: loops written with Accelerate."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import malletrain
from malletrain.integrations.accelerate import Guard
from tests.zoo.scripts.parts import BATCH, EPOCHS, SAMPLES, Numbered, evaluate, make_model, rate
from tests.zoo.trace import Trace


def _train(trace: Trace, models: int = 1, limit: int = SAMPLES, **options: Any) -> None:
    accelerator = Accelerator(cpu=True, **options)
    nets = [make_model(seed) for seed in range(models)]
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.05) for net in nets]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 1, 0.5)
    prepared = accelerator.prepare(*nets, *optimizers)
    wrapped, updates = prepared[:models], prepared[models:]
    accelerator.register_for_checkpointing(scheduler)
    sampler = malletrain.ElasticSampler(SAMPLES, global_batch_size=BATCH, seed=7)
    loader = DataLoader(Numbered(), batch_sampler=sampler)
    guard = Guard(accelerator, "states", sampler, every_s=trace.save_every_s)
    guard.resume()
    for epoch in sampler.epochs(EPOCHS):
        for x, y, numbers in loader:
            lr = rate(updates[0])
            for net, update in zip(wrapped, updates, strict=True):
                update.zero_grad()
                accelerator.backward(mse_loss(net(x), y) * sampler.loss_weight)
                update.step()
            trace.step((epoch, sampler.position), numbers, lr)
            guard.step()
            if sampler.position >= limit:
                break
        scheduler.step()
        trace.note("evaluation", epoch, losses=[evaluate(net) for net in nets])
    guard.save()
    trace.point("saved")
    accelerator.end_training()
    trace.finish(*nets)


def accelerate(trace: Trace) -> None:
    """One model, a schedule and an evaluation once an epoch."""
    _train(trace)


def accelerate_several_models(trace: Trace) -> None:
    """Two models, each with its optimizer."""
    _train(trace, models=2)


def accelerate_naming(trace: Trace) -> None:
    """A training with ``automatic_checkpoint_naming``, which numbers the states that the script
    saves itself.
    """
    configuration = ProjectConfiguration("project", automatic_checkpoint_naming=True)
    _train(trace, project_config=configuration)


def accelerate_cut_short(trace: Trace) -> None:
    """A training whose epochs end after three of their four steps."""
    _train(trace, limit=3 * BATCH)
