"""Restart mode: what public bug reports of Accelerate with diffusers are about."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from diffusers.training_utils import EMAModel
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import malletrain
from malletrain.integrations.accelerate import Guard
from tests.zoo.scripts.parts import BATCH, EPOCHS, SAMPLES, Numbered, evaluate, make_model, rate
from tests.zoo.trace import Trace


def averaged(trace: Trace) -> None:
    """diffusers' EMAModel with its warm-up, registered; clipping; a stop that a rank asks for
    (diffusers#2048, Samudra#282).
    """
    accelerator = Accelerator(cpu=True)
    net = make_model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    ema = EMAModel(net.parameters(), decay=0.9, use_ema_warmup=True, power=0.7)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer = accelerator.prepare(net, optimizer)
    accelerator.register_for_checkpointing(ema, scheduler)
    sampler = malletrain.ElasticSampler(SAMPLES, global_batch_size=BATCH, seed=7)
    loader = DataLoader(Numbered(), batch_sampler=sampler)
    guard = Guard(accelerator, "states", sampler)
    guard.resume()
    for epoch in sampler.epochs(EPOCHS):
        for x, y, numbers in loader:
            lr = rate(optimizer)
            accelerator.backward(mse_loss(model(x), y) * sampler.loss_weight)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            ema.step(net.parameters())
            trace.step((epoch, sampler.position), numbers, lr, decay=float(ema.cur_decay_value))
            guard.step()
        ema.store(net.parameters())
        ema.copy_to(net.parameters())
        trace.note("evaluation", epoch, loss=evaluate(net))
        ema.restore(net.parameters())
    guard.save()
    accelerator.end_training()
    trace.finish(net)
