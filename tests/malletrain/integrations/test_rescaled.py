"""Trainers of other libraries over ranks 1 → 3 → 2 → 1: the samples, learning rates and weights of
an undisturbed run with the same global batch.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from malletrain.protocol.worker_channel import DrainDone
from tests.malletrain.integrations import rescaled
from tests.malletrain.integrations.test_ranks import HOME, Ranks

pytestmark = pytest.mark.slow


@pytest.fixture
def server(library):
    """Forks ranks that have the library imported."""
    pytest.importorskip(library, reason="pip install malletrain[integrations]")
    with subprocess.Popen(
        [sys.executable, "-m", "tests.malletrain.integrations.ranks", library, "0", "rescaled"],
        cwd=HOME,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


def lines(folder: Path) -> dict[int, list[list]]:
    """By step: [world size, learning rate, samples, random number] of each rank."""
    steps: dict[int, list[list]] = {}
    for file in sorted(folder.glob("steps-*")):
        for line in file.read_text().splitlines():
            step, *rest = json.loads(line)
            steps.setdefault(step, []).append(rest)
    return steps


def let_go(folder: Path, step: int) -> None:
    """Steps up to this one may be done."""
    (folder / "limit.new").write_text(str(step))
    os.replace(folder / "limit.new", folder / "limit")


def drained_at(ranks: Ranks, step: int) -> None:
    """Have them save and stop at the end of ``step``."""
    waits = ranks.folder / "waits-0"
    # Only now has rank 0 looked for a drain at the end of the step before.
    ranks.when(lambda: waits.exists() and waits.read_text() == str(step), f"step {step} waits")
    ranks.agents[0].flags.request_drain(7)
    let_go(ranks.folder, step)
    ranks.until(0, "the answer", lambda m: isinstance(m, DrainDone) and m.saved and m.number == 7)
    for pid in ranks.workers:
        os.kill(pid, signal.SIGTERM)
    ranks.ended()


def trained(server, folder, worlds, stops):
    """Steps and weights of a training whose ranks are changed at the end of each of ``stops``."""
    folder.mkdir()
    (folder / "steps-0").touch()
    for number, (world, stop) in enumerate(zip(worlds, [*stops, 0], strict=True)):
        let_go(folder, stop - 1 if stop else rescaled.STEPS)
        ranks = Ranks(server, folder, number + 1, world=world, most=3)
        try:
            if stop:
                drained_at(ranks, stop)
            else:
                ranks.ended()
                assert (folder / "weights.pt").exists(), ranks.logs()
        finally:
            ranks.close()
    return lines(folder), torch.load(folder / "weights.pt")


@pytest.mark.parametrize(
    "library",
    [
        pytest.param("transformers", marks=pytest.mark.thorough),
        pytest.param("lightning", marks=pytest.mark.thorough),
        "accelerate",
    ],
)
def test_a_rescaled_training_is_the_undisturbed_one(server, tmp_path, library):
    expected, weights = trained(server, tmp_path / "undisturbed", [1], [])
    assert sorted(expected) == list(range(1, rescaled.STEPS + 1))
    # An epoch has 6 steps: within one, at its end, right after it, oftener than once an epoch.
    stops = [3, 6, 7, 9, 18]
    steps, moved = trained(server, tmp_path / "moved", [1, 3, 2, 1, 3, 1], stops)
    assert sorted(steps) == sorted(expected)
    worlds = [ranks[0][0] for _, ranks in sorted(steps.items())]
    assert worlds == [1] * 3 + [3] * 3 + [2] + [1] * 2 + [3] * 9 + [1] * 6
    for step, ranks in steps.items():
        assert len(ranks) == ranks[0][0], f"step {step} was done once by each rank"
        samples = sorted(itertools.chain(*(own for _, _, own, _ in ranks)))
        assert samples == sorted(expected[step][0][2]), f"samples of step {step}"
        for _, rate, _, noise in ranks:  # all ranks have one seed
            assert rate == pytest.approx(expected[step][0][1], abs=1e-9), f"step {step}"
            assert noise == expected[step][0][3], f"step {step}"
    per_epoch = rescaled.STEPS // rescaled.EPOCHS
    for epoch in range(rescaled.EPOCHS):
        own = range(epoch * per_epoch + 1, (epoch + 1) * per_epoch + 1)
        seen = [i for step in own for _, _, samples, _ in steps[step] for i in samples]
        assert sorted(seen) == list(range(rescaled.SAMPLES)), f"epoch {epoch}"
    assert len({tuple(ranks[0][2]) for ranks in expected.values()}) == len(expected), "shuffled"
    for name, value in weights.items():
        torch.testing.assert_close(moved[name], value, rtol=1e-4, atol=1e-5)
