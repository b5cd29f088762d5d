"""Snapshots of a training on a GPU: exact after a restart, and untouched by the steps that
follow.
"""

from __future__ import annotations

import json
import statistics
import time

import pytest
import torch

import malletrain
from malletrain.elastic.background import BackgroundSnapshot
from malletrain.training import rng
from malletrain.training.memory_snapshots import Staging
from tests.gpu import training
from tests.gpu.processes import run

STEPS, CUT = 40, 17


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_restart_equals_an_undisturbed_run(tmp_path, precision, figure):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole, training.snapshots, str(whole), precision, 0, STEPS, "end")
    run(parts, training.snapshots, str(parts), precision, 0, CUT, "first")
    run(parts, training.snapshots, str(parts), precision, CUT, STEPS, "end")
    first, end = (json.loads((parts / name).read_text()) for name in ("first", "end"))
    expected = json.loads((whole / "end").read_text())
    assert first["losses"] + end["losses"] == expected["losses"]
    assert end["weights"] == expected["weights"]
    assert end["scale"] == expected["scale"] != 2.0**24
    assert end["next"] == expected["next"], "the generator of the GPU"
    figure("steps exactly equal", f"{STEPS}")
    figure("scale", expected["scale"])


def test_the_generator_of_the_gpu_comes_back():
    torch.cuda.manual_seed(7)
    torch.rand(3, device="cuda")
    before = rng.state()
    expected = torch.rand(5, device="cuda")
    torch.cuda.manual_seed(8)
    rng.load(before)
    assert torch.equal(torch.rand(5, device="cuda"), expected)


def test_staging_copies_everything_before_it_returns(figure):
    weights = {"a": torch.randn(64 << 20, device="cuda"), "b": [torch.ones(3, device="cuda"), 5]}
    expected = weights["a"].double().sum().item()
    staging = Staging()
    took = []
    for _ in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        on_host = staging.on_host(weights)
        took.append(time.perf_counter() - began)
    assert on_host["a"].is_pinned()
    assert not on_host["a"].is_cuda
    weights["a"].zero_()  # the next step
    weights["b"][0].zero_()
    torch.cuda.synchronize()
    assert on_host["a"].double().sum().item() == pytest.approx(expected, rel=1e-9)
    assert on_host["b"][0].tolist() == [1.0, 1.0, 1.0]
    assert on_host["b"][1] == 5
    figure("256 MiB to the host, first, s", took[0])
    figure("then GB/s", 0.268435456 / statistics.median(took[1:]))


def test_staging_sees_what_other_streams_have_written():
    """The script's own stream is the one that the step is on, not torch's default."""
    stream = torch.cuda.Stream()
    weights = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # noqa: SLF001
        weights.fill_(3.0)
        on_host = Staging().on_host({"w": weights})["w"]
    assert on_host.min().item() == 3.0


def test_a_snapshot_saved_by_the_way_has_the_weights_of_its_step(tmp_path, figure):
    model = torch.nn.Linear(2048, 2048).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshot = malletrain.Snapshot(
        tmp_path / "s", every_s=3600.0, memory=False, model=model, optimizer=optimizer
    )
    taken = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    began = time.perf_counter()
    assert snapshot.save()
    figure("save 17 MB, s", time.perf_counter() - began)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert snapshot.restore()
    for name, p in model.named_parameters():
        assert torch.equal(p.detach().cpu(), taken[name])


def test_a_snapshot_in_the_background_does_not_see_the_next_step(tmp_path):
    model = torch.nn.Linear(4096, 4096).cuda()
    path = tmp_path / "s"
    snapshot = BackgroundSnapshot(path, every_s=0.0, model=model)
    snapshot.restore()
    expected = model.weight.detach().cpu().clone()
    snapshot.step()
    with torch.no_grad():
        model.weight.zero_()  # the next step, while the thread writes
    snapshot.wait()
    assert BackgroundSnapshot(path, every_s=3600.0, model=model).restore()
    assert torch.equal(model.weight.detach().cpu(), expected)


def test_the_threads_own_time_is_not_told_on_a_gpu():
    from malletrain.training.step_times import BusyClock

    torch.ones(1, device="cuda")
    assert BusyClock().read() is None
