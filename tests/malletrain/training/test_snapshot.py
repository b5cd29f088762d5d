"""Snapshot: what is saved comes back, at any wrapping and world size; what cannot be saved stops
nothing; drains are served.
"""

import math
import os
import random
import shutil
import subprocess

import numpy
import pytest
import torch
from torch import nn

import malletrain
from malletrain import Snapshot, SnapshotError
from malletrain.protocol.worker_channel import (
    Capable,
    ModelFacts,
    SnapshotTaken,
    StartupMark,
    WorkerProgress,
)
from malletrain.training import snapshot_file
from tests.malletrain.training.test_snapshot_file import small_disk
from tests.malletrain.training.worker_side import as_plain_script, as_worker


@pytest.fixture
def agent(monkeypatch):
    with as_worker(monkeypatch) as agent:
        yield agent


@pytest.fixture
def plain(monkeypatch):
    with as_plain_script(monkeypatch):
        yield


class Training:
    """A small training run with everything a snapshot carries: momentum, dropout, a scheduler, a
    sampler and all generators.
    """

    def __init__(self, path, seed=0, **options):
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.sampler = malletrain.ElasticSampler(50, batch_size=10, seed=seed, rank=0, world_size=1)
        self.facts = {"best": 0.0}
        self.snapshot = Snapshot(
            path,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            sampler=self.sampler,
            facts=self.facts,
            **options,
        )

    def train(self, steps):
        for _ in range(steps):
            batch = torch.tensor(next(iter(self.sampler)), dtype=torch.float32)
            noise = random.random() + numpy.random.random()
            loss = self.model(batch[:, None] * torch.ones(4) / 50 + noise).square().sum()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.facts["best"] = float(loss.detach())
            self.sampler.advance()
        return self

    def state(self):
        return (
            [tensor.tolist() for tensor in self.model.state_dict().values()],
            self.scheduler.get_last_lr(),
            self.sampler.state_dict(),
            dict(self.facts),
        )


@pytest.mark.usefixtures("plain")
def test_an_interrupted_run_ends_as_an_uninterrupted_one(tmp_path):
    undisturbed = Training(tmp_path / "none.pt").train(13).state()
    path = tmp_path / "x.pt"
    first = Training(path)
    assert not first.snapshot.restore()
    assert first.train(6).snapshot.save()
    first.train(3)  # lost
    second = Training(path, seed=99)
    assert second.snapshot.restore()
    assert second.train(7).state() == undisturbed


@pytest.mark.usefixtures("plain")
def test_a_damaged_newest_snapshot_is_passed_over_and_both_are_named(tmp_path, capsys):
    path = tmp_path / "x.pt"
    run = Training(path).train(2)
    run.snapshot.save()
    good = run.state()
    run.train(2).snapshot.save()
    os.truncate(path, 500)
    again = Training(path, seed=5)
    assert again.snapshot.restore()
    assert again.state() == good
    errors = capsys.readouterr().err
    assert f"{path} is damaged" in errors
    assert f"Going on from {path}.prev" in errors
    again.train(1).snapshot.save()
    assert (
        snapshot_file.read(f"{path}.prev")["objects"]["sampler"] == good[2]
    )  # the damaged one did not push it out
    os.remove(path)
    assert Training(path).snapshot.restore()
    assert f"{path} is absent" in capsys.readouterr().err


@pytest.mark.usefixtures("plain")
def test_no_good_snapshot_is_not_a_new_run(tmp_path):
    path = tmp_path / "x.pt"
    path.write_bytes(b"garbage")
    with pytest.raises(
        SnapshotError, match=f"{path} is damaged.*No good snapshot is left. To train anew"
    ) as caught:
        Training(path).snapshot.restore()
    assert "move it away" in str(caught.value)


class Stateful:
    def state_dict(self):
        return {}

    load_state_dict = state_dict


class ZeroRedundancyOptimizer(Stateful):
    """As torch's."""


