"""Restart mode: what public bug reports of Accelerate are about."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import malletrain
from malletrain.integrations.accelerate import Guard
from tests.zoo.scripts.parts import BATCH, EPOCHS, SAMPLES, Numbered, evaluate, make_model, rate
from tests.zoo.scripts.reports import Annealed
from tests.zoo.trace import Trace


def accumulating(trace: Trace) -> None:
    """``accelerator.accumulate()`` over micro-batches, also over the end of an epoch
    (accelerate#963).
    """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = make_model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer = accelerator.prepare(net, optimizer)
    accelerator.register_for_checkpointing(scheduler)
    sampler = malletrain.ElasticSampler(SAMPLES, global_batch_size=4, seed=7)
    loader = DataLoader(Numbered(), batch_sampler=sampler)
    guard = Guard(accelerator, "states", sampler)
    guard.resume()
    seen: list[int] = []
    for epoch in sampler.epochs(EPOCHS):
        for x, y, numbers in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(x), y) * sampler.loss_weight)
                optimizer.step()
                optimizer.zero_grad()
                seen += numbers.tolist()
                if accelerator.sync_gradients:
                    trace.step((epoch, sampler.position), seen, rate(optimizer))
                    seen = []
                else:
                    trace.point("micro-batch")
                guard.step()
        scheduler.step()
        trace.note("evaluation", epoch, loss=evaluate(net))
    guard.save()
    accelerator.end_training()
    trace.finish(net)


def gathered(trace: Trace) -> None:
    """``gather_for_metrics`` over a prepared loader of the evaluation (accelerate#575)."""
    accelerator = Accelerator(cpu=True)
    net = make_model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    test = DataLoader(Numbered(13, 4), batch_size=3)
    model, optimizer, test = accelerator.prepare(net, optimizer, test)
    sampler = malletrain.ElasticSampler(SAMPLES, global_batch_size=BATCH, seed=7)
    loader = DataLoader(Numbered(), batch_sampler=sampler)
    guard = Guard(accelerator, "states", sampler)
    guard.resume()
    for epoch in sampler.epochs(EPOCHS):
        model.train()
        for x, y, numbers in loader:
            accelerator.backward(mse_loss(model(x), y) * sampler.loss_weight)
            optimizer.step()
            optimizer.zero_grad()
            trace.step((epoch, sampler.position), numbers, rate(optimizer))
            guard.step()
        model.eval()
        errors, sample_numbers = [], []
        for x, y, numbers in test:
            with torch.no_grad():
                part = accelerator.gather_for_metrics(((model(x) - y) ** 2, numbers))
            errors.append(part[0])
            sample_numbers += part[1].tolist()
        loss = float(torch.cat(errors).mean())
        trace.note("evaluation", epoch, loss=loss, numbers=sorted(sample_numbers))
    guard.save()
    accelerator.end_training()
    trace.finish(net)


def scheduled_first(trace: Trace) -> None:
    """The scheduler steps first in an epoch, and a temperature falls (slime#1547)."""
    accelerator = Accelerator(cpu=True)
    net = Annealed()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer = accelerator.prepare(net, optimizer)
    accelerator.register_for_checkpointing(scheduler)
    sampler = malletrain.ElasticSampler(SAMPLES, global_batch_size=BATCH, seed=7)
    loader = DataLoader(Numbered(), batch_sampler=sampler)
    guard = Guard(accelerator, "states", sampler)
    guard.resume()
    for epoch in sampler.epochs(EPOCHS):
        if epoch:
            scheduler.step()
            net.temperature *= 0.7
        for x, y, numbers in loader:
            accelerator.backward(mse_loss(model(x), y) * sampler.loss_weight)
            optimizer.step()
            optimizer.zero_grad()
            trace.step((epoch, sampler.position), numbers, rate(optimizer))
            guard.step()
        trace.note("evaluation", epoch, loss=evaluate(net), temperature=net.temperature)
    guard.save()
    accelerator.end_training()
    trace.finish(net)
