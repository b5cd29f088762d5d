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


class OwnSchedule:
    """Sets the rates of the groups that the script had when it was made; no scheduler of torch."""

    def __init__(self, optimizer):
        self.groups, self.first = optimizer.param_groups, optimizer.param_groups[0]

    def set(self, done):
        for group in self.groups:
            group["lr"] = 0.1 / (1 + done)
        self.first["lr"] *= 0.5


class Shown:
    """A wrapper that only shows the groups, as some do."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.add_param_group = optimizer.add_param_group
        self.state_dict = optimizer.state_dict
        self.load_state_dict = optimizer.load_state_dict

    @property
    def param_groups(self):
        return self.optimizer.param_groups


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, Shown], ids=["plain", "wrapped"])
def test_the_groups_stay_the_scripts_own(tmp_path, wrap):
    def trained(path, begin, end):
        torch.manual_seed(0)
        layers = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.SGD([{"params": layer.parameters()} for layer in layers], lr=1.0)
        schedule, groups = OwnSchedule(optimizer), [*optimizer.param_groups]
        snapshot = malletrain.Snapshot(path, model=model, optimizer=wrap(optimizer))
        snapshot.restore()
        assert all(a is b for a, b in zip(optimizer.param_groups, groups, strict=True))
        assert optimizer.param_groups is schedule.groups or wrap is Shown
        for step in range(begin, end):
            schedule.set(step)
            optimizer.zero_grad()
            model(torch.ones(3, 2)).square().sum().backward()
            optimizer.step()
        assert snapshot.save()
        return model[0].weight.tolist(), [group["lr"] for group in optimizer.param_groups]

    expected = trained(tmp_path / "a.pt", 0, 6)
    trained(tmp_path / "b.pt", 0, 3)
    assert trained(tmp_path / "b.pt", 3, 6) == expected
