"""FSDP2 on one GPU: a restart from snapshots, and two processes by gloo."""

from __future__ import annotations

import json
import socket

import pytest

from malletrain.protocol import env
from tests.gpu import training
from tests.gpu.processes import run, started
from tests.last_words import tail
from tests.malletrain.elastic.conductor import conducted
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_a_restart_of_a_sharded_model_equals_an_undisturbed_run(tmp_path, backend):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole, training.sharded_alone, str(whole), backend, 0, 20, "end")
    run(parts, training.sharded_alone, str(parts), backend, 0, 9, "first")
    run(parts, training.sharded_alone, str(parts), backend, 9, 20, "end")
    first, end = (json.loads((parts / name).read_text()) for name in ("first", "end"))
    assert first + end == json.loads((whole / "end").read_text())


def test_live_mode_of_one_process(tmp_path):
    with conducted(tmp_path, training.sharded_live, str(tmp_path), 30) as c:
        c.round(c.start(1))
        c.finish()
    (path,) = tmp_path.glob("losses-*")
    losses = json.loads(path.read_text())
    assert len(losses) == 30
    assert losses[-5] < losses[0]


def test_live_mode_of_processes_that_share_a_gpu_is_refused(tmp_path):
    environment = {env.GPU_BACKEND: "gloo"}
    with conducted(
        tmp_path, training.sharded_live, str(tmp_path), 30, environment=environment
    ) as c:
        members = c.start(2)
        c.round(members, wait=False)
        c.until(lambda: not any(w.alive for w in members), "it is refused")
        outputs = c.outputs()
    assert "move by NCCL only" in outputs, outputs


def test_two_processes_of_one_gpu_by_gloo(tmp_path, figure):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (
        started(tmp_path, training.sharded_pair, str(tmp_path), 0, port) as one,
        started(tmp_path, training.sharded_pair, str(tmp_path), 1, port) as two,
    ):
        for process in (one, two):
            process.join(PATIENCE_S)
        assert [one.exitcode, two.exitcode] == [0, 0], tail(one.output) + tail(two.output)
    seen = [json.loads((tmp_path / f"pair-{rank}").read_text()) for rank in (0, 1)]
    assert seen[0] == seen[1]
    assert seen[0][-1] < seen[0][0]
