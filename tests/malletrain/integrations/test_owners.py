"""Whose checkpoints a run of a trainer goes on from, and which it does not write over."""

from __future__ import annotations

import functools
import shutil
import sys

import pytest
import torch
from torch.utils.data import DataLoader

import malletrain
from malletrain.training import report
from malletrain.training.snapshot_file import SnapshotError
from tests.malletrain.integrations.samples import BATCH, SAMPLES, Net, Numbers
from tests.malletrain.training.worker_side import as_plain_script

pytestmark = pytest.mark.slow


def hugging_face(folder, resume=None):
    """(where it goes on, steps done) of a run that saves every 4 steps, up to step 8."""
    from transformers import Trainer, TrainingArguments

    from malletrain.integrations.transformers import MalleTrainCallback

    args = TrainingArguments(
        str(folder),
        max_steps=8,
        per_device_train_batch_size=BATCH,
        save_strategy="steps",
        save_steps=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    callback = MalleTrainCallback()
    trainer = Trainer(Net(), args, train_dataset=Numbers(), callbacks=[callback])
    path = callback.latest(str(folder)) if resume is None else resume(str(folder))
    trainer.train(resume_from_checkpoint=path)
    return path, trainer.state.global_step


def lightning(folder):
    import lightning.pytorch as pl

    from malletrain.integrations.lightning import MalleTrainCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, _):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.1)

    callback = MalleTrainCallback(folder, every_s=0)
    loader = callback.loader(Numbers(), BATCH)
    path = callback.latest()
    trainer = pl.Trainer(
        max_steps=8,
        accelerator="cpu",
        devices=1,
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Module(), loader, ckpt_path=path)
    return path, trainer.global_step


def accelerate(folder):
    import accelerate

    from malletrain.integrations.accelerate import Guard

    accelerator = accelerate.Accelerator(cpu=True)
    net = Net()
    net, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=0.1))
    sampler = malletrain.ElasticSampler(SAMPLES, global_batch_size=BATCH)
    guard = Guard(accelerator, folder, sampler)
    path = guard.newest() if guard.resume() else None
    steps = 0
    for _ in sampler.epochs(1):
        for batch in DataLoader(Numbers(), batch_sampler=sampler):
            accelerator.backward(net(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            guard.step()
            steps += 1
    guard.save()
    return path, steps


LIBRARIES = {"transformers": hugging_face, "lightning": lightning, "accelerate": accelerate}


@pytest.fixture(params=LIBRARIES)
def train(request, monkeypatch):
    pytest.importorskip(request.param, reason="pip install malletrain[integrations]")
    with as_plain_script(monkeypatch):
        yield LIBRARIES[request.param]


def as_job(monkeypatch, job, rate):
    monkeypatch.setenv("MALLETRAIN_JOB", job)
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", rate])
    monkeypatch.delenv("MALLETRAIN_RESUME_FROM", raising=False)
    monkeypatch.delenv("MALLETRAIN_TRIAL_FOLDER", raising=False)
    report.sentence_keys.clear()


def files(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_another_jobs_checkpoint_is_neither_resumed_from_nor_overwritten(
    train, tmp_path, monkeypatch, capsys
):
    as_job(monkeypatch, "j1", "0.1")
    assert train(tmp_path)[0] is None
    assert train(tmp_path)[0], "its own"
    before = files(tmp_path)
    as_job(monkeypatch, "j2", "0.2")
    with pytest.raises(SnapshotError, match=r"to job j1, and this is job j2.*--resume-from"):
        train(tmp_path)
    as_job(monkeypatch, "j1", "0.2")
    with pytest.raises(SnapshotError, match=r"belongs to an earlier job j1 \(train\.py, with"):
        train(tmp_path)
    assert files(tmp_path) == before
    as_job(monkeypatch, "j2", "0.2")
    monkeypatch.setenv("MALLETRAIN_RESUME_FROM", "j1")
    assert train(tmp_path)[0]
    assert "Going on from the checkpoint of job j1" in capsys.readouterr().err
    with pytest.raises(SnapshotError, match=r"There is no (checkpoint|state) of job j1 in"):
        train(tmp_path / "elsewhere")


def test_outside_malletrain_a_folder_is_used_whoever_wrote_it(train, tmp_path, monkeypatch, capsys):
    as_job(monkeypatch, "j1", "0.1")
    train(tmp_path)
    as_job(monkeypatch, "", "0.2")
    assert train(tmp_path)[0]
    assert "which job j1 wrote" in capsys.readouterr().err


def test_trials_of_a_sweep_have_folders_of_their_own(train, tmp_path, monkeypatch, capsys):
    for number in range(2):
        as_job(monkeypatch, f"j{number}", str(number))
        monkeypatch.setenv("MALLETRAIN_TRIAL_FOLDER", f"trial-{number}")
        assert train(tmp_path)[0] is None
        assert str(tmp_path / f"trial-{number}") in train(tmp_path)[0]
        assert f"{tmp_path}/trial-{number}: each trial" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trial-0", "trial-1"]


def test_two_jobs_that_write_at_one_time_do_not_mix(train, tmp_path, monkeypatch):
    """The other job's first checkpoint appears while this one trains."""
    as_job(monkeypatch, "j1", "0.1")
    train(tmp_path / "theirs")
    before = files(tmp_path / "theirs")
    as_job(monkeypatch, "j2", "0.2")
    forward = Net.forward

    @functools.wraps(forward)  # a trainer looks at what a model takes
    def meanwhile(net, *args, **kwargs):
        shutil.copytree(tmp_path / "theirs", tmp_path / "ours", dirs_exist_ok=True)
        return forward(net, *args, **kwargs)

    monkeypatch.setattr(Net, "forward", meanwhile)
    with pytest.raises(SnapshotError, match="belongs to job j1, and is not overwritten by job j2"):
        train(tmp_path / "ours")
    theirs = {path.name: data for path, data in before.items()}
    ours = {path.name: data for path, data in files(tmp_path / "ours").items()}
    assert ours == theirs


@pytest.mark.parametrize("finder", ["by itself", "by the trainer"])
def test_what_trainer_or_the_script_finds_in_the_folder_is_looked_at_too(
    tmp_path, monkeypatch, finder
):
    pytest.importorskip("transformers", reason="pip install malletrain[integrations]")
    from transformers.trainer_utils import get_last_checkpoint

    resume = get_last_checkpoint if finder == "by itself" else (lambda folder: True)
    with as_plain_script(monkeypatch):
        as_job(monkeypatch, "j1", "0.1")
        assert hugging_face(tmp_path)[1] == 8
        assert hugging_face(tmp_path, resume)[1] == 8
        as_job(monkeypatch, "j2", "0.2")
        with pytest.raises(SnapshotError, match="belongs to job j1"):
            hugging_face(tmp_path, resume)


def test_a_checkpoint_that_another_job_began_to_write_is_its_own(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="pip install malletrain[integrations]")
    from transformers import Trainer

    from malletrain.integrations.transformers import MalleTrainCallback

    def killed(*_):
        raise KeyboardInterrupt

    with as_plain_script(monkeypatch):
        as_job(monkeypatch, "j1", "0.1")
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_save_rng_state", killed)
            with pytest.raises(KeyboardInterrupt):
                hugging_face(tmp_path)
        assert (tmp_path / "checkpoint-4").exists()
        as_job(monkeypatch, "j1", "0.1")
        assert MalleTrainCallback().latest(str(tmp_path)) is None, "its own is not whole"
        as_job(monkeypatch, "j2", "0.2")
        with pytest.raises(SnapshotError, match="belongs to job j1, and is not overwritten"):
            hugging_face(tmp_path)
