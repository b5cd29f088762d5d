"""Parts of a step on a GPU: each lasts as long as its work in the stream, and none waits for it."""

from __future__ import annotations

import statistics
import time

import pytest
import torch

from malletrain.protocol.worker_channel import MEASURED_PARTS
from malletrain.training import step_times

PRODUCTS = 50
"""Matrix products of one part, some 0.1 s on a large GPU."""


@pytest.fixture
def clock():
    torch.ones(1, device="cuda")
    yield step_times.start()
    step_times.stop()


def read(clock, part):
    return clock.read()[MEASURED_PARTS.index(part)]


@pytest.mark.parametrize("part", MEASURED_PARTS)
def test_a_part_lasts_as_long_as_its_work_in_the_stream(clock, part, figure):
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(3):
        x @ x
    ratios, queued = [], []
    for _ in range(5):
        torch.cuda.synchronize()
        before = read(clock, part) or 0.0
        began = time.perf_counter()
        with step_times.StepSection(part):
            for _ in range(PRODUCTS):
                x @ x
        queued.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        took = time.perf_counter() - began
        ratios.append((read(clock, part) - before) / took)
    figure(f"{part}: measured / clock", statistics.median(ratios))
    figure(f"{part}: longest call of the processor, s", max(queued))
    assert statistics.median(ratios) == pytest.approx(1.0, abs=0.1)


def test_work_before_and_after_a_part_does_not_count(clock, figure):
    x = torch.randn(4096, 4096, device="cuda")
    part = MEASURED_PARTS[0]
    for _ in range(PRODUCTS):
        x @ x
    with step_times.StepSection(part):
        pass
    for _ in range(PRODUCTS):
        x @ x
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(PRODUCTS):
        x @ x
    torch.cuda.synchronize()
    figure("an empty part between work, s", read(clock, part))
    assert read(clock, part) < 0.1 * (time.perf_counter() - began)


def test_a_part_is_read_only_when_its_work_is_done(clock):
    x = torch.randn(8192, 8192, device="cuda")
    part = MEASURED_PARTS[0]
    before = read(clock, part) or 0.0
    done = torch.cuda.Event()
    with step_times.StepSection(part):
        for _ in range(PRODUCTS):
            x @ x
    done.record()
    early = read(clock, part)
    if not done.query():  # the work was still queued when the clock was read
        assert early == before, "read() waited, or counted work that was not done"
    torch.cuda.synchronize()
    assert read(clock, part) > before