class FullyShardedDataParallel(Stateful):
    """As torch's."""


class DeepSpeedEngine(Stateful):
    """As DeepSpeed's."""


@pytest.mark.parametrize(
    ("error", "complaint", "arguments"),
    [
        (ValueError, "nothing to save", {}),
        (ValueError, "every_s must be", {"every_s": -1, "facts": {}}),
        (ValueError, "every_s must be", {"every_s": math.nan, "facts": {}}),
        (ValueError, "keep must be", {"keep": -1, "facts": {}}),
        (TypeError, r"epoch is a int without state_dict", {"epoch": 3}),
        (
            TypeError,
            "optimizer is a ZeroRedundancyOptimizer, which rank 0 cannot save alone",
            {"optimizer": ZeroRedundancyOptimizer()},
        ),
        (
            TypeError,
            r"model is a FullyShardedDataParallel.*FSDP1 .* shard it with .*fully_shard \(FSDP2\)",
            {"model": FullyShardedDataParallel()},
        ),
        (
            TypeError,
            "model is a DeepSpeedEngine.*instead of ZeRO-3 shard it with .*fully_shard.*ZeRO-1",
            {"model": DeepSpeedEngine()},
        ),
        (TypeError, "optimizers is a list. Pass each .* a name of its own", {"optimizers": []}),
        (TypeError, "pair is a tuple. Pass each of its items", {"pair": ({}, {})}),
    ],
)
def test_what_cannot_work_is_refused_at_once(tmp_path, error, complaint, arguments):
    with pytest.raises(error, match=complaint):
        Snapshot(tmp_path / "x.pt", **arguments)


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    with as_worker(monkeypatch, rank=1, world=2):
        snapshot = Snapshot(tmp_path / "x.pt", every_s=0, facts={})
        assert not snapshot.save()
        snapshot.step()
        snapshot.step()
    assert os.listdir(tmp_path) == []


def test_saves_are_reported_with_their_size_and_the_work_they_hold(agent, tmp_path):
    snapshot = Snapshot(tmp_path / "x.pt", model=nn.Linear(10, 10))
    snapshot.restore()
    malletrain.report(30)
    malletrain.report(31)
    assert snapshot.save()
    messages = agent.received()
    (taken,) = [message for message in messages if isinstance(message, SnapshotTaken)]
    assert (taken.saved, taken.path, taken.samples, taken.steps) == (
        True,
        str(tmp_path / "x.pt"),
        61,
        2,
    )
    assert taken.bytes == os.path.getsize(tmp_path / "x.pt")
    assert taken.seconds > 0
    assert [message.name for message in messages if isinstance(message, StartupMark)] == [
        "restoring",
        "restored",
        "first",
    ]
    assert [message for message in messages if isinstance(message, WorkerProgress)][
        -1
    ].samples == 61  # flushed before


def test_step_announces_itself_once_and_saves_when_due(agent, tmp_path):
    snapshot = Snapshot(tmp_path / "x.pt", every_s=math.inf, model=nn.Linear(10, 10))
    for _ in range(3):
        snapshot.step()
    assert [type(message) for message in agent.received()] == [Capable, ModelFacts]
    assert os.listdir(tmp_path) == []
    snapshot = Snapshot(tmp_path / "x.pt", every_s=0, model=nn.Linear(10, 10))
    snapshot.step()
    snapshot.step()
    messages = agent.received()
    assert [type(message) for message in messages] == [
        Capable,
        ModelFacts,
        SnapshotTaken,
        SnapshotTaken,
    ]
    assert messages[1].parameters == 110


# --- when it cannot be written ---


def failures(agent):
    return [message.sentence for message in agent.received(SnapshotTaken) if not message.saved]


