"""A change of nodes at each kind of step: what the trainers do after a step and at an epoch's end
(evaluation, callbacks, logs) is done once, and goes on with the state that it had.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from malletrain.protocol import env
from malletrain.protocol.flags import FlagsWriter
from malletrain.training import report
from malletrain.training.snapshot_file import SnapshotError
from tests.forked import run_ranks
from tests.malletrain.integrations import rescaled
from tests.malletrain.integrations.samples import Net, Numbers
from tests.malletrain.integrations.test_checkpoints import StopAt, Stopped
from tests.malletrain.training.worker_side import as_plain_script
from tests.selection import every_change

pytestmark = pytest.mark.slow

STOPS = (2, 5, 6, 7, 9, 12, 18, 24)
"""Epochs have 6 steps: within one, before its last step, in it, after it, at the end of all."""
LOSSES = {3: 9.0, 6: 5.0, 9: 6.0, 12: 3.0, 15: 4.0, 18: 3.5, 21: 8.0, 24: 8.0}
"""What an evaluation after a step finds: two that are not better, twice."""


def hugging_face(folder, stop, monkeypatch, **options):
    """What happened until the checkpoint at step ``stop``; what the trainer says at its end."""
    from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

    from malletrain.integrations.transformers import MalleTrainCallback

    log = []

    class Note(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics=None, **_):
            log.append(("evaluation", state.global_step, metrics["eval_score"], state.best_metric))

        def on_log(self, args, state, control, logs=None, **_):
            if "loss" in logs:
                log.append(("log", state.global_step, round(logs["loss"], 4)))

        def on_epoch_begin(self, args, state, control, **_):
            log.append(("epoch begins", state.global_step)) if state.global_step % 6 == 0 else None

        def on_epoch_end(self, args, state, control, **_):
            log.append(("epoch ends", state.global_step))

    monkeypatch.setattr(
        "malletrain.integrations.transformers.StateGuard",
        lambda: StopAt((lambda: trainer.state.global_step, stop)),
    )
    args = TrainingArguments(
        str(folder),
        num_train_epochs=rescaled.EPOCHS,
        per_device_train_batch_size=4,
        learning_rate=rescaled.RATE,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=False,
        logging_steps=5,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=7,
        **options,
    )
    callback = MalleTrainCallback(global_batch_size=rescaled.GLOBAL_BATCH)
    trainer = Trainer(
        Net(),
        args,
        train_dataset=rescaled.data(),
        eval_dataset=Subset(Numbers(), range(4)),
        compute_metrics=lambda _: {"score": LOSSES[trainer.state.global_step]},
        callbacks=[Note(), EarlyStoppingCallback(2), callback],
    )
    try:
        trainer.train(resume_from_checkpoint=callback.latest(str(folder)))
    except Stopped:
        return log, None
    state = trainer.state
    weights = trainer.model.layer.weight.detach().clone()
    return log, (state.global_step, state.best_metric, state.best_global_step, weights)


@pytest.mark.parametrize(
    ("strategy", "every"),
    [
        pytest.param("epoch", {}, marks=pytest.mark.thorough),
        ("steps", {"eval_steps": 3, "save_steps": 3}),
    ],
)
def test_trainer_evaluates_logs_and_stops_early_as_if_nothing_had_been(
    tmp_path, monkeypatch, strategy, every
):
    pytest.importorskip("transformers", reason="pip install malletrain[integrations]")
    options = {"eval_strategy": strategy, "save_strategy": strategy, **every}
    with as_plain_script(monkeypatch):
        expected, end = hugging_face(tmp_path / "undisturbed", 0, monkeypatch, **options)
        assert end[:3] == ((24, 3.0, 12) if strategy == "epoch" else (18, 3.0, 12))
        for stop in STOPS:
            folder = tmp_path / f"moved-{stop}"
            log, over = hugging_face(folder, stop, monkeypatch, **options)
            if over is None:
                more, over = hugging_face(folder, 0, monkeypatch, **options)
                log += more
            assert log == expected, f"a change after step {stop}"
            assert over[:3] == end[:3], f"a change after step {stop}"
            torch.testing.assert_close(over[3], end[3], msg=f"a change after step {stop}")
        nothing, again = hugging_face(folder, 0, monkeypatch, **options)
        assert (nothing, again[:3]) == ([], end[:3]), "it had ended"


def test_trainer_without_optimizer_in_its_checkpoints_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="pip install malletrain[integrations]")
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "save_only_model": True}
    with (
        as_plain_script(monkeypatch),
        pytest.raises(ValueError, match="save_only_model"),
    ):
        hugging_face(tmp_path, 0, monkeypatch, **options)


def lightning(folder, per_device, stop, monkeypatch, more=(), **options):
    """As :func:`hugging_face`; ``more``: callbacks."""
    import lightning.pytorch as pl

    from malletrain.integrations.lightning import MalleTrainCallback

    log = []

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()
            self.share = 1.0

        def training_step(self, batch, _):
            return self.net(**batch)["loss"]

        def on_train_epoch_start(self):
            log.append(("epoch begins", self.current_epoch, self.global_step))

        def on_train_epoch_end(self):
            log.append(("epoch ends", self.current_epoch, self.global_step))

        def validation_step(self, batch, _):
            self.log("score", LOSSES.get(self.global_step, 10.0), batch_size=1)

        def on_validation_epoch_end(self):
            log.append(("validation", self.current_epoch, self.global_step))

        def on_before_optimizer_step(self, optimizer):
            log.append(("rate", self.global_step, optimizer.param_groups[0]["lr"]))

        def on_train_end(self):
            log.append(("end", self.global_step, early.wait_count, best.best_model_score.item()))

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=rescaled.RATE)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return [optimizer], [{"scheduler": plateau, "monitor": "score", "strict": False}]

    monkeypatch.setattr(
        "malletrain.integrations.lightning.StateGuard",
        lambda: StopAt((lambda: trainer.global_step, stop)),
    )
    early = pl.callbacks.EarlyStopping("score", patience=2)
    best = pl.callbacks.ModelCheckpoint(folder / "best", monitor="score")
    rates = pl.callbacks.LearningRateMonitor("step")
    logger = Rows()
    callback = MalleTrainCallback(folder)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[early, best, rates, callback, *more],
        logger=logger.build(log),
        log_every_n_steps=2,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": rescaled.EPOCHS, **options},
    )
    module = Module()
    loader = callback.loader(rescaled.data(), per_device, rescaled.GLOBAL_BATCH, seed=7)
    validation = DataLoader(Subset(Numbers(), range(4)), batch_size=4)
    try:
        trainer.fit(module, loader, validation, ckpt_path=callback.latest())
    except Stopped:
        return log, None
    return log, (trainer.global_step, module.net.layer.weight.detach().clone())


class Rows:
    """A logger of Lightning's whose rows are a list."""

    def build(self, log):
        from lightning.pytorch.loggers.logger import Logger

        class Listed(Logger):
            name, version = "rows", 0

            def log_metrics(self, metrics, step=None):
                log.append(("row", step, sorted(metrics)))

            def log_hyperparams(self, *args, **kwargs):
                pass

        return Listed()


