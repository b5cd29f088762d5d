"""The tools that follow trainings, the real ones: one run over the rounds of a job, no row twice
or lost.
"""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from malletrain.training import tracking
from tests.malletrain.integrations import rescaled
from tests.malletrain.integrations.samples import Net
from tests.malletrain.integrations.test_checkpoints import StopAt, Stopped
from tests.malletrain.training.worker_side import as_plain_script
from tests.selection import every_change
from tests.tracked import wandb_rows

pytestmark = pytest.mark.slow

FLUSH = "WANDB__TRANSACTION_LOG_FLUSH_INTERVAL"

ROUND = """
import os, sys, malletrain
import wandb
run = wandb.init(project="p")
for step in range(int(sys.argv[1]), int(sys.argv[2])):
    malletrain.metric("loss", 1.0 / (1 + step), step=step)
print(run.id)
run.finish()
"""


@pytest.fixture
def job(monkeypatch):
    """This process is rank 0 of a job, as far as tools are concerned."""
    with as_plain_script(monkeypatch):
        for name in ("WANDB_RUN_ID", "WANDB_RESUME", FLUSH, "MLFLOW_RUN_ID"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("MALLETRAIN_JOB", "j1")
        monkeypatch.setenv("MALLETRAIN_JOB_KEY", "ab" * 16)
        yield monkeypatch


def test_the_name_of_a_jobs_run_is_its_own(job):
    name = tracking.run_id()
    assert name.startswith("j1-")
    assert "ab" * 4 not in name, "the key is a secret"
    job.setenv("MALLETRAIN_JOB_KEY", "cd" * 16)
    assert tracking.run_id() != name
    job.delenv("MALLETRAIN_JOB")
    assert tracking.run_id() == ""


def test_only_rank_0_writes_to_the_run_and_the_owners_choice_wins(job):
    job.setenv("RANK", "1")
    tracking.set_wandb_run()
    assert "WANDB_RUN_ID" not in os.environ
    job.setenv("RANK", "0")
    job.setenv("WANDB_RUN_ID", "mine")
    tracking.set_wandb_run()
    assert os.environ["WANDB_RUN_ID"] == "mine"
    assert "WANDB_RESUME" not in os.environ


def test_weights_and_biases_stores_its_rows_each_second(job):
    wandb = pytest.importorskip("wandb", reason="pip install malletrain[test]")
    settings = wandb.Settings()
    if not hasattr(settings, "x_transaction_log_flush_interval"):
        pytest.skip("this release of W&B stores rows in blocks")
    tracking.set_wandb_run()
    settings.update_from_env_vars(dict(os.environ))
    assert settings.x_transaction_log_flush_interval == 1.0
    job.setenv(FLUSH, "5")
    tracking.set_wandb_run()
    assert os.environ[FLUSH] == "5", "the owner's choice"


def test_weights_and_biases_offline(tmp_path):
    pytest.importorskip("wandb", reason="pip install malletrain[test]")
    environment = {
        **os.environ,
        "MALLETRAIN_SOCKET": str(tmp_path / "nobody"),
        "MALLETRAIN_JOB": "j1",
        "MALLETRAIN_JOB_KEY": "ab" * 16,
        "MALLETRAIN_TRACK": "wandb",
        "RANK": "0",
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "WANDB_SILENT": "true",
    }
    for part in ((0, 3), (3, 6)):
        words = [sys.executable, "-c", ROUND, *map(str, part)]
        ran = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        assert ran.stdout.split()[-1].startswith("j1-")
    rows = [row for file in sorted(tmp_path.rglob("*.wandb")) for row in wandb_rows(file)]
    assert [row["loss/step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row["loss"] for row in rows] == [1.0 / (1 + step) for step in range(6)]


FOLDS = """
import malletrain, os, wandb
for fold in range(2):
    run = wandb.init(project="p")
    print(run.id)
    run.finish()
for fold in range(2):
    run = wandb.init(id=f"{os.environ['WANDB_RUN_ID']}-fold{fold}", resume="allow")
    print(run.id)
    run.finish()
"""


def test_a_second_run_of_a_script_needs_an_id_of_its_own(tmp_path):
    pytest.importorskip("wandb", reason="pip install malletrain[test]")
    page = Path(__file__).parents[3] / "docs" / "tracking.md"
    (init,) = [line for line in FOLDS.splitlines() if "-fold" in line]
    assert init.split(" = ")[1] in page.read_text()
    environment = {
        **os.environ,
        "MALLETRAIN_SOCKET": str(tmp_path / "nobody"),
        "MALLETRAIN_JOB": "j1",
        "MALLETRAIN_JOB_KEY": "ab" * 16,
        "RANK": "0",
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "WANDB_SILENT": "true",
    }
    words = [sys.executable, "-c", FOLDS]
    rounds = [
        subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    ids = rounds[0].stdout.split()
    assert ids == [ids[0], ids[0], f"{ids[0]}-fold0", f"{ids[0]}-fold1"]
    assert ids[0].startswith("j1-")
    assert rounds[1].stdout.split() == ids


STOPPED = """
import os, signal, sys
import wandb
from malletrain.protocol.flags import FlagsReader, FlagsWriter
from malletrain.training import drain, report
run = wandb.init(project="p")
for step in range(3):
    run.log({"loss": 1.0 / (1 + step), "loss/step": step})
flags = FlagsWriter(sys.argv[1])
flags.request_drain(7)
report.send = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)
drain.wait_to_be_stopped(FlagsReader(sys.argv[1]), 7)
"""


def test_weights_and_biases_offline_has_all_rows_of_a_round_that_is_stopped(tmp_path):
    pytest.importorskip("wandb", reason="pip install malletrain[test]")
    environment = {
        **os.environ,
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "WANDB_SILENT": "true",
    }
    words = [sys.executable, "-c", STOPPED, str(tmp_path / "flags")]
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == -signal.SIGTERM, ran.stderr
    rows = [row for file in sorted(tmp_path.rglob("*.wandb")) for row in wandb_rows(file)]
    assert [row["loss/step"] for row in rows] == [0, 1, 2]


def test_rows_of_tensorboard_are_stored_before_a_planned_change(tmp_path):
    pytest.importorskip("tensorboard", reason="pip install malletrain[test]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path), flush_secs=100_000)
    writer.add_scalar("loss", 0.5, 3)
    tracking.flush_rows()
    stored = EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert [(row.step, row.value) for row in stored] == [(3, 0.5)]
    writer.close()


def name_by_round(folder, number):
    """Put the number into the names of TensorBoard's new files, in whose order it reads them: they
    are of one second and one process here.
    """
    for file in folder.glob("*/events.*"):
        if "round" not in file.name:
            file.rename(file.with_name(f"round-{number:02d}.{file.name}"))


@pytest.fixture
def mlflow(job, tmp_path):
    """MLflow on a store of files."""
    job.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    job.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    module = pytest.importorskip("mlflow", reason="pip install malletrain[test]")
    module.set_tracking_uri((tmp_path / "mlruns").as_uri())
    yield module
    module.end_run()
    module.set_tracking_uri(None)


def test_mlflow_goes_on_with_the_run_of_the_job(mlflow, job):
    job.setenv("MALLETRAIN_TRACK", "mlflow")
    import malletrain

    for part in range(2):
        job.delenv("MLFLOW_RUN_ID", raising=False)
        name = tracking.mlflow_run("trial")
        with mlflow.start_run() as run:
            assert run.info.run_id == name
            for step in range(3 * part, 3 * part + 3):
                malletrain.metric("loss", step / 2, step=step)
    client = mlflow.MlflowClient()
    values = client.get_metric_history(name, "loss")
    assert [(value.step, value.value) for value in values] == [(n, n / 2) for n in range(6)]
    place = client.get_experiment_by_name("trial").experiment_id
    assert len(client.search_runs([place])) == 1
    job.setenv("MALLETRAIN_JOB_KEY", "cd" * 16)
    job.delenv("MLFLOW_RUN_ID", raising=False)
    assert tracking.mlflow_run("trial") != name, "another job's"


def test_a_metric_that_a_lost_process_had_begun_does_not_keep_mlflow_from_the_run(
    mlflow, job, tmp_path
):
    name = tracking.mlflow_run("trial")
    with mlflow.start_run():
        mlflow.log_metric("loss", 0.5, step=1)
    job.delenv("MLFLOW_RUN_ID", raising=False)
    (metric,) = tmp_path.glob(f"**/{name}/metrics/loss")
    begun = metric.with_name("eval") / "runtime"  # as log_metric("eval/runtime", …) does
    begun.parent.mkdir()
    begun.touch()
    assert tracking.mlflow_run("trial") == name
    with mlflow.start_run() as run:
        mlflow.log_metric("loss", 0.4, step=2)
        mlflow.log_metric("eval/runtime", 1.0, step=2)
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [(value.step, value.value) for value in history] == [(1, 0.5), (2, 0.4)]


@pytest.mark.parametrize("stop", every_change([7, 12], 7))
def test_the_callbacks_of_trainer_log_into_one_run(mlflow, job, tmp_path, stop):
    """MLflow's and TensorBoard's, with a change after a step within an epoch and at its end."""
    pytest.importorskip("transformers", reason="pip install malletrain[integrations]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from transformers import Trainer, TrainingArguments

    from malletrain.integrations.transformers import MalleTrainCallback

    job.setenv("MLFLOW_EXPERIMENT_NAME", "trainer")

    def train(per_device, stop):
        job.setattr(
            "malletrain.integrations.transformers.StateGuard",
            lambda: StopAt((lambda: trainer.state.global_step, stop)),
        )
        job.delenv("MLFLOW_RUN_ID", raising=False)
        args = TrainingArguments(
            str(tmp_path / "out"),
            num_train_epochs=rescaled.EPOCHS,
            per_device_train_batch_size=per_device,
            logging_steps=1,
            save_strategy="no",
            report_to=["mlflow", "tensorboard"],
            use_cpu=True,
            disable_tqdm=True,
        )
        callback = MalleTrainCallback(global_batch_size=rescaled.GLOBAL_BATCH)
        trainer = Trainer(Net(), args, train_dataset=rescaled.data(), callbacks=[callback])
        try:
            trainer.train(resume_from_checkpoint=callback.latest(args.output_dir))
        except Stopped:
            mlflow.end_run()
        for each in trainer.callback_handler.callbacks:
            if writer := getattr(each, "tb_writer", None):
                writer.close()
        name_by_round(tmp_path / "out" / "runs", stop or 99)

    train(8, stop)
    train(4, 0)
    steps = list(range(1, rescaled.STEPS + 1))
    (run,) = mlflow.search_runs(experiment_names=["trainer"], output_format="list")
    values = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    # Trainer has MLflow store values in threads: those of two steps may change places.
    assert sorted(value.step for value in values) == steps
    (folder,) = (tmp_path / "out" / "runs").iterdir()
    assert folder.name == tracking.run_id()
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == steps


@pytest.mark.parametrize("stop", every_change([7, 12], 7))
def test_the_loggers_of_lightning_go_on_with_one_version(job, tmp_path, stop):
    pytest.importorskip("lightning", reason="pip install malletrain[integrations]")
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from malletrain.integrations.lightning import MalleTrainCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, _):
            loss = self.net(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def on_train_epoch_end(self):
            self.log("epoch_over", 1.0)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=rescaled.RATE)

    def train(per_device, stop, dies_at=0):
        class Dies(pl.Callback):
            def on_train_batch_end(self, trainer, *_):
                if dies_at and trainer.global_step == dies_at:
                    for logger in trainer.loggers:
                        logger.save()
                    raise Stopped

        job.setattr(
            "malletrain.integrations.lightning.StateGuard",
            lambda: StopAt((lambda: trainer.global_step, stop)),
        )
        callback = MalleTrainCallback(tmp_path)
        trainer = pl.Trainer(
            max_epochs=rescaled.EPOCHS,
            accelerator="cpu",
            devices=1,
            callbacks=[callback, Dies()],
            logger=[CSVLogger(tmp_path, "csv"), TensorBoardLogger(tmp_path, "board")],
            log_every_n_steps=1,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        loader = callback.loader(rescaled.data(), per_device, rescaled.GLOBAL_BATCH)
        try:
            trainer.fit(Module(), loader, ckpt_path=callback.latest())
        except Stopped:
            pass
        for logger in trainer.loggers:
            logger.finalize("success")
        name_by_round(tmp_path / "board", stop or dies_at or 99)

    train(8, stop)
    train(8, 0, dies_at=stop + 3)  # lost without notice: three steps come again
    train(4, 0)
    (folder,) = (tmp_path / "csv").iterdir()
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    steps = list(range(rescaled.STEPS))
    assert [int(row["step"]) for row in rows if row["loss"]] == steps
    assert [int(row["step"]) for row in rows if row["epoch_over"]] == [5, 11, 17, 23]
    (folder,) = (tmp_path / "board").iterdir()
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == steps
