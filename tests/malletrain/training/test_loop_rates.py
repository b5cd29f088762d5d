"""Learning rates that scripts compute from counters of their loops, over a restart."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from malletrain import ElasticSampler, Snapshot, SnapshotError
from tests.malletrain.training.worker_side import as_plain_script

pytestmark = pytest.mark.slow

STEPS = 10
"""Of an epoch."""


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    with as_plain_script(monkeypatch):
        yield


def cosine(at):
    return 0.05 * (1 + math.cos(math.pi * at / 3))


RATES = {
    "cosine of a fraction": lambda epoch, i, length, sampler, facts: cosine(epoch + i / length),
    "warm-up": lambda epoch, i, length, sampler, facts: 0.01 * (epoch * length + i + 1),
    "table": lambda epoch, i, length, sampler, facts: cosine((epoch * length + i) / STEPS),
    "of the sampler": lambda epoch, i, length, sampler, facts: cosine(
        epoch + sampler.position / sampler.num_samples
    ),
    "counted in the snapshot": lambda epoch, i, length, sampler, facts: cosine(
        facts["step"] / STEPS
    ),
    "by epoch": lambda epoch, i, length, sampler, facts: 0.1 * 0.5**epoch,
    "restarts by epoch": lambda epoch, i, length, sampler, facts: cosine(
        facts["step"] % STEPS / STEPS
    ),
    "warm restarts": lambda epoch, i, length, sampler, facts: cosine(facts["step"] % 4 / 4),
    "warm-up to a constant": lambda epoch, i, length, sampler, facts: min(
        0.1, 0.01 * (facts["step"] + 1)
    ),
}
BEGIN_ANEW = ("cosine of a fraction", "warm-up", "table")


def train(path, rate, stop=None, **more):
    """Rates of the updates, until the number of the run's steps is ``stop``."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = ElasticSampler(2 * STEPS, global_batch_size=2, rank=0, world_size=1)
    facts = {"step": 0}
    objects = {"optimizer": optimizer, "sampler": sampler, "facts": facts}
    snapshot = Snapshot(path, model=model, **objects, **{k: f(optimizer) for k, f in more.items()})
    snapshot.restore()
    loader = DataLoader(torch.zeros(2 * STEPS, 1), batch_sampler=sampler)
    rates = []
    for epoch in sampler.epochs(3):
        for i, x in enumerate(loader):
            optimizer.param_groups[0]["lr"] = rate(epoch, i, len(loader), sampler, facts)
            model(x).sum().backward()
            optimizer.step()
            rates.append(optimizer.param_groups[0]["lr"])
            sampler.advance()
            facts["step"] += 1
            snapshot.step()
            if facts["step"] == stop:
                snapshot.save()
                return rates
    return rates


@pytest.mark.parametrize(
    "stop",
    [
        2,
        8,
        9,
        *(pytest.param(step, marks=pytest.mark.thorough) for step in (5, 10, 13, 18, 24, 26)),
    ],
)
@pytest.mark.parametrize("name", RATES)
def test_a_rate_that_goes_back_is_refused_before_an_update_is_made_at_it(tmp_path, name, stop):
    path = tmp_path / "x.pt"
    begin = train(path, RATES[name], stop)
    if name in BEGIN_ANEW and stop % STEPS:
        with pytest.raises(SnapshotError, match="The learning rate of 'optimizer' has gone back"):
            train(path, RATES[name])
    else:
        assert begin + train(path, RATES[name]) == train(tmp_path / "y.pt", RATES[name])


def test_rates_set_at_each_step_are_told_where_an_epoch_goes_on(tmp_path, capsys):
    train(tmp_path / "x.pt", RATES["cosine of a fraction"], 2)
    with pytest.raises(SnapshotError):
        train(tmp_path / "x.pt", RATES["cosine of a fraction"])
    assert "A counter of the loop, such as that of enumerate(), begins" in capsys.readouterr().err


def test_those_of_a_scheduler_are_its_own(tmp_path):
    def made(optimizer):
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    train(tmp_path / "x.pt", RATES["warm-up"], 5, scheduler=made)
    train(tmp_path / "x.pt", RATES["warm-up"], scheduler=made)


def test_a_snapshot_without_a_sampler_says_that_samples_come_again(tmp_path, capsys):
    snapshot = Snapshot(tmp_path / "x.pt", model=nn.Linear(1, 1))
    snapshot.step()
    snapshot.save()
    assert "no sampler" not in capsys.readouterr().err
    assert Snapshot(tmp_path / "x.pt", model=nn.Linear(1, 1)).restore()
    assert "goes on after step 1, but its position in the data" in capsys.readouterr().err
