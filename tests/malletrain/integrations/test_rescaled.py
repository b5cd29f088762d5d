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

from malletrain.protocol.worker_channel import Drained
from tests.malletrain.integrations import rescaled
from tests.malletrain.integrations.test_ranks import HOME, PATIENCE_S, Ranks

pytestmark = pytest.mark.timeout(400)


def served(library, folder):
    command = [sys.executable, "-m", "tests.malletrain.integrations.ranks"]
    return subprocess.Popen(
        [*command, library, str(folder), "0", "rescaled"],
        cwd=HOME,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def lines(folder: Path) -> dict[int, list[list]]:
    """By step: [world size, learning rate, samples] of each rank."""
    steps: dict[int, list[list]] = {}
    for file in sorted(folder.glob("steps-*")):
        for line in file.read_text().splitlines():
            step, *rest = json.loads(line)
            steps.setdefault(step, []).append(rest)
    return steps


def drained_after(ranks: Ranks, steps: int) -> None:
    """Have them save and stop once so many steps are noted in all."""
    ranks.when(lambda: len(lines(ranks.folder)) >= steps, f"{steps} steps")
    ranks.agents[0].flags.request_drain(7)
    ranks.until(0, "the answer", lambda m: isinstance(m, Drained) and m.saved and m.number == 7)
    for pid in ranks.workers:
        os.kill(pid, signal.SIGTERM)
    ranks.ended(PATIENCE_S)


def trained(library, folder, worlds, every):
    """Steps and weights of a training moved after each ``every`` steps or more."""
    folder.mkdir()
    with served(library, folder) as server:
        try:
            for number, world in enumerate(worlds):
                ranks = Ranks(server, folder, number + 1, world=world, most=3)
                try:
                    if number + 1 < len(worlds):
                        drained_after(ranks, len(lines(folder)) + every)
                    else:
                        ranks.ended(PATIENCE_S)
                        assert (folder / "weights.pt").exists(), ranks.logs()
                finally:
                    ranks.close()
        finally:
            server.kill()
    return lines(folder), torch.load(folder / "weights.pt")


@pytest.mark.parametrize("library", ["transformers", "lightning", "accelerate"])
def test_a_rescaled_training_is_the_undisturbed_one(library, tmp_path):
    pytest.importorskip(library, reason="pip install malletrain[integrations]")
    expected, weights = trained(library, tmp_path / "undisturbed", [1], 0)
    assert sorted(expected) == list(range(1, rescaled.STEPS + 1))
    # 2 steps: oftener than once an epoch, which has 6
    steps, moved = trained(library, tmp_path / "moved", [1, 3, 2, 1, 3, 1], 2)
    assert sorted(steps) == sorted(expected)
    worlds = [ranks[0][0] for _, ranks in sorted(steps.items())]
    assert [world for world, _ in itertools.groupby(worlds)] == [1, 3, 2, 1, 3, 1]
    for step, ranks in steps.items():
        assert len(ranks) == ranks[0][0], f"step {step} was done once by each rank"
        samples = sorted(itertools.chain(*(own for _, _, own in ranks)))
        assert samples == sorted(expected[step][0][2]), f"samples of step {step}"
        for _, rate, _ in ranks:
            assert rate == pytest.approx(expected[step][0][1], abs=1e-9), f"step {step}"
    per_epoch = rescaled.STEPS // rescaled.EPOCHS
    for epoch in range(rescaled.EPOCHS):
        own = range(epoch * per_epoch + 1, (epoch + 1) * per_epoch + 1)
        seen = [i for step in own for _, _, samples in steps[step] for i in samples]
        assert sorted(seen) == list(range(rescaled.SAMPLES)), f"epoch {epoch}"
    assert len({tuple(ranks[0][2]) for ranks in expected.values()}) == len(expected), "shuffled"
    for name, value in weights.items():
        torch.testing.assert_close(moved[name], value, rtol=1e-4, atol=1e-5)
