"""Options of schedulers that a snapshot replaces by those of an earlier start."""

import sys

import numpy
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from malletrain import ElasticSampler, Snapshot
from malletrain.training import report
from malletrain.training.schedulers import tell_other_options
from tests.malletrain.training.worker_side import as_plain_script


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    with as_plain_script(monkeypatch):
        yield


class Refusing:
    """A value that cannot be compared, shown or counted."""

    def __eq__(self, other):
        raise RuntimeError("no")

    def __hash__(self):
        raise RuntimeError("no")

    def __repr__(self):
        raise RuntimeError("no")


class Plain:
    """A value without ``==``."""


class WithOption(lr_scheduler.LRScheduler):
    """A scheduler of the script with a value of any type among its options."""

    def __init__(self, optimizer, milestones):
        self.milestones = milestones
        super().__init__(optimizer)

    def get_lr(self):
        return list(self.base_lrs)


class WithoutState(lr_scheduler.LambdaLR):
    """A scheduler of the script whose state cannot be taken before it has made a step."""

    def state_dict(self):
        raise RuntimeError("no state yet")

    def load_state_dict(self, state):
        pass


def cosine(optimizer, epochs):
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)


def after_warm_up(optimizer, epochs, milestones=(2,)):
    schedulers = [lr_scheduler.LinearLR(optimizer, total_iters=2), cosine(optimizer, epochs)]
    return lr_scheduler.SequentialLR(optimizer, schedulers, milestones=milestones)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A start of a training that makes one step and saves."""

    def one_start(make, epochs, lr=0.1, arguments="", **sampler_options):
        report.sentence_keys.clear()
        monkeypatch.setattr(
            sys, "argv", ["train.py", f"--epochs={epochs}", f"--lr={lr}", arguments]
        )
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        scheduler = make(optimizer, epochs)
        objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        if sampler_options:
            objects["sampler"] = ElasticSampler(8, max_world_size=2, **sampler_options)
        snapshot = Snapshot(tmp_path / "run.pt", **objects)
        snapshot.restore()
        optimizer.step()
        scheduler.step()
        assert snapshot.save()
        return scheduler

    return one_start


@pytest.mark.parametrize("make", [cosine, after_warm_up])
def test_other_options_are_named(start, capsys, make):
    start(make, 3)
    start(make, 3, arguments="--verbose")
    assert "continues with" not in capsys.readouterr().err
    start(make, 5, global_batch_size=2)
    assert "T_max = 3 (script: 5)" in capsys.readouterr().err


ADVICE = 'scheduler.load_state_dict({**own, "last_epoch": scheduler.last_epoch})'
SCHEDULES = {
    "cosine": cosine,
    "constant": lambda o, epochs: lr_scheduler.ConstantLR(o, 0.1, total_iters=epochs // 2),
    "exponential": lambda o, epochs: lr_scheduler.ExponentialLR(o, 1 - 1 / epochs),
    "one cycle": lambda o, epochs: lr_scheduler.OneCycleLR(o, 0.1, total_steps=epochs + 1),
    "restarts": lambda o, epochs: lr_scheduler.CosineAnnealingWarmRestarts(o, epochs // 2),
    "steps": lambda o, epochs: lr_scheduler.MultiStepLR(o, [epochs // 2, epochs - 1]),
    "linear": lambda o, epochs: lr_scheduler.LinearLR(o, 0.1, total_iters=epochs),
    "polynomial": lambda o, epochs: lr_scheduler.PolynomialLR(o, epochs, power=2),
    "equal steps": lambda o, epochs: lr_scheduler.StepLR(o, epochs // 3),
}


def rates(optimizer, scheduler, steps):
    """Make ``steps`` steps; return the rate of each."""
    made = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        made.append(optimizer.param_groups[0]["lr"])
    return made


@pytest.mark.parametrize("done", [5, 10])
@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_the_schedule_follows_the_script_as_the_message_says(
    make, done, tmp_path, monkeypatch, capsys
):
    def parts(epochs):
        monkeypatch.setattr(sys, "argv", ["train.py", f"--epochs={epochs}"])
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        scheduler = make(optimizer, epochs)
        return optimizer, scheduler

    undisturbed = rates(*parts(14), 14)
    optimizer, scheduler = parts(10)
    snapshot = Snapshot(tmp_path / "run.pt", optimizer=optimizer, scheduler=scheduler)
    snapshot.restore()
    rates(optimizer, scheduler, done)
    assert snapshot.save()
    for is_first in (True, False):  # a round of the requeued job, and its next one
        optimizer, scheduler = parts(14)
        snapshot = Snapshot(tmp_path / "run.pt", optimizer=optimizer, scheduler=scheduler)
        own = scheduler.state_dict()
        assert snapshot.restore()
        assert (ADVICE in capsys.readouterr().err) == is_first
        scheduler.load_state_dict({**own, "last_epoch": scheduler.last_epoch})
        scheduler.step(scheduler.last_epoch)
        assert rates(optimizer, scheduler, 1) == pytest.approx(undisturbed[done : done + 1])
        assert snapshot.save()
        done += 1


def test_another_rate_is_named(start, capsys):
    start(cosine, 3)
    start(cosine, 3, lr=0.2)
    assert "base_lrs = [0.1] (script: [0.2])" in capsys.readouterr().err


def test_another_rate_at_another_number_of_ranks_is_not_named(start, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    start(cosine, 3)
    monkeypatch.delenv("WORLD_SIZE")
    start(cosine, 5, lr=0.2)
    assert "T_max = 3 (script: 5)." in capsys.readouterr().err


def test_options_that_the_training_changes_are_not_named_in_the_same_job(start, capsys):
    def make(optimizer, epochs):
        return cosine(optimizer, next(maxima))

    maxima = iter([3, 5])
    start(make, 3)
    scheduler = start(make, 3)
    assert scheduler.T_max == 3
    assert "continues with" not in capsys.readouterr().err


def test_options_are_not_named_with_a_batch_per_rank(start, capsys):
    start(cosine, 3, batch_size=2)
    start(cosine, 5, batch_size=2)
    assert "continues with" not in capsys.readouterr().err


def message_about(new, old, capsys):
    """Return the message about a scheduler that has ``new`` where the snapshot has ``old``."""
    report.sentence_keys.clear()
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    state = WithOption(optimizer, old).state_dict()
    tell_other_options({"scheduler": WithOption(optimizer, new)}, snapshot_of(state), "run.pt")
    return capsys.readouterr().err


def snapshot_of(state):
    """Return a snapshot of another job that has only a scheduler."""
    return {"owner": {"job": "j1"}, "world_size": 1, "objects": {"scheduler": state}}


@pytest.mark.parametrize(
    ("new", "old"),
    [
        (numpy.array([3, 5]), numpy.array([3, 6])),
        (numpy.array([3, 5]), numpy.array([3, 5, 7])),
        (torch.tensor([3, 5]), [3, 6]),
        ({3: 1, 5: 1}, {3: 1, 6: 1}),
        ([3, (5, "a")], [3, (6, "a")]),
        (3, None),
    ],
    ids=["arrays", "longer", "a tensor", "dicts", "nested", "none"],
)
def test_values_of_many_types_are_compared(capsys, new, old):
    assert "milestones = " in message_about(new, old, capsys)


@pytest.mark.parametrize(
    ("new", "old"),
    [
        (numpy.array([3, 5]), [3, 5]),
        (numpy.array([3, None]), numpy.array([3, 4])),
        (numpy.arange(2000), numpy.arange(1, 2001)),
        (torch.tensor([3, 5], device="meta"), torch.tensor([3, 6])),
        (max, min),
        (lambda step: step, lambda step: step),
        (Plain(), Plain()),
        (Refusing(), Refusing()),
        ([Refusing()], [3]),
        (float("nan"), float("nan")),
        (3, 3.0),
    ],
    ids=["an array", "of objects", "long", "meta", "builtins", "lambdas", "plain", "refusing",
         "inside", "nan", "float"],
)  # fmt: skip
def test_equal_and_incomparable_values_give_no_message(capsys, new, old):
    assert message_about(new, old, capsys) == ""


def test_an_incomparable_value_hides_no_other_one(capsys):
    parameters = list(nn.Linear(1, 1).parameters())
    scheduler = WithOption(torch.optim.SGD(parameters, lr=0.1), Refusing())
    state = WithOption(torch.optim.SGD(parameters, lr=0.2), Refusing()).state_dict()
    tell_other_options({"scheduler": scheduler}, snapshot_of(state), "run.pt")
    assert "base_lrs = [0.2] (script: [0.1])" in capsys.readouterr().err


def test_a_sequence_with_an_array_is_restored(start, capsys):
    def make(optimizer, epochs):
        return after_warm_up(optimizer, epochs, numpy.array([2]))

    start(make, 3)
    start(make, 5)
    assert "T_max = 3 (script: 5). The scheduler keeps" in capsys.readouterr().err


OTHER_SCHEDULES = {
    "sequence": after_warm_up,
    "chain": lambda o, epochs: lr_scheduler.ChainedScheduler([cosine(o, epochs)]),
    "plateau": lambda o, epochs: lr_scheduler.ReduceLROnPlateau(o, patience=epochs),
    "of the script": lambda o, epochs: WithOption(o, epochs),
    "multiplied": lambda o, epochs: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.5),
}


@pytest.mark.parametrize("make", OTHER_SCHEDULES.values(), ids=OTHER_SCHEDULES)
def test_there_is_no_advice_about_a_scheduler_that_steps_otherwise(make, capsys):
    new, old = (make(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=n), n) for n in (5, 3))
    tell_other_options({"scheduler": new}, snapshot_of(old.state_dict()), "run.pt")
    log = capsys.readouterr().err
    assert "The scheduler keeps the snapshot's values." in log
    assert "step(" not in log


def test_a_scheduler_whose_state_cannot_be_taken_is_left_out(capsys):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    objects = {"scheduler": WithoutState(optimizer, lambda step: 1.0)}
    tell_other_options(objects, snapshot_of({"base_lrs": [0.2]}), "run.pt")
    assert capsys.readouterr().err == ""
