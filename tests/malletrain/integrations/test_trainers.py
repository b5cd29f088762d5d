"""The callbacks in the real trainers of the real libraries: what MalleTrain hears, and that a
checkpoint asked for can be resumed from.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader

import malletrain
from malletrain.protocol.worker_channel import Capable, DrainDone, WorkerProgress
from malletrain.training import report
from tests.malletrain.integrations.samples import BATCH, SAMPLES, Net, Numbers
from tests.malletrain.training.worker_side import as_plain_script, as_worker
from tests.waiting import PATIENCE_S, until


class Launcher:
    """As MalleTrain's: requests a drain after a number of reported steps, and stops the training
    once the drain is done. ``drain_request`` is set when it has requested it.
    """

    def __init__(self, agent, at_step):
        self.heard, self.drain_request, self.answered = [], threading.Event(), threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(agent, at_step), daemon=True)
        self._thread.start()

    def _run(self, agent, at_step):
        while True:
            over = self._over.is_set()
            new = agent.received()
            self.heard += new
            if over:
                return
            if not self.drain_request.is_set() and any(
                isinstance(m, WorkerProgress) and m.steps >= at_step for m in new
            ):
                agent.flags.request_drain(7)
                self.drain_request.set()
            if any(isinstance(m, DrainDone) for m in new):
                self.answered.set()
                agent.flags.request_drain(0)
            time.sleep(0.002)

    def of(self, kind):
        return [m for m in self.heard if isinstance(m, kind)]

    def knows_all(self):
        return max((m.steps for m in self.of(WorkerProgress)), default=0) == report.totals()[1]

    def stop(self):
        self._over.set()
        self._thread.join()


@contextlib.contextmanager
def launched(monkeypatch, at_step=3):
    """A run that is asked for a drain after ``at_step``, and makes at most two more steps before it
    knows of that.
    """
    monkeypatch.setattr("malletrain.training.report.SEND_INTERVAL_S", 0.0)
    monkeypatch.setenv("MALLETRAIN_STEP_TIMES", "1")
    with as_worker(monkeypatch) as agent:
        launcher = Launcher(agent, at_step)
        forward, begun = Net.forward, itertools.count(1)

        @functools.wraps(forward)  # a trainer looks at the arguments of a model
        def slow_forward(net, *args, **kwargs):
            if next(begun) > at_step + 2:
                assert launcher.drain_request.wait(PATIENCE_S), "no drain was asked for"
            return forward(net, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(Net, "forward", slow_forward)
            try:
                yield launcher
                report.flush()
                until(launcher.knows_all, "the last report is heard")
            finally:
                launcher.stop()


def check_parts(launcher):
    """The waits for batches and the checkpoint are measured."""
    newest = max(launcher.of(WorkerProgress), key=lambda progress: progress.steps)
    assert newest.data is not None
    assert newest.snapshot is not None


def check(launcher, steps, samples):
    """What every trainer must have told."""
    check_parts(launcher)
    assert launcher.answered.is_set()
    assert launcher.of(Capable)
    assert all(m.saved and m.number == 7 for m in launcher.of(DrainDone))
    assert max(m.steps for m in launcher.of(WorkerProgress)) == steps
    assert max(m.samples for m in launcher.of(WorkerProgress)) == samples


def hugging_face(folder, steps):
    from transformers import Trainer, TrainingArguments

    from malletrain.integrations.transformers import MalleTrainCallback

    args = TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
    )
    callback = MalleTrainCallback()
    net = Net()
    trainer = Trainer(net, args, train_dataset=Numbers(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.latest(str(folder)))
    return net, trainer.state.global_step, callback.latest(str(folder))


def test_hugging_face_trainer(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="pip install malletrain[integrations]")
    with launched(monkeypatch) as launcher:
        net, step, checkpoint = hugging_face(tmp_path / "a", 12)
    check(launcher, 12, 12 * BATCH)
    assert step == 12
    assert checkpoint is not None
    with as_plain_script(monkeypatch):
        resumed, step, _ = hugging_face(tmp_path / "a", 12)
    assert step == 12
    assert torch.allclose(resumed.layer.weight, net.layer.weight, rtol=1e-5), (
        "from the checkpoint on it is the same run"
    )


def test_lightning(tmp_path, monkeypatch):
    pytest.importorskip("lightning", reason="pip install malletrain[integrations]")
    import lightning.pytorch as pl

    from malletrain.integrations.lightning import NAME, MalleTrainCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()
            self.calls = []  # a number would be state, and go on

        def training_step(self, batch, _):
            self.calls.append(None)
            with torch.inference_mode():
                self.last = torch.ones(1)  # as the output of an evaluation
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.1)

    def fit(steps):
        callback = MalleTrainCallback(tmp_path)
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
            callbacks=[callback],
            default_root_dir=tmp_path,
            **quiet,
        )
        module = Module()
        trainer.fit(module, callback.loader(Numbers(), BATCH), ckpt_path=callback.latest())
        return module, trainer.global_step

    with launched(monkeypatch) as launcher:
        module, steps = fit(12)
    check(launcher, 12, 12 * BATCH)
    assert steps == 12
    assert (tmp_path / NAME).exists()
    assert not (tmp_path / (NAME + ".new")).exists()
    saved = torch.load(tmp_path / NAME, weights_only=False)["global_step"]
    assert 3 <= saved < 12
    with as_plain_script(monkeypatch):
        resumed, steps = fit(12)
    assert steps == 12
    assert len(resumed.calls) == 12 - saved == len(module.calls) - saved


def test_accelerate(tmp_path, monkeypatch):
    accelerate = pytest.importorskip("accelerate", reason="pip install malletrain[integrations]")
    import malletrain
    from malletrain.integrations.accelerate import Guard

    def prepared():
        accelerator = accelerate.Accelerator(cpu=True)
        net = Net()
        net, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=0.1))
        sampler = malletrain.ElasticSampler(SAMPLES, global_batch_size=BATCH)
        return accelerator, net, optimizer, Guard(accelerator, tmp_path / "states", sampler, 3600.0)

    def train(stop_after):
        accelerator, net, optimizer, guard = prepared()
        resumed, saved = guard.resume(), 0
        for batch in DataLoader(Numbers(), batch_sampler=guard.sampler):
            optimizer.zero_grad()
            accelerator.backward(net(**batch)["loss"])
            optimizer.step()
            saved += guard.step()
            if saved and stop_after:
                report.report(0)  # the parts of a step are told with the next one
                break
        return resumed, saved, net.layer.weight.detach().clone(), guard

    with launched(monkeypatch) as launcher:
        resumed, saved, weight, guard = train(stop_after=True)
    assert (resumed, saved) == (False, 1)
    check_parts(launcher)
    assert launcher.of(Capable)
    assert launcher.answered.is_set()
    assert guard.newest().endswith("state-a")
    with as_plain_script(monkeypatch):
        _, net, optimizer, again = prepared()
        assert again.resume()
        assert again.sampler.position == guard.sampler.position > 0
        assert torch.equal(net.layer.weight, weight)
        again.save()
        assert again.newest().endswith("state-b"), "the one before stays until the new one is whole"
        assert optimizer.state_dict()["state"]
        accelerator, _, optimizer, guard = prepared()
        accelerator.prepare(torch.optim.lr_scheduler.LinearLR(optimizer))
        with pytest.raises(ValueError, match="once per rank"):
            guard.resume()
        with pytest.raises(TypeError, match="Guard needs the sampler"):
            Guard(accelerator, tmp_path / "states")


def test_the_training_side_library_imports_none_of_them():
    code = (
        "import malletrain, sys; assert not {'transformers', 'accelerate', 'lightning', "
        "'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_skipping_batches_of_an_elastic_loader_is_refused():
    accelerate = pytest.importorskip("accelerate", reason="pip install malletrain[integrations]")
    sampler = malletrain.ElasticSampler(12, global_batch_size=2, rank=0, world_size=1)
    loader = DataLoader(range(12), batch_sampler=sampler)
    assert len(list(accelerate.skip_first_batches(loader, 0))) == 6
    with pytest.raises(TypeError, match="would skip the same batches twice"):
        list(accelerate.skip_first_batches(loader, 2))
