"""NCCL in a group of one process, which is all that one GPU allows: formed again, aborted,
killed.
"""

from __future__ import annotations

import json
import time

from tests.gpu import training
from tests.gpu.processes import memory_by_pid, memory_used, run, started, state_of
from tests.last_words import tail
from tests.waiting import until


def test_a_group_is_formed_again_in_one_process(tmp_path, figure):
    run(tmp_path, training.nccl_rounds, str(tmp_path))
    took = json.loads((tmp_path / "took").read_text())
    figure("formed s", ", ".join(f"{formed:.2f}" for formed, _ in took))
    figure("destroyed s", ", ".join(f"{destroyed:.2f}" for _, destroyed in took))


def test_an_abort_behind_a_busy_stream(tmp_path, figure):
    run(tmp_path, training.nccl_aborted, str(tmp_path))
    took = json.loads((tmp_path / "took").read_text())
    figure("abort s", ", ".join(f"{seconds:.2f}" for seconds in took))


def test_a_worker_killed_within_a_kernel_is_gone_and_its_memory_is_free(tmp_path, figure):
    before = memory_used()
    with started(tmp_path, training.nccl_busy, str(tmp_path)) as process:
        until(
            (tmp_path / "busy").exists,
            "it is within the collective",
            details=lambda: tail(process.output),
        )
        during, listed = memory_used(), memory_by_pid()
        process.kill()
        began = time.monotonic()
        states = set()
        while (state := state_of(process.pid)) not in ("", "Z"):
            states.add(state)
            assert time.monotonic() - began < 60.0, states
            time.sleep(0.001)
        gone = time.monotonic() - began
        process.join()
        until(lambda: memory_used() < during - 900, "its memory is free")
        free = time.monotonic() - began
    figure("gone after s", gone)
    figure("memory free after s", free)
    figure("states on the way", " ".join(sorted(states)) or "none")
    figure("MiB before, during, after", f"{before}, {during}, {memory_used()}")
    figure("listed by nvidia-smi", str(listed.get(process.pid, "not by this pid")))
