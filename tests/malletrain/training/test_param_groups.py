"""A training that adds parameter groups goes on as if it had not been interrupted."""

import pytest
import torch

import malletrain
from malletrain import SnapshotError
from tests.malletrain.training.worker_side import as_plain_script


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    with as_plain_script(monkeypatch):
        yield


class FineTuning:
    """A head that is trained alone for two epochs of two steps, and then together with the body."""

    def __init__(self, path, optimizer=torch.optim.AdamW):
        torch.manual_seed(0)
        self.body, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        self.model = torch.nn.Sequential(self.body, torch.nn.Tanh(), self.head)
        self.body.requires_grad_(False)
        self.optimizer = optimizer(self.head.parameters(), lr=0.01)
        self.sampler = malletrain.ElasticSampler(8, global_batch_size=4, rank=0, world_size=1)
        self.snapshot = malletrain.Snapshot(
            path, model=self.model, optimizer=self.optimizer, sampler=self.sampler
        )
        self.snapshot.restore()

    def run(self, steps, unfreeze=lambda epoch, groups: epoch >= 2 and groups == 1):
        for epoch in self.sampler.epochs(5):
            if unfreeze(epoch, len(self.optimizer.param_groups)):
                self.body.requires_grad_(True)
                self.optimizer.add_param_group({"params": self.body.parameters(), "lr": 0.001})
            for batch in self.sampler:
                if not steps:
                    return self
                steps -= 1
                self.optimizer.zero_grad()
                x = torch.tensor(batch, dtype=torch.float32)[:, None] * torch.ones(4)
                self.model(x).square().sum().backward()
                self.optimizer.step()
                self.sampler.advance()
        return self

    def weights(self):
        return [p.tolist() for p in self.model.parameters()]


@pytest.mark.parametrize("interrupted", range(1, 10))
def test_it_goes_on_after_any_step(tmp_path, interrupted):
    undisturbed = FineTuning(tmp_path / "a.pt").run(10)
    assert FineTuning(tmp_path / "b.pt").run(interrupted).snapshot.save()
    resumed = FineTuning(tmp_path / "b.pt").run(10 - interrupted)
    assert resumed.weights() == undisturbed.weights()
    assert [g["lr"] for g in resumed.optimizer.param_groups] == [0.01, 0.001]


def test_a_script_that_does_not_add_them_again_is_told_how(tmp_path):
    assert FineTuning(tmp_path / "b.pt").run(5).snapshot.save()
    resumed = FineTuning(tmp_path / "b.pt")
    with pytest.raises(SnapshotError, match=r"2 parameter groups .* not `if epoch == 2:`"):
        resumed.run(1, unfreeze=lambda epoch, groups: False)


def test_another_optimizer_is_refused_at_once(tmp_path):
    assert FineTuning(tmp_path / "b.pt").run(5).snapshot.save()
    other = FineTuning(tmp_path / "c.pt")
    other.optimizer.param_groups[0]["params"].pop()
    with pytest.raises(SnapshotError, match="does not fit the script's AdamW"):
        malletrain.Snapshot(
            tmp_path / "b.pt", model=other.model, optimizer=other.optimizer, sampler=other.sampler
        ).restore()
