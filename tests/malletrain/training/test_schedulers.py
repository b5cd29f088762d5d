"""Schedulers that set rates and are not saved: told, or refused where going on would go wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import SGD, lr_scheduler
from torch.optim.swa_utils import SWALR

import malletrain
from malletrain.training import report
from malletrain.training.snapshot_file import SnapshotError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Detected call of:UserWarning"),
]
STEPS = 12
EPOCH = 4
"""Steps of an epoch."""
Case = Callable[[torch.nn.Module, dict[str, Any]], Iterator[Any]]
"""A script's part, of its model and a dict of the snapshot. It yields the objects that Snapshot is
given and, when these are restored, what is called after each update, with its number.
"""


@pytest.fixture(autouse=True)
def _nothing_is_told_yet():
    report.sentence_keys.clear()


def train(path, case: Case, until: int = STEPS) -> list[list[float]]:
    """Go on to a number of steps, and save; return the rates of the updates."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    facts: dict[str, Any] = {"step": 0}
    sampler = malletrain.ElasticSampler(2 * EPOCH, global_batch_size=2)
    script = case(model, facts)
    objects = next(script)
    optimizers = [one for one in objects.values() if hasattr(one, "param_groups")]
    snapshot = malletrain.Snapshot(
        path, every_s=3600.0, model=model, facts=facts, sampler=sampler, **objects
    )
    snapshot.restore()
    after_update = next(script)
    rates = []
    for _ in sampler.epochs(STEPS // EPOCH):
        for _batch in sampler:
            model.zero_grad()
            model(torch.ones(2, 2)).sum().backward()
            for one in optimizers:
                one.step()
            rates.append([group["lr"] for one in optimizers for group in one.param_groups])
            after_update(facts["step"])
            facts["step"] += 1
            sampler.advance()
            snapshot.step()
            if facts["step"] == until:
                break
        if facts["step"] == until:
            break
    snapshot.save()
    return rates


def sgd(model: torch.nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1)


def cosine(optimizer: Any, **options: Any) -> lr_scheduler.LRScheduler:
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS, **options)


class Wrapper:
    """What a trainer's own class for schedules looks like."""

    def __init__(self, **schedulers: Any) -> None:
        self.config = {"parts": schedulers}

    def state_dict(self) -> dict[str, Any]:
        return {name: one.state_dict() for name, one in self.config["parts"].items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, one in self.config["parts"].items():
            one.load_state_dict(state[name])


class TimmLike:
    """Sets the rate by a number of steps that its caller gives."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step_update(self, step: int) -> None:
        self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class InverseSchedule(lr_scheduler.LambdaLR):
    """As those of transformers."""

    def __init__(self, optimizer: Any, last_epoch: int = -1) -> None:
        super().__init__(optimizer, lambda step: 1 / (1 + step), last_epoch)


class Around(torch.optim.Optimizer):
    """An optimizer around another one, as Accelerate's: the base's ``__init__`` is not called."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.optimizer.param_groups = groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


# --- right, and not a word ---


def passed(model, facts):
    optimizer = sgd(model)
    scheduler = cosine(optimizer)
    yield {"optimizer": optimizer, "scheduler": scheduler}
    yield lambda step: scheduler.step()


def by_epoch(model, facts):
    optimizer = sgd(model)
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    yield {"optimizer": optimizer, "scheduler": scheduler}
    yield lambda step: None if (step + 1) % EPOCH else scheduler.step()


def groups(model, facts):
    optimizer = SGD([{"params": [model.weight], "lr": 0.2}, {"params": [model.bias]}], lr=0.1)
    scheduler = InverseSchedule(optimizer)
    yield {"optimizer": optimizer, "scheduler": scheduler}
    yield lambda step: scheduler.step()


def sequential(model, facts):
    optimizer = sgd(model)
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), cosine(optimizer)]
    scheduler = lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])
    yield {"optimizer": optimizer, "scheduler": scheduler}
    yield lambda step: scheduler.step()


def chained(model, facts):
    optimizer = sgd(model)
    last = [lr_scheduler.ConstantLR(optimizer, 0.5), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    parts = [
        lr_scheduler.StepLR(optimizer, 2),
        lr_scheduler.SequentialLR(optimizer, last, milestones=[5]),
    ]
    scheduler = lr_scheduler.ChainedScheduler(parts)
    yield {"optimizer": optimizer, "scheduler": scheduler}
    yield lambda step: scheduler.step()


def warm_restarts(model, facts):
    optimizer = sgd(model)
    scheduler = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 1)
    yield {"optimizer": optimizer, "scheduler": scheduler}
    yield lambda step: scheduler.step((step + 1) / EPOCH)