LIMITS = {
    "none": {},
    "steps": {"limit_train_batches": 4, "val_check_interval": 2},
    "shares": {"limit_train_batches": 0.7, "val_check_interval": 0.5},
    "every other epoch": {"check_val_every_n_epoch": 2},
    "over epochs": {"check_val_every_n_epoch": None, "val_check_interval": 5},
    "max_steps": {"max_steps": 15},
}


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param(limits, marks=() if limits in ("steps", "max_steps") else pytest.mark.thorough)
        for limits in LIMITS
    ],
)
def test_lightning_validates_logs_and_stops_as_if_nothing_had_been(tmp_path, monkeypatch, limits):
    pytest.importorskip("lightning", reason="pip install malletrain[integrations]")
    options = LIMITS[limits]
    with as_plain_script(monkeypatch):
        expected, end = lightning(tmp_path / "undisturbed", 8, 0, monkeypatch, **options)
        # micro-batches as other numbers of ranks have them
        for stop, sizes in zip(STOPS, ((8, 2), (3, 8), (2, 3), (8, 1)) * 2, strict=True):
            folder = tmp_path / f"moved-{stop}"
            log, over = lightning(folder, sizes[0], stop, monkeypatch, **options)
            if over is None:
                more, over = lightning(folder, sizes[1], 0, monkeypatch, **options)
                log += more
            if over[0] == stop:
                nothing, again = lightning(folder, sizes[1], 0, monkeypatch, **options)
                assert (nothing, again[0]) == ([], end[0]), "it had ended"
            assert log == expected, f"a change after step {stop}"
            assert over[0] == end[0]
            torch.testing.assert_close(over[1], end[1], rtol=1e-4, atol=1e-5)