def test_a_full_disk_stops_nothing_and_is_told_once(agent, tmp_path, capsys):
    with small_disk(tmp_path):
        path = tmp_path / "x.pt"
        model = nn.Linear(100, 100)
        facts = {"pad": torch.zeros(10)}
        snapshot = Snapshot(path, every_s=0, model=model, facts=facts)
        snapshot.step()
        assert failures(agent) == []
        facts["pad"] = torch.zeros(1_000_000)
        for _ in range(3):
            snapshot.step()
        (sentence,) = failures(agent)
        assert f"Snapshot to {path} failed: No space left on device. Free space there" in sentence
        assert "The last good one, saved " in sentence
        assert "training goes on" in sentence
        assert capsys.readouterr().err == f"malletrain: {sentence}\n"
        assert sorted(os.listdir(tmp_path)) == ["x.pt"]
        assert snapshot_file.read(str(path))["objects"]["facts"]["pad"].numel() == 10
        facts["pad"] = torch.zeros(20)
        snapshot.step()
        assert "work again" in capsys.readouterr().err
        assert snapshot_file.read(str(path))["objects"]["facts"]["pad"].numel() == 20


def test_a_read_only_file_system_stops_nothing(agent, tmp_path):
    path = tmp_path / "x.pt"
    snapshot = Snapshot(path, every_s=0, facts={"number": 1})
    with small_disk(tmp_path):
        assert snapshot.save()
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        assert not snapshot.save()
        assert snapshot_file.read(str(path))["objects"]["facts"] == {"number": 1}
    (sentence,) = failures(agent)
    assert (
        "Read-only file system. Give Snapshot a path on a file system that can be written."
        in sentence
    )


def test_a_path_below_a_file_stops_nothing(agent, tmp_path):
    (tmp_path / "file").write_text("")
    snapshot = Snapshot(tmp_path / "file" / "x.pt", every_s=0, facts={})
    snapshot.step()
    snapshot.step()
    (sentence,) = failures(agent)
    assert "A part of the path is a file" in sentence
    assert "There is none yet" in sentence


class Moody:
    mood = "no memory"

    def state_dict(self):
        raise RuntimeError(self.mood)

    load_state_dict = state_dict


def test_each_cause_is_told_once(agent, tmp_path, capsys):
    moody = Moody()
    snapshot = Snapshot(tmp_path / "x.pt", every_s=0, moody=moody)
    for mood in ("no memory", "no memory", "no luck", "no memory"):
        moody.mood = mood
        assert not snapshot.save()
    assert len(failures(agent)) == 2
    errors = capsys.readouterr().err
    assert errors.count("RuntimeError: no memory") == errors.count("RuntimeError: no luck") == 1


def test_a_process_left_over_from_an_earlier_round_does_not_overwrite(tmp_path, monkeypatch):
    path = tmp_path / "x.pt"
    with as_worker(monkeypatch, generation=3):
        old = Snapshot(path, facts={"who": "old"})
        old.save()
        with as_worker(monkeypatch, generation=4):
            facts = {"who": "new"}
            new = Snapshot(path, facts=facts)
            assert new.restore()
            facts["who"] = "new"
            assert new.save()
        monkeypatch.setenv("MALLETRAIN_GENERATION", "3")
        assert not old.save()
    assert snapshot_file.read(str(path))["objects"]["facts"] == {"who": "new"}
    with as_worker(
        monkeypatch, generation=4
    ):  # its own file, or one that came from elsewhere but not from a later round
        shutil.copy(path, tmp_path / "copy")
        os.replace(tmp_path / "copy", path)
        assert new.save()


def test_parameters_that_would_not_come_back_are_told_of(tmp_path, plain, capsys):
    model, criterion = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    for objects in ({"model": model}, {"model": model, "criterion": criterion}):
        Snapshot(tmp_path / "run.pt", every_s=math.inf, optimizer=optimizer, **objects).step()
        errors = capsys.readouterr().err
        assert ("'optimizer' trains 2 parameters that are of no module" in errors) is (
            "criterion" not in objects
        )
