"""Checkpoints of the trainers at chosen steps, resumed with other micro-batches as another number
of ranks has them; and those that must not be resumed from.
"""

from __future__ import annotations

import itertools
import json
import shutil

import pytest
import torch

from tests.malletrain.integrations import rescaled
from tests.malletrain.integrations.samples import Net
from tests.malletrain.training.worker_side import as_plain_script


class Stopped(Exception):
    """The launcher ended the training."""


class StopAt:
    """In place of the guard: wants a checkpoint at one step, and ends the training after it."""

    late = False

    def __init__(self, trainer_step):
        self.step_now, self.at = trainer_step

    def step(self, samples):
        return self.wants_checkpoint()

    def wants_checkpoint(self, late=None):
        return self.step_now() == self.at

    def any_rank(self, mine):
        return mine

    def mean(self, mine):
        return mine

    def from_rank_0(self, text):
        return text

    def saved(self, path, began=None, over=False):
        if self.step_now() == self.at and not over:
            raise Stopped


def update(step, optimizer, net):
    """(step, learning rate, samples, random number) of the update that is about to be made."""
    samples, net.seen = sorted(net.seen), []
    return step, optimizer.param_groups[0]["lr"], samples, float(torch.rand(()))


def lightning(folder, per_device, stop, monkeypatch, frequency=1):
    """[(step, learning rate, samples, random number)] until the checkpoint at step ``stop``; the
    weights.
    """
    import lightning.pytorch as pl

    from malletrain.integrations.lightning import MalleTrainCallback

    log = []

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, _):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=rescaled.RATE)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rescaled.rate_at)
            config = {"scheduler": schedule, "interval": "step", "frequency": frequency}
            return [optimizer], [config]

        def on_before_optimizer_step(self, optimizer):
            log.append(update(self.global_step, optimizer, self.net))

    monkeypatch.setattr(
        "malletrain.integrations.lightning.StateGuard",
        lambda: StopAt((lambda: trainer.global_step, stop)),
    )
    callback = MalleTrainCallback(folder)
    trainer = pl.Trainer(
        max_epochs=rescaled.EPOCHS,
        accelerator="cpu",
        devices=1,
        callbacks=[callback],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    module = Module()
    loader = callback.loader(rescaled.data(), per_device, rescaled.GLOBAL_BATCH, seed=7)
    try:
        trainer.fit(module, loader, ckpt_path=callback.latest())
    except Stopped:
        assert trainer.global_step == stop
    return log, module.net.state_dict()


def hugging_face(folder, per_device, stop, monkeypatch, size=rescaled.GLOBAL_BATCH, **options):
    """As :func:`lightning`."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from malletrain.integrations.transformers import MalleTrainCallback

    log, net = [], Net()

    class Note(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, optimizer=None, **_):
            log.append(update(state.global_step, optimizer, net))

    monkeypatch.setattr(
        "malletrain.integrations.transformers.StateGuard",
        lambda: StopAt((lambda: trainer.state.global_step, stop)),
    )
    args = TrainingArguments(
        str(folder),
        num_train_epochs=rescaled.EPOCHS,
        per_device_train_batch_size=per_device,
        learning_rate=rescaled.RATE,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=7,
        **options,
    )
    callback = MalleTrainCallback(global_batch_size=size)
    trainer = Trainer(net, args, train_dataset=rescaled.data(), callbacks=[Note(), callback])
    try:
        trainer.train(resume_from_checkpoint=callback.latest(str(folder)))
    except Stopped:
        assert trainer.state.global_step == stop
    return log, net.state_dict()


@pytest.mark.parametrize("train", [lightning, hugging_face])
def test_a_checkpoint_at_any_step_goes_on_as_if_nothing_had_been(train, tmp_path, monkeypatch):
    """Epochs have 6 steps: their last step, the first after it, twice at the end of one."""
    pytest.importorskip("transformers" if train is hugging_face else "lightning")
    with as_plain_script(monkeypatch):
        expected, weights = train(tmp_path / "undisturbed", 2, 0, monkeypatch)
        assert len(expected) == rescaled.STEPS
        for number, stops in enumerate(([6, 12], [5, 6, 7, 18], [3, 9, 24])):
            log = []
            for per_device, stop in zip([2, 3, 8, 4, 1], [*stops, 0], strict=False):
                part, got = train(tmp_path / f"moved-{number}", per_device, stop, monkeypatch)
                log += part
            assert [step for step, *_ in log] == [step for step, *_ in expected], stops
            for mine, theirs in zip(log, expected, strict=True):
                assert mine[3] == theirs[3], f"noise at step {mine[0]} with stops {stops}"
                assert mine[2] == theirs[2], f"samples at step {mine[0]} with stops {stops}"
                assert mine[1] == pytest.approx(theirs[1]), f"step {mine[0]} with stops {stops}"
            for name, value in weights.items():
                torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5)
    seen = sorted(itertools.chain(*(samples for _, _, samples, _ in expected)))
    assert seen == sorted([*range(rescaled.SAMPLES)] * rescaled.EPOCHS)


def test_the_frequency_of_a_scheduler_of_lightning_counts_steps(tmp_path, monkeypatch):
    """Lightning counts micro-batches, of which a step has fewer on more ranks. The last step of an
    epoch, in which the scheduler is due, has fewer, too.
    """
    pytest.importorskip("lightning", reason="pip install malletrain[integrations]")
    due = [rescaled.rate_at(step // 3) * rescaled.RATE for step in range(rescaled.STEPS)]
    with as_plain_script(monkeypatch):
        for per_device in (8, 2):
            folder = tmp_path / str(per_device)
            log, _ = lightning(folder, per_device, 0, monkeypatch, frequency=3)
            assert [rate for _, rate, *_ in log] == pytest.approx(due), f"{per_device} at once"
        moved, _ = lightning(tmp_path / "moved", 8, 5, monkeypatch, frequency=3)
        more, _ = lightning(tmp_path / "moved", 2, 0, monkeypatch, frequency=3)
    assert [rate for _, rate, *_ in moved + more] == pytest.approx(due)


@pytest.mark.parametrize("options", [{}, {"generator": None}], ids=["default", "generator"])
def test_the_loader_for_lightning_draws_as_often_as_torchs(options, tmp_path):
    """So that a training without a change of nodes draws the numbers that it draws without us."""
    pytest.importorskip("lightning", reason="pip install malletrain[integrations]")
    from malletrain.integrations.lightning import MalleTrainCallback

    def drawn(loader):
        torch.manual_seed(0)
        iter(loader)
        return float(torch.rand(()))

    own = {name: torch.Generator() for name in options}
    ours = MalleTrainCallback(tmp_path).loader(torch.arange(8.0), batch_size=4, **own)
    assert drawn(ours) == drawn(torch.utils.data.DataLoader(torch.arange(8.0), batch_size=4, **own))


@pytest.mark.parametrize("stop", [5, 6])
def test_trainer_draws_on_where_its_checkpoint_has_no_random_states_of_a_rank(
    stop, tmp_path, monkeypatch
):
    """In an epoch and at its end. Several ranks save theirs under other names than one rank."""
    pytest.importorskip("transformers", reason="pip install malletrain[integrations]")
    with as_plain_script(monkeypatch):
        expected, _ = hugging_face(tmp_path / "undisturbed", 8, 0, monkeypatch)
        log, _ = hugging_face(tmp_path / "moved", 8, stop, monkeypatch)
        checkpoint = tmp_path / "moved" / f"checkpoint-{stop}"
        (checkpoint / "rng_state.pth").rename(checkpoint / "rng_state_0.pth")
        more, _ = hugging_face(tmp_path / "moved", 8, 0, monkeypatch)
    assert [noise for *_, noise in log + more] == [noise for *_, noise in expected]


def test_hugging_face_checkpoints_whose_steps_count_other_samples(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="pip install malletrain[integrations]")
    with as_plain_script(monkeypatch):
        hugging_face(tmp_path, 2, 8, monkeypatch)
        with pytest.raises(ValueError, match=r"global_batch_size 8, now 9.*another output folder"):
            hugging_face(tmp_path, 2, 0, monkeypatch, size=9)
        log, _ = hugging_face(tmp_path, 8, 9, monkeypatch, size=None)
        assert len(log[0][2]) == 8, "the checkpoint's, where the script gives none"
        with pytest.raises(ValueError, match="ignore_data_skip"):
            hugging_face(tmp_path, 2, 0, monkeypatch, ignore_data_skip=True)
        checkpoint = tmp_path / "checkpoint-9"
        (checkpoint / "malletrain.json").unlink()
        log, _ = hugging_face(tmp_path, 2, 10, monkeypatch)
        assert log[0][0] == 8, "9 was not written to its end"
        for folder in tmp_path.glob("checkpoint-*"):
            shutil.rmtree(folder) if folder != checkpoint else None
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        (checkpoint / "trainer_state.json").write_text(json.dumps(state | {"max_steps": 48}))
        with pytest.raises(ValueError, match="its 48 steps are not those of this run"):
            hugging_face(tmp_path, 2, 0, monkeypatch)


def test_a_trainer_that_was_made_without_the_callback_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="pip install malletrain[integrations]")
    from transformers import Trainer, TrainingArguments

    from malletrain.integrations.transformers import MalleTrainCallback

    with as_plain_script(monkeypatch):
        args = TrainingArguments(
            str(tmp_path), max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True
        )
        trainer = Trainer(Net(), args, train_dataset=rescaled.data())
        callback = MalleTrainCallback()
        trainer.add_callback(callback)
        with pytest.raises(RuntimeError, match=r"callback\.attach\(trainer\)"):
            trainer.train()
        callback.attach(trainer)
        trainer.train()
        assert trainer.state.global_step == 2


def test_lightning_says_what_it_cannot_keep(tmp_path, monkeypatch):
    pytest.importorskip("lightning", reason="pip install malletrain[integrations]")
    import lightning.pytorch as pl

    from malletrain.integrations.lightning import MalleTrainCallback

    class Module(pl.LightningModule):
        automatic_optimization = True

        def training_step(self, batch, _):
            raise AssertionError("not reached")

        def configure_optimizers(self):
            return torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])

    def fit(with_loader, data=None, **options):
        callback = MalleTrainCallback(tmp_path)
        loader = callback.loader(rescaled.data(), 2, 8) if with_loader else data
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            callbacks=[callback],
            default_root_dir=tmp_path,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            max_epochs=1,
            **options,
        )
        trainer.fit(Module(), data or loader, ckpt_path=callback.latest())

    plain = torch.utils.data.DataLoader(rescaled.data(), batch_size=2)
    with as_plain_script(monkeypatch):
        with pytest.raises(ValueError, match=r"must come from callback\.loader"):
            fit(False, plain)
        with pytest.raises(ValueError, match=r"what callback\.loader\(\) returned"):
            fit(True, plain)
        with pytest.raises(ValueError, match="Leave accumulate_grad_batches out"):
            fit(True, accumulate_grad_batches=2)


def test_a_folder_without_a_record_and_state_is_no_hugging_face_checkpoint(tmp_path, monkeypatch):
    """A process that is killed when it has made the folder leaves it."""
    pytest.importorskip("transformers", reason="pip install malletrain[integrations]")
    from malletrain.integrations.transformers import MalleTrainCallback

    with as_plain_script(monkeypatch):
        torn = tmp_path / "checkpoint-2"
        torn.mkdir()
        assert MalleTrainCallback().latest(str(tmp_path)) is None
        (torn / "model.safetensors").touch()
        assert MalleTrainCallback().latest(str(tmp_path)) is None
        (torn / "trainer_state.json").write_text("{}")
        assert MalleTrainCallback().latest(str(tmp_path)) == str(torn), "it is of Trainer alone"