def test_the_limits_of_lightning_count_steps_over_all_ranks(tmp_path, monkeypatch):
    pytest.importorskip("lightning", reason="pip install malletrain[integrations]")
    with as_plain_script(monkeypatch):
        log, (steps, _) = lightning(
            *(tmp_path, 2, 0, monkeypatch),
            limit_train_batches=4,
            val_check_interval=2,
            max_epochs=2,
        )
    assert steps == 8
    assert [entry[2] for entry in log if entry[0] == "validation"] == [2, 4, 6, 8]


@pytest.mark.thorough
def test_lightning_says_which_limits_it_cannot_keep(tmp_path, monkeypatch):
    pytest.importorskip("lightning", reason="pip install malletrain[integrations]")
    with as_plain_script(monkeypatch):
        monkeypatch.setenv("MALLETRAIN_MAX_WORLD_SIZE", "3")
        for options, sentence in (
            ({"limit_val_batches": 2}, "limit_val_batches=2 counts the batches of a rank"),
            ({"overfit_batches": 2}, "overfit_batches takes the same batches"),
            ({"val_check_interval": 7}, "val_check_interval=7 is more than the 6 steps"),
        ):
            with pytest.raises(ValueError, match=sentence):
                lightning(tmp_path, 2, 0, monkeypatch, **options)


def test_what_a_callback_sets_up_is_what_the_script_began_with(tmp_path, monkeypatch):
    """A share that it sets to 0, and to what the module had from epoch 1 on."""
    pl = pytest.importorskip("lightning.pytorch", reason="pip install malletrain[integrations]")
    shares = []

    class Later(pl.Callback):
        def setup(self, trainer, pl_module, stage):
            pl_module.share = 0.0

        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                pl_module.share = 1.0

        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            shares.append((trainer.global_step, pl_module.share))

    with as_plain_script(monkeypatch):
        lightning(tmp_path, 8, 8, monkeypatch, [Later()], max_epochs=2)
        lightning(tmp_path, 8, 0, monkeypatch, [Later()], max_epochs=2)
    assert shares == [(step, float(step >= 6)) for step in range(12)]


def test_layers_that_only_some_ranks_would_train_together_are_refused(tmp_path, monkeypatch):
    pl = pytest.importorskip("lightning.pytorch", reason="pip install malletrain[integrations]")
    later = pl.callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1)
    with as_plain_script(monkeypatch):
        monkeypatch.setenv("MALLETRAIN_MAX_WORLD_SIZE", "3")
        with pytest.raises(ValueError, match=r"BackboneFinetuning .* are not averaged over the"):
            lightning(tmp_path, 2, 0, monkeypatch, [later])


def test_a_search_at_each_start_is_refused(tmp_path, monkeypatch):
    """A run that resumed in it began at step 0, with a new optimizer."""
    pl = pytest.importorskip("lightning.pytorch", reason="pip install malletrain[integrations]")
    from malletrain.integrations.lightning import _check_searches

    search = pl.callbacks.LearningRateFinder()
    refusal = pytest.raises(ValueError, match="LearningRateFinder searches at each start")
    with as_plain_script(monkeypatch), refusal:
        lightning(tmp_path, 2, 0, monkeypatch, [search])
    # Lightning itself refuses this one where the loader is passed to fit().
    trainer = pl.Trainer(logger=False, callbacks=[pl.callbacks.BatchSizeFinder()])
    with pytest.raises(ValueError, match="BatchSizeFinder searches at each start"):
        _check_searches(trainer)
    vars(trainer.callbacks[0])["_early_exit"] = True  # as a Tuner does
    _check_searches(trainer)


def test_a_loader_that_is_made_while_lightning_trains_is_refused(tmp_path, monkeypatch):
    """Of growing data, say; a loader before the first epoch does not help."""
    pl = pytest.importorskip("lightning.pytorch", reason="pip install malletrain[integrations]")
    from malletrain.integrations.lightning import MalleTrainCallback

    class Growing(pl.LightningModule):
        def training_step(self, batch, _):
            raise AssertionError("it trains")

        def configure_optimizers(self):
            return None

        def train_dataloader(self):
            return callback.loader(rescaled.data(), 2, 8)

    with as_plain_script(monkeypatch):
        for before, sentence in ((False, "must come from"), (True, "called while trainer.fit")):
            callback = MalleTrainCallback(tmp_path)
            if before:
                callback.loader(rescaled.data(), 2, 8)
            trainer = pl.Trainer(
                accelerator="cpu",
                devices=1,
                callbacks=[callback],
                logger=False,
                max_epochs=2,
                reload_dataloaders_every_n_epochs=1,
            )
            with pytest.raises(ValueError, match=f"{sentence}.* Make one loader before"):
                trainer.fit(Growing())


