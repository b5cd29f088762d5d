"""Restart mode: ways to the data, and what a script does beside the training."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import malletrain
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
from tests.zoo.scripts.plain import Training
from tests.zoo.trace import Trace


def persistent_workers(trace: Trace) -> None:
    """A loader with workers that stay, and batches made ahead."""
    t = Training(trace)
    t.loader = DataLoader(
        Numbered(),
        batch_sampler=t.sampler,
        num_workers=1,
        persistent_workers=True,
        prefetch_factor=2,
        multiprocessing_context="fork",
    )
    t.prepare()
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch)
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def prefetcher(trace: Trace) -> None:
    """A generator that takes the next batch before the loop needs it."""
    t = Training(trace)

    def ahead(loader: Any) -> Iterator[Any]:
        batches = iter(loader)
        following = next(batches, None)
        while following is not None:
            current, following = following, next(batches, None)
            yield current

    inner = t.loader

    class Prefetched:
        def __iter__(self) -> Iterator[Any]:
            return ahead(inner)

    t.loader = Prefetched()
    t.prepare()
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch)
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def train_accuracy(trace: Trace) -> None:
    """A training that measures the accuracy on its training data after each epoch."""
    t = Training(trace)
    t.prepare()
    measuring = DataLoader(Numbered(), batch_size=8)
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch)
        with torch.no_grad():
            losses = [float(mse_loss(t.model(x), y)) for x, y, _ in measuring]
        trace.note("accuracy", epoch, loss=sum(losses) / len(losses))
    t.end()


def _records(shard: int) -> Iterator[int]:
    yield from range(shard * 5, shard * 5 + 5)


def _stream(trace: Trace, shards: int, buffer: int) -> None:
    dist.init_process_group("gloo")
    data, model = Numbered(shards * 5), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    stream = malletrain.ElasticStream(
        list(range(shards)), _records, global_batch_size=BATCH, decode=data.__getitem__, seed=buffer
    )
    facts = {"step": 0}
    snapshot = malletrain.Snapshot(
        "stream.pt",
        every_s=trace.save_every_s,
        model=model,
        optimizer=optimizer,
        stream=stream,
        facts=facts,
    )
    snapshot.restore()
    net = DistributedDataParallel(model)
    for epoch in stream.epochs(EPOCHS):
        for x, y, numbers in stream:
            optimizer.zero_grad()
            (mse_loss(net(x), y) * stream.loss_weight).backward()
            optimizer.step()
            trace.samples(epoch, numbers)
            facts["step"] += 1
            stream.advance()
            malletrain.report(len(x))
            snapshot.step()
        trace.point(f"tail of {epoch}")
        trace.note("epoch", epoch)
    snapshot.save()
    dist.destroy_process_group()
    trace.finish()


def stream(trace: Trace) -> None:
    """An ElasticStream over five shards."""
    _stream(trace, 5, 0)


def stream_of_few(trace: Trace) -> None:
    """Fewer shards than ranks may be."""
    _stream(trace, 2, 1)


def signal_handler(trace: Trace) -> None:
    """A handler of the script's own for SIGTERM: it notes that, and the loop saves and ends."""
    t = Training(trace)
    leaving = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leaving.set())
    t.prepare()
    for epoch in t.sampler.epochs(EPOCHS):
        for x, y, numbers in t.loader:
            t.optimizer.zero_grad()
            (mse_loss(t.net(x), y) * t.sampler.loss_weight).backward()
            t.optimizer.step()
            trace.step((epoch, t.sampler.position), numbers, rate(t.optimizer))
            t.sampler.advance()
            t.snapshot.step()
            if leaving.is_set():
                t.snapshot.save()
                raise SystemExit(143)
        trace.note("evaluation", epoch, loss=evaluate(t.model))
    t.end()


def writer_thread(trace: Trace) -> None:
    """A thread that writes the results while the main thread leaves the group."""
    t = Training(trace)
    history: list[float] = []
    t.facts["history"] = history
    t.prepare()
    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch)
        t.facts["history"] = [*t.facts["history"], evaluate(t.model)]
        trace.note("history", epoch, losses=t.facts["history"])
    t.snapshot.save()

    def write() -> None:
        if t.main:
            append("history.json", json.dumps([round(v, 6) for v in t.facts["history"]]))

    thread = threading.Thread(target=write)
    thread.start()
    trace.point("writing")
    dist.destroy_process_group()
    thread.join()
    trace.point("written")
    trace.finish(t.model)


def own_path(trace: Trace) -> None:
    """A snapshot without a path, Adam, and random numbers that are drawn in each step."""
    dist.init_process_group("gloo")
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, amsgrad=True)
    sampler = malletrain.ElasticSampler(SAMPLES, global_batch_size=BATCH, seed=11)
    loader = DataLoader(Numbered(), batch_sampler=sampler)
    snapshot = malletrain.Snapshot(
        every_s=trace.save_every_s, model=model, optimizer=optimizer, sampler=sampler
    )
    snapshot.restore()
    net = DistributedDataParallel(model)
    for epoch in sampler.epochs(EPOCHS):
        for x, y, numbers in loader:
            noise = float(torch.rand(1, dtype=torch.float64))
            optimizer.zero_grad()
            (mse_loss(net(x) + 0.1 * noise, y) * sampler.loss_weight).backward()
            optimizer.step()
            trace.step((epoch, sampler.position), numbers, rate(optimizer), noise=noise)
            sampler.advance()
            malletrain.report(len(x))
            snapshot.step()
        trace.note("evaluation", epoch, loss=evaluate(model))
    snapshot.save()
    dist.destroy_process_group()
    trace.finish(model)
