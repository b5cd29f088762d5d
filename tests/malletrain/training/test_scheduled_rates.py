"""A learning rate that a state of the script's own making does not have is matching
(torchtitan#4598).
"""

from __future__ import annotations

import copy

import pytest
import torch

import malletrain
from malletrain.protocol.worker_channel import OwnerNotice
from tests.malletrain.training.worker_side import as_worker


class Container:
    """Around an optimizer; its state is made anew at each call, or only at the first one."""

    def __init__(self, optimizer, is_cached):
        self.optimizer, self.is_cached, self.cached = optimizer, is_cached, None

    def state_dict(self):
        if not self.is_cached or self.cached is None:
            self.cached = copy.deepcopy(self.optimizer.state_dict())
        return self.cached

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)


def script(path, is_cached):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    container = Container(optimizer, is_cached)
    snapshot = malletrain.Snapshot(
        path, every_s=float("inf"), model=model, optimizer=container, scheduler=scheduler
    )
    return snapshot, container, scheduler


@pytest.mark.parametrize("is_cached", [True, False])
def test_another_rate_after_a_restore_is_told(monkeypatch, tmp_path, is_cached):
    with as_worker(monkeypatch) as agent:
        snapshot, container, scheduler = script(tmp_path / "x.pt", is_cached)
        snapshot.restore()
        container.state_dict()
        container.optimizer.step()
        scheduler.step()
        snapshot.step()
        assert snapshot.save()
        again, container, _ = script(tmp_path / "x.pt", is_cached)
        assert again.restore()
        sentences = [notice.sentence for notice in agent.received(OwnerNotice)]
    rate = container.optimizer.param_groups[0]["lr"]
    assert rate == (0.1 if is_cached else 0.05)
    matching = [s for s in sentences if "was 0.05 when the" in s and "is 0.1 after" in s]
    assert len(matching) == len(sentences) == is_cached