def test_a_dataset_without_a_length_is_refused_in_a_sentence():
    pytest.importorskip("lightning", reason="pip install malletrain[integrations]")
    from malletrain.integrations.lightning import MalleTrainCallback

    class Lines(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from range(10)

    with pytest.raises(TypeError, match=r"needs a dataset with a length and indices; Lines is"):
        MalleTrainCallback("x").loader(Lines(), batch_size=2)


def accelerated(folder, stop, automatic, saves, monkeypatch, dies_in=None, registers=True):
    """What happened until the state of step ``stop`` was saved; the weights of both models."""
    import accelerate
    from accelerate.utils import ProjectConfiguration

    import malletrain
    from malletrain.integrations.accelerate import Guard

    log, step = [], [0]
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=automatic, total_limit=2)
    accelerator = accelerate.Accelerator(cpu=True, project_config=project)
    first, second = Net(), Net()
    first, second, one, two = accelerator.prepare(
        *(first, second, torch.optim.Adam(first.parameters(), lr=0.1)),
        torch.optim.SGD(second.parameters(), lr=0.01),
    )
    schedule = torch.optim.lr_scheduler.StepLR(one, 1, 0.5)
    if registers:
        accelerator.register_for_checkpointing(schedule)
    sampler = malletrain.ElasticSampler(len(rescaled.data()), global_batch_size=8, seed=7)
    guard = Guard(accelerator, folder / "states", sampler)
    stopper = StopAt((lambda: step[0], stop))
    monkeypatch.setattr(guard, "wants_checkpoint", stopper.wants_checkpoint)
    monkeypatch.setattr(guard, "saved", stopper.saved)
    guard.resume()
    try:
        for epoch in sampler.epochs(3):
            for batch in DataLoader(rescaled.data(), batch_sampler=sampler):
                step[0] = epoch * sampler.steps_per_epoch + sampler.position // 8 + 1
                for model, optimizer in ((first, one), (second, two)):
                    accelerator.backward(model(**batch)["loss"])
                    optimizer.step()
                    optimizer.zero_grad()
                if step[0] == dies_in:
                    raise Stopped
                log.append((step[0], one.param_groups[0]["lr"]))
                guard.step()
            log.append(("epoch ends", epoch))
            if dies_in is not None:
                guard.save()
            if dies_in == f"end of epoch {epoch}":
                raise Stopped
            schedule.step()
            if saves:
                accelerator.save_state()
    except Stopped:
        return log, None
    return log, [model.layer.weight.detach().clone() for model in (first, second)]


@pytest.mark.parametrize("automatic", [True, False])
def test_states_of_accelerate_are_saved_after_the_epochs_end(tmp_path, monkeypatch, automatic):
    """Several models and optimizers; and where Accelerate names the folders of the script's own."""
    pytest.importorskip("accelerate", reason="pip install malletrain[integrations]")
    with as_plain_script(monkeypatch):
        expected, weights = accelerated(
            *(tmp_path / "undisturbed", 0, automatic, automatic, monkeypatch)
        )
        for stop in (2, 5, 6, 7, 12, 18):
            folder = tmp_path / f"moved-{stop}"
            log, over = accelerated(folder, stop, automatic, automatic, monkeypatch)
            if over is None:
                more, over = accelerated(folder, 0, automatic, automatic, monkeypatch)
                log += more
            assert log == expected, f"a change after step {stop}"
            torch.testing.assert_close(over, weights)
            if automatic:
                names = sorted(path.name for path in (folder / "checkpoints").iterdir())
                assert names == ["checkpoint_1", "checkpoint_2"]


@pytest.mark.parametrize(
    ("dies_in", "logged"), every_change([(9, 9), ("end of epoch 1", 14)], ("end of epoch 1", 14))
)
def test_a_state_that_the_script_saves_before_its_schedules_step_is_completed(
    tmp_path, monkeypatch, dies_in, logged
):
    pytest.importorskip("accelerate", reason="pip install malletrain[integrations]")
    with as_plain_script(monkeypatch):
        expected, _ = accelerated(tmp_path / "undisturbed", 0, False, False, monkeypatch)
        log, _ = accelerated(tmp_path / "moved", 0, False, False, monkeypatch, dies_in=dies_in)
        more, _ = accelerated(tmp_path / "moved", 0, False, False, monkeypatch)
    assert log + more == [*expected[:logged], *expected[7:]], "from the first epoch's end on"


