"""The code of each rank in the tests of rescales: a training of EPOCHS with a schedule. Each step
is recorded with its learning rate and samples.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import DataLoader, Subset

from tests.malletrain.integrations.ranks import keep, note
from tests.malletrain.integrations.samples import Net, Numbers

EPOCHS, PER_DEVICE, GLOBAL_BATCH, RATE = 4, 2, 8, 0.05
SAMPLES = 45
"""No multiple of the global batch: the last one of an epoch is smaller; nor is 8 one of 3 ranks."""
STEPS = EPOCHS * 6


def rate_at(step: int) -> float:
    """Linear to nothing, as Trainer's default schedule."""
    return 1 - step / STEPS


def data() -> Subset:
    return Subset(Numbers(), range(SAMPLES))


def hugging_face(folder: Path, steps: int) -> int:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from malletrain.integrations.transformers import MalleTrainCallback

    net = Net()

    class Note(TrainerCallback):
        def on_step_begin(self, args, state, control, optimizer=None, **_):
            self.rate = optimizer.param_groups[0]["lr"]

        def on_step_end(self, args, state, control, **_):
            note(folder, state.global_step, net, self.rate)

    args = TrainingArguments(
        str(folder),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=PER_DEVICE,
        learning_rate=RATE,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        ddp_backend="gloo",
        seed=7,
    )
    callback = MalleTrainCallback(global_batch_size=GLOBAL_BATCH)
    trainer = Trainer(net, args, train_dataset=data(), callbacks=[Note(), callback])
    trainer.train(resume_from_checkpoint=callback.latest(str(folder)))
    keep(folder, net)
    return trainer.state.global_step


def lightning(folder: Path, steps: int) -> int:
    import os

    import lightning.pytorch as pl

    from malletrain.integrations.lightning import MalleTrainCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, _):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=RATE)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_at)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

        def on_before_optimizer_step(self, optimizer):
            self.rate = optimizer.param_groups[0]["lr"]

    class Note(pl.Callback):
        before = 0

        def on_train_start(self, trainer, module):
            self.before = trainer.global_step

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.global_step > self.before:
                self.before = trainer.global_step
                note(folder, trainer.global_step, module.net, module.rate)

    callback = MalleTrainCallback(folder)
    module = Module()
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        callbacks=[Note(), callback],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    loader = callback.loader(data(), PER_DEVICE, GLOBAL_BATCH, seed=7)
    trainer.fit(module, loader, ckpt_path=callback.latest())
    keep(folder, module.net)
    return trainer.global_step


def accelerate(folder: Path, steps: int) -> int:
    import accelerate

    import malletrain
    from malletrain.integrations.accelerate import Guard

    accelerator = accelerate.Accelerator(cpu=True)
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=RATE))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_at)
    accelerator.register_for_checkpointing(schedule)
    sampler = malletrain.ElasticSampler(SAMPLES, global_batch_size=GLOBAL_BATCH, seed=7)
    loader = DataLoader(data(), batch_sampler=sampler)
    guard = Guard(accelerator, folder / "states", sampler)
    guard.resume()
    for epoch in sampler.epochs(EPOCHS):
        done = epoch * sampler.steps_per_epoch + sampler.position // GLOBAL_BATCH
        for batch in loader:
            rate = optimizer.param_groups[0]["lr"]
            loss = model(**batch)["loss"] * sampler.loss_weight
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            done += 1
            note(folder, done, net, rate)
            guard.step()
    guard.save()
    keep(folder, net)
    accelerator.end_training()
    return STEPS


SCRIPTS = {"transformers": hugging_face, "lightning": lightning, "accelerate": accelerate}