def plateau(model, facts):
    optimizer = sgd(model)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    yield {"optimizer": optimizer, "scheduler": scheduler}
    yield lambda step: scheduler.step(1.0)


def averaged(model, facts):
    optimizer = sgd(model)
    scheduler, later = cosine(optimizer), SWALR(optimizer, 0.05, anneal_epochs=2)
    yield {"optimizer": optimizer, "scheduler": scheduler, "later": later}
    yield lambda step: (scheduler if step < 5 else later).step()


def wrapped(model, facts):
    optimizer = sgd(model)
    warm, main = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), cosine(optimizer)
    yield {"optimizer": optimizer, "schedule": Wrapper(warm=warm, main=main)}
    yield lambda step: (warm if step < 3 else main).step()


def timm_like(model, facts):
    optimizer = sgd(model)
    scheduler = TimmLike(optimizer)
    yield {"optimizer": optimizer, "scheduler": scheduler}
    yield lambda step: scheduler.step_update(step + 1)


def two_optimizers(model, facts):
    one, two = SGD([model.weight], lr=0.1), SGD([model.bias], lr=0.2)
    schedulers = cosine(one), lr_scheduler.StepLR(two, 1, 0.7)
    yield {"one": one, "two": two, "first": schedulers[0], "second": schedulers[1]}
    yield lambda step: [each.step() for each in schedulers]


def made_before_the_optimizer_is_wrapped(model, facts):
    optimizer = sgd(model)
    scheduler = cosine(optimizer)
    yield {"optimizer": Around(optimizer), "scheduler": scheduler}
    yield lambda step: scheduler.step()


def unused_beside_one_that_was_passed(model, facts):
    """Only told."""
    optimizer = sgd(model)
    scheduler, other = cosine(optimizer), lr_scheduler.ReduceLROnPlateau(optimizer)
    yield {"optimizer": optimizer, "scheduler": scheduler}
    yield lambda step: scheduler.step() or other


def of_a_search_for_the_first_rate(model, facts):
    """Its schedule is over when the training begins, and there still."""
    optimizer = sgd(model)
    search = lr_scheduler.ExponentialLR(optimizer, 2.0)
    if not facts["step"]:
        for _ in range(5):
            search.step()
        optimizer.param_groups[0]["lr"] = 0.1
    scheduler = cosine(optimizer)
    yield {"optimizer": optimizer, "scheduler": scheduler}
    yield lambda step: scheduler.step() or search


def of_an_optimizer_that_is_not_the_snapshots(model, facts):
    other = sgd(torch.nn.Linear(1, 1))
    scheduler = cosine(other)
    yield {"optimizer": sgd(model)}
    yield lambda step: (other.step(), scheduler.step())


# --- right, and told: the script keeps them by itself ---


def unused(model, facts):
    optimizer = sgd(model)
    scheduler = cosine(optimizer)
    yield {"optimizer": optimizer}
    yield lambda step: scheduler


def made_for_the_step(model, facts):
    optimizer = sgd(model)
    yield {"optimizer": optimizer}
    for group in optimizer.param_groups:
        group["initial_lr"] = 0.1
    scheduler = InverseSchedule(optimizer, last_epoch=facts["step"] - 1)
    yield lambda step: scheduler.step()


def brought_forward(model, facts):
    optimizer = sgd(model)
    yield {"optimizer": optimizer}
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = 0.1
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(facts["step"]):
        scheduler.step()
    yield lambda step: scheduler.step()


def given_its_state(model, facts):
    optimizer = sgd(model)
    scheduler = cosine(optimizer)
    facts["state"] = scheduler.state_dict()
    yield {"optimizer": optimizer}
    scheduler.load_state_dict(facts["state"])

    def after_update(step):
        scheduler.step()
        facts["state"] = scheduler.state_dict()

    yield after_update


# --- refused where the run goes on ---


def left_out(model, facts):
    optimizer = sgd(model)
    scheduler = cosine(optimizer)
    yield {"optimizer": optimizer}
    yield lambda step: scheduler.step()


def late(model, facts):
    optimizer = sgd(model)
    yield {"optimizer": optimizer}
    scheduler = cosine(optimizer)
    yield lambda step: scheduler.step()


def late_plateau(model, facts):
    optimizer = sgd(model)
    yield {"optimizer": optimizer}
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    yield lambda step: scheduler.step(1.0)


def late_sequential(model, facts):
    optimizer = sgd(model)
    yield {"optimizer": optimizer}
    parts = [lr_scheduler.ConstantLR(optimizer, 0.5), cosine(optimizer)]
    scheduler = lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])
    yield lambda step: scheduler.step()


