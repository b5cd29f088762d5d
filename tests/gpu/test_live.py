"""Live mode with the model on a GPU, without a daemon: groups change under real workers."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from malletrain.protocol import env
from tests.gpu import training
from tests.malletrain.elastic.conductor import conducted
from tests.malletrain.elastic.test_run import change_at, losses, records, run_through, seen

BY_HOST = {env.GPU_BACKEND: "gloo"}
"""Processes share the one GPU there is, which NCCL refuses."""


def same_weights_on_all(folder: Path) -> None:
    """The digests of all ranks of a step are one."""
    by_step = defaultdict(set)
    for record in records(folder):
        by_step[record["step"]].add(record["digest"])
    assert all(len(digests) == 1 for digests in by_step.values())


def test_growing_and_shrinking_equals_an_undisturbed_run(tmp_path, figure):
    options = {"samples": 1600, "epochs": 1}
    run_through(tmp_path / "one", options, [(0, 1)], training.live, environment=BY_HOST)
    run_through(
        tmp_path / "two",
        options,
        [(0, 1), (20, 2), (40, 3), (60, 1), (80, 2)],
        training.live,
        environment=BY_HOST,
    )
    alone, changing = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(alone) == len(changing) == 100
    off = max(abs(a - b) / abs(a) for a, b in zip(alone, changing, strict=True))
    figure("largest difference of a loss", off)
    assert off < 1e-4
    assert set(seen(tmp_path / "two").values()) == {1}
    assert len(seen(tmp_path / "two")) == 1600
    same_weights_on_all(tmp_path / "two")


@pytest.mark.parametrize("kind", ["tanh", "dropout"])
def test_a_peer_that_is_killed_costs_at_most_one_step(tmp_path, kind, figure):
    with conducted(
        tmp_path,
        training.live,
        str(tmp_path),
        {"samples": 200000, "kind": kind},
        environment=BY_HOST,
    ) as c:
        members = c.start(3)
        c.round(members)
        for lost in (members[1], members[0]):
            done = max((r["step"] + 1 for r in records(tmp_path)), default=0)
            change_at(c, tmp_path, done + 20)
            survivors = c.lose(lost)
            c.round(survivors)
        done = max(r["step"] + 1 for r in records(tmp_path))
        change_at(c, tmp_path, done + 20)
        (tmp_path / "stop").touch()
        c.finish()
    done = sorted({r["step"] for r in records(tmp_path)})
    assert done == list(range(done[-1] + 1))
    same_weights_on_all(tmp_path)
    figure("steps", f"{len(done)}")


def test_processes_that_share_a_gpu_without_a_word_are_refused_in_a_sentence(tmp_path):
    with conducted(tmp_path, training.shared_gpu, str(tmp_path)) as c:
        members = c.start(2)
        c.round(members, wait=False)
        c.until(lambda: not any(w.alive for w in members), "NCCL refuses")
        outputs = c.outputs()
    assert "use the same GPU, which NCCL refuses" in outputs, outputs
    assert "torch.cuda.set_device" in outputs, outputs


def test_one_process_over_nccl(tmp_path):
    run_through(tmp_path / "one", {"samples": 320}, [(0, 1)], training.live)
    assert len(losses(tmp_path / "one")) == 20


def test_a_compiled_model(tmp_path):
    options = {"samples": 640, "compile": True}
    run_through(tmp_path / "one", options, [(0, 1), (20, 2)], training.live, environment=BY_HOST)
    assert len(losses(tmp_path / "one")) == 40
    same_weights_on_all(tmp_path / "one")


@pytest.mark.gpus(2)
def test_over_nccl_growing_and_shrinking_equals_an_undisturbed_run(tmp_path):
    """Two ranks need two GPUs: NCCL refuses two on one."""
    options = {"samples": 1600, "own_gpu": True}
    run_through(tmp_path / "one", options, [(0, 1)], training.live)
    run_through(tmp_path / "two", options, [(0, 1), (20, 2), (60, 1)], training.live)
    alone, changing = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert max(abs(a - b) / abs(a) for a, b in zip(alone, changing, strict=True)) < 1e-4
    same_weights_on_all(tmp_path / "two")


@pytest.mark.gpus(2)
def test_over_nccl_a_peer_that_is_killed_costs_at_most_one_step(tmp_path):
    """The communicator is aborted, and the survivor goes on in the same process."""
    options = {"samples": 200000, "own_gpu": True}
    with conducted(tmp_path, training.live, str(tmp_path), options) as c:
        members = c.start(2)
        c.round(members)
        change_at(c, tmp_path, 20)
        c.round(c.lose(members[1]))
        change_at(c, tmp_path, max(r["step"] for r in records(tmp_path)) + 20)
        (tmp_path / "stop").touch()
        c.finish()
    done = sorted({r["step"] for r in records(tmp_path)})
    assert done == list(range(done[-1] + 1))