def test_a_schedule_that_accelerate_does_not_save_is_refused(tmp_path, monkeypatch, capsys):
    pytest.importorskip("accelerate", reason="pip install malletrain[integrations]")
    report.sentence_keys.clear()
    with as_plain_script(monkeypatch):
        accelerated(tmp_path, 9, False, False, monkeypatch)
        accelerated(tmp_path, 0, False, False, monkeypatch)
        assert "was not given the scheduler" not in capsys.readouterr().err
        accelerated(tmp_path / "x", 9, False, False, monkeypatch, registers=False)
        assert "Guard was not given the scheduler (StepLR)" in capsys.readouterr().err
        with pytest.raises(SnapshotError, match=r"after step 1 of the .*register_for_checkpoint"):
            accelerated(tmp_path / "x", 0, False, False, monkeypatch, registers=False)


def accumulated(folder, saves_after=0, dies_after=0):
    """Weights after micro-batches of 4 samples, two for each step; None when it died."""
    import accelerate

    import malletrain
    from malletrain.integrations.accelerate import Guard

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sampler = malletrain.ElasticSampler(len(rescaled.data()), global_batch_size=4, seed=7)
    guard = Guard(accelerator, folder, sampler)
    guard.resume()
    number = sampler.position // 4
    for _ in sampler.epochs(1):
        for batch in DataLoader(rescaled.data(), batch_sampler=sampler):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            guard.step()
            number += 1
            if number == saves_after:
                guard.save()
            if number == dies_after:
                return None
    guard.save()
    return model.layer.weight.detach().clone()


@pytest.mark.parametrize("saves_after", every_change([3, 4], 3))
def test_a_state_asked_for_between_micro_batches_is_saved_after_their_step(
    tmp_path, monkeypatch, saves_after, capsys
):
    pytest.importorskip("accelerate", reason="pip install malletrain[integrations]")
    with as_plain_script(monkeypatch):
        expected = accumulated(tmp_path / "undisturbed")
        assert accumulated(tmp_path / "x", saves_after, dies_after=5) is None
        assert (tmp_path / "x" / "newest").exists()
        torch.testing.assert_close(accumulated(tmp_path / "x"), expected)
    assert ("waits for the optimizer's next step" in capsys.readouterr().err) == (saves_after == 3)


def accumulating_over_an_epochs_end(rank: int, folder: str) -> None:
    """One of two ranks: five micro-batches an epoch, two for each step. Rank 0 saves on demand
    after the fourth one; while it waits to be stopped, it writes to a file what rank 1 does next.
    """
    import accelerate
    import torch.distributed as dist

    import malletrain
    from malletrain.integrations import guard as connection
    from malletrain.integrations.accelerate import Guard

    flags = FlagsWriter(f"{folder}/flags-{rank}")
    os.environ |= {env.FLAGS: flags.path, env.JOB: "job-1"}
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # Accelerate demands it; the group is there already
    dist.init_process_group("gloo", f"file://{folder}/group", rank=rank, world_size=2)
    store = dist.FileStore(f"{folder}/acts", 2)

    def wait(flags: object, request: int) -> int:
        store.wait(["rank 1"])
        Path(folder, "rank 1").write_bytes(store.get("rank 1"))
        return request

    class Watched(Guard):
        def any_rank(self, own_value: bool) -> bool:
            if rank and self.sampler.between_epochs:
                store.compare_set("rank 1", "", "waits for rank 0")
            return super().any_rank(own_value)

    connection.wait_to_be_stopped = wait
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    sampler = malletrain.ElasticSampler(20, global_batch_size=4, seed=7)
    watched = Watched(accelerator, f"{folder}/states", sampler)
    for epoch in sampler.epochs(2):
        for batch in DataLoader(Subset(Numbers(), range(20)), batch_sampler=sampler):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            if not rank and (epoch, sampler.position) == (0, 12):
                flags.request_drain(7)
            watched.step()
        if rank:
            store.compare_set("rank 1", "", "runs the code after the epoch")
    Path(folder, f"end {rank}").touch()
    # The end of DDP's reducer holds the GIL while it waits for gloo's thread, which may need it.
    os._exit(0)


def test_no_rank_runs_the_code_after_an_epoch_while_rank_0_waits_within_it(tmp_path):
    pytest.importorskip("accelerate", reason="pip install malletrain[integrations]")
    run_ranks(accumulating_over_an_epochs_end, (str(tmp_path),), 2)
    assert (tmp_path / "rank 1").read_text() == "waits for rank 0"
    assert sorted(path.name for path in tmp_path.glob("end *")) == ["end 0", "end 1"]