def of_one_of_two(model, facts):
    one, two = SGD([model.weight], lr=0.1), SGD([model.bias], lr=0.2)
    schedulers = cosine(one), lr_scheduler.StepLR(two, 1, 0.7)
    yield {"one": one, "two": two, "first": schedulers[0]}
    yield lambda step: [each.step() for each in schedulers]


def of_a_wrapped_optimizer(model, facts):
    optimizer = sgd(model)
    yield {"optimizer": Around(optimizer)}
    scheduler = cosine(optimizer)
    yield lambda step: scheduler.step()


def in_an_attribute_of_the_model(model, facts):
    optimizer = sgd(model)
    model.scheduler = cosine(optimizer)
    yield {"optimizer": optimizer}
    yield lambda step: model.scheduler.step()


def one_an_epoch(model, facts):
    optimizer = sgd(model)
    yield {"optimizer": optimizer}
    schedulers = []

    def after_update(step):
        if not schedulers or step % EPOCH == 0:
            schedulers[:] = [lr_scheduler.ExponentialLR(optimizer, 0.9)]
        schedulers[0].step()

    yield after_update


# --- refused at once ---


def replaced(model, facts):
    optimizer = sgd(model)
    schedulers = [cosine(optimizer)]
    yield {"optimizer": optimizer, "scheduler": schedulers[0]}

    def after_update(step):
        if step == 3:
            schedulers.append(cosine(optimizer))
        schedulers[-1].step()

    yield after_update


def beside(model, facts):
    optimizer = sgd(model)
    schedulers = cosine(optimizer), lr_scheduler.ReduceLROnPlateau(optimizer)
    yield {"optimizer": optimizer, "scheduler": schedulers[0]}
    yield lambda step: (schedulers[0].step(), schedulers[1].step(1.0))


SILENT = (
    *(passed, by_epoch, groups, sequential, chained, warm_restarts, plateau, averaged, wrapped),
    *(timm_like, two_optimizers, made_before_the_optimizer_is_wrapped),
    of_an_optimizer_that_is_not_the_snapshots,
)
RIGHT = (
    *(*SILENT, unused_beside_one_that_was_passed, unused, of_a_search_for_the_first_rate),
    *(made_for_the_step, brought_forward, given_its_state),
)
WRONG = (
    *(left_out, late, late_plateau, late_sequential, of_one_of_two, of_a_wrapped_optimizer),
    *(in_an_attribute_of_the_model, one_an_epoch),
)


@pytest.mark.parametrize("case", RIGHT)
def test_what_goes_on_is_not_refused(tmp_path, capsys, case):
    undisturbed = train(tmp_path / "whole.pt", case)
    for stop in (1, 4, 6):
        path = tmp_path / f"{stop}.pt"
        rates = train(path, case, stop) + train(path, case)
        assert rates == [pytest.approx(rate) for rate in undisturbed]
    has_warning = "was not given the scheduler" in capsys.readouterr().err
    assert has_warning == (case not in (*SILENT, given_its_state))


@pytest.mark.parametrize("case", WRONG)
def test_one_that_was_not_passed_is_told_and_refused_where_the_run_goes_on(tmp_path, capsys, case):
    train(tmp_path / "run.pt", case, 6)
    assert "Snapshot was not given the scheduler" in capsys.readouterr().err
    with pytest.raises(SnapshotError, match=r"at an earlier step, or not at all.* Make it before"):
        train(tmp_path / "run.pt", case)


@pytest.mark.parametrize("case", [left_out, late, late_plateau, by_epoch])
def test_one_that_has_made_no_step_is_not_refused(tmp_path, case):
    """There is nothing of it to lose."""

    def idle(model, facts):
        script = case(model, facts)
        yield next(script)
        after_update = next(script)
        yield lambda step: after_update(step) if step > 4 else None

    undisturbed = train(tmp_path / "whole.pt", idle)
    assert train(tmp_path / "run.pt", idle, 3) + train(tmp_path / "run.pt", idle) == undisturbed


@pytest.mark.parametrize(("case", "updates"), [(replaced, 4), (beside, 1)])
def test_one_in_place_of_the_one_that_was_passed_or_beside_it_is_refused(tmp_path, case, updates):
    train(tmp_path / "run.pt", case, updates)
    with pytest.raises(SnapshotError, match="beside the one that was passed, or in its place"):
        train(tmp_path / "other.pt", case)


def test_snapshots_of_earlier_releases_say_nothing_of_schedulers(tmp_path):
    train(tmp_path / "run.pt", late, 6)
    payload = torch.load(tmp_path / "run.pt", weights_only=True)
    del payload["schedulers"]
    torch.save(payload, tmp_path / "earlier.pt")
    train(tmp_path / "earlier.pt", late)
