"""Schedulers that set rates and are not saved: told, or refused where going on would go wrong."""

from __future__ import annotations

import pytest
import torch
from torch.optim import lr_scheduler

import malletrain
from malletrain.training.snapshot_file import SnapshotError


class Script:
    """One process that trains epochs of four steps."""

    def __init__(self, path) -> None:
        self.path = path
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.sampler = malletrain.ElasticSampler(8, global_batch_size=2)
        self.batches = iter(())

    def begin(self, **objects) -> bool:
        self.snapshot = malletrain.Snapshot(
            self.path,
            every_s=3600.0,
            model=self.model,
            optimizer=self.optimizer,
            sampler=self.sampler,
            **objects,
        )
        return self.snapshot.restore()

    def cosine(self, **options) -> lr_scheduler.LRScheduler:
        return lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=8, **options)

    def step(self, scheduler=None) -> float:
        if next(self.batches, None) is None:
            self.batches = iter(self.sampler)
            next(self.batches)
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 1)).sum().backward()
        self.optimizer.step()
        if scheduler is not None:
            scheduler.step()
        self.sampler.advance()
        self.snapshot.step()
        return self.optimizer.param_groups[0]["lr"]


def stopped(path, steps: int) -> None:
    """A run that has ended after so many steps."""
    script = Script(path)
    scheduler = script.cosine()
    script.begin(scheduler=scheduler)
    for _ in script.sampler.epochs(1):
        for _step in range(steps):
            script.step(scheduler)
        script.snapshot.save()
        break


def test_one_that_was_passed_is_no_matter(tmp_path, capfd):
    stopped(tmp_path / "run.pt", 2)
    script = Script(tmp_path / "run.pt")
    scheduler = script.cosine()
    assert script.begin(scheduler=scheduler)
    rates = [script.step(scheduler) for _ in range(2)]
    assert rates == pytest.approx([0.06913417, 0.05])
    assert "was not given" not in capfd.readouterr().out


def test_one_within_another_and_one_within_a_wrapper_are_passed(tmp_path, capfd):
    class Wrapper:
        def __init__(self, scheduler) -> None:
            self.scheduler = scheduler

        def state_dict(self):
            return self.scheduler.state_dict()

        def load_state_dict(self, state) -> None:
            self.scheduler.load_state_dict(state)

    script = Script(tmp_path / "run.pt")
    parts = [lr_scheduler.ConstantLR(script.optimizer, 0.5), script.cosine()]
    whole = lr_scheduler.SequentialLR(script.optimizer, parts, milestones=[2])
    script.begin(scheduler=whole)
    for _ in range(3):
        script.step(whole)
    script = Script(tmp_path / "other.pt")
    inner = script.cosine()
    script.begin(scheduler=Wrapper(inner))
    for _ in range(3):
        script.step(inner)
    assert "was not given" not in capfd.readouterr().out


@pytest.mark.parametrize("after_restore", [True, False])
def test_one_that_was_not_passed_is_told_and_refused_where_the_run_goes_on(
    tmp_path, capfd, after_restore
):
    def begun() -> tuple[Script, lr_scheduler.LRScheduler]:
        script = Script(tmp_path / "run.pt")
        scheduler = None if after_restore else script.cosine()
        script.begin()
        return script, scheduler or script.cosine()

    script, scheduler = begun()
    for _ in range(2):
        script.step(scheduler)
    assert "was not given it" in capfd.readouterr().out
    script.snapshot.save()
    script, scheduler = begun()
    with pytest.raises(SnapshotError, match=r"\(CosineAnnealingLR\) .* begins anew"):
        script.step(scheduler)


def test_one_in_place_of_the_one_that_was_passed_is_refused(tmp_path):
    script = Script(tmp_path / "run.pt")
    first = script.cosine()
    script.begin(scheduler=first)
    script.step(first)
    second = script.cosine()
    script.step(second)
    with pytest.raises(SnapshotError, match="in place of, the one that it was given"):
        script.step(second)


def test_one_made_for_the_step_or_given_its_state_by_the_script_goes_on(tmp_path):
    stopped(tmp_path / "run.pt", 2)
    script = Script(tmp_path / "run.pt")
    assert script.begin()
    script.optimizer.param_groups[0].setdefault("initial_lr", 0.1)
    scheduler = script.cosine(last_epoch=2)
    script.step(scheduler)
    script = Script(tmp_path / "run.pt")
    assert script.begin()
    scheduler = script.cosine()
    scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": 2})
    script.step(scheduler)


def test_one_made_at_the_top_of_an_epoch_is_that_epochs(tmp_path):
    """Resumed within the epoch it would begin anew; at its start it is right."""
    script = Script(tmp_path / "run.pt")
    script.begin()
    for _ in script.sampler.epochs(1):
        scheduler = script.cosine()
        for _step in range(4):
            script.step(scheduler)
    script.snapshot.save()
    script = Script(tmp_path / "run.pt")
    assert script.begin()
    for _ in script.sampler.epochs(2):
        scheduler = script.cosine()
        for _step in range(2):
            script.step(scheduler)
        script.snapshot.save()
        break
    script = Script(tmp_path / "run.pt")
    assert script.begin()
    for _ in script.sampler.epochs(2):
        scheduler = script.cosine()
        with pytest.raises(SnapshotError, match="begins anew"):
            script.step(scheduler)
        break
