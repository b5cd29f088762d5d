"""What each rank of the tests of several ranks runs: ``python -m
tests.malletrain.integrations.ranks LIBRARY STEPS [rescaled]``.

A small training with the library's own loop. Every step is a line in the rank's own file. The
library is imported once; a rank is forked for every line of standard input, which has its
environment as JSON, with the folder that it works in (``FOLDER``).
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from tests.malletrain.integrations.samples import BATCH, SAMPLES, Net, Numbers

STEP_S = 0.02
IMPORTS = {
    "transformers": ["transformers.trainer", "malletrain.integrations.transformers"],
    "lightning": ["lightning.pytorch", "malletrain.integrations.lightning"],
    "accelerate": ["accelerate", "malletrain.integrations.accelerate"],
}


def note(folder: Path, step: int, net: Net | None = None, rate: float = 0.0) -> None:
    """A line for the step: its number, and with ``net`` the world size, the learning rate, the
    samples and a random number. Rank 1 is always a little behind: it works on while rank 0 waits
    for it. With a file ``limit`` steps beyond the number in it wait, and say so in ``waits-RANK``.
    """
    rank = int(os.environ["RANK"])
    time.sleep(STEP_S * (1 + rank))
    limit = folder / "limit"
    while limit.exists() and step > int(limit.read_text() or 0):
        (folder / f"waits-{rank}").write_text(str(step))
        time.sleep(0.01)
    line: object = step
    if net is not None:
        noise = float(torch.rand(()))
        line = json.dumps([step, int(os.environ["WORLD_SIZE"]), rate, net.seen, noise])
        net.seen = []
    with (folder / f"steps-{rank}").open("a") as file:
        file.write(f"{line}\n")


def keep(folder: Path, net: Net) -> None:
    """The trained weights, for the test."""
    if os.environ["RANK"] == "0":
        torch.save(net.state_dict(), folder / "weights.pt")


def hugging_face(folder: Path, steps: int) -> int:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from malletrain.integrations.transformers import MalleTrainCallback

    class SlowDisk(Trainer):
        def _save_rng_state(self, output_dir):
            time.sleep(int(os.environ["RANK"]))
            super()._save_rng_state(output_dir)

    class Note(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            note(folder, state.global_step)

    args = TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        ddp_backend="gloo",
        dataloader_num_workers=0,
    )
    callback = MalleTrainCallback()
    trainer = SlowDisk(Net(), args, train_dataset=Numbers(), callbacks=[Note(), callback])
    trainer.train(resume_from_checkpoint=callback.latest(str(folder)))
    return trainer.state.global_step


def lightning(folder: Path, steps: int) -> int:
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

    class Note(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            note(folder, trainer.global_step)

    callback = MalleTrainCallback(folder)
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        callbacks=[Note(), callback],
        default_root_dir=folder,
        **quiet,
    )
    trainer.fit(Module(), callback.loader(Numbers(), BATCH), ckpt_path=callback.latest())
    return trainer.global_step


def accelerate(folder: Path, steps: int) -> int:
    import accelerate

    import malletrain
    from malletrain.integrations.accelerate import Guard

    accelerator = accelerate.Accelerator(cpu=True)
    net = Net()
    net, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=0.1))
    # as large at any number of ranks: only one is used here
    sampler = malletrain.ElasticSampler(SAMPLES, batch_size=BATCH)
    loader = DataLoader(Numbers(), batch_sampler=sampler)
    guard = Guard(accelerator, folder / "states", sampler)
    guard.resume()
    per_epoch = sampler.steps_per_epoch
    for epoch in sampler.epochs(-(-steps // per_epoch)):
        for batch in loader:
            if epoch * per_epoch + sampler.position // (BATCH * sampler.world_size) == steps:
                sampler.end()
                break
            optimizer.zero_grad()
            accelerator.backward(net(**batch)["loss"])
            optimizer.step()
            done = epoch * per_epoch + sampler.position // (BATCH * sampler.world_size) + 1
            note(folder, done)
            guard.step()
    accelerator.end_training()
    return steps


def work(script: Callable[[Path, int], int], folder: Path, steps: int) -> None:
    """In the child: be the rank that the environment says."""
    rank = os.environ["RANK"]
    fd = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    code = 1
    try:
        done = script(folder, steps)
        (folder / f"end-{rank}").write_text(str(done))
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    torch.set_num_threads(1)
    library, steps = sys.argv[1], int(sys.argv[2])
    scripts: dict[str, Callable[[Path, int], int]] = {
        "transformers": hugging_face,
        "lightning": lightning,
        "accelerate": accelerate,
    }
    if len(sys.argv) > 3:
        from tests.malletrain.integrations import rescaled

        scripts = rescaled.SCRIPTS
    script = scripts[library]
    # An optimizer's first step imports the last one: once here, or once in each rank.
    for module in [*IMPORTS[library], "torch._dynamo"]:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever ends is no zombie
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.environ.update(json.loads(line))
            work(script, Path(os.environ["FOLDER"]), steps)
        print(child, flush=True)
