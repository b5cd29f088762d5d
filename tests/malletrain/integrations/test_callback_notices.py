"""Callbacks whose counters no checkpoint includes are named."""

from __future__ import annotations

import collections
import sys
import time
import types

import numpy as np
import pytest
import torch

from malletrain.protocol.worker_channel import OwnerNotice
from malletrain.training.script_attributes import CallbackAttributes
from tests.malletrain.integrations import rescaled
from tests.malletrain.integrations.samples import Net
from tests.malletrain.integrations.test_checkpoints import StopAt, Stopped
from tests.malletrain.training.worker_side import as_worker


@pytest.fixture
def agent(monkeypatch):
    with as_worker(monkeypatch) as agent:
        # the tests play the guard, and are not stopped
        monkeypatch.delenv("MALLETRAIN_FLAGS")
        yield agent


def sentences(agent):
    return [notice.sentence for notice in agent.received(OwnerNotice)]


class Library:
    """A base class of an installed package."""

    patience = 3

    def __init__(self):
        self.waited = 0

    def wait(self):
        self.waited += 1


Library.__module__ = "lightning.pytorch.callbacks"


class Counter(Library):
    def __init__(self):
        super().__init__()
        self.steps, self.best, self.name = 0, None, "a"
        self.losses, self.by_name, self.recent = [], {}, collections.deque(maxlen=1)
        self.table, self.center = np.zeros(2), torch.zeros(2)
        self.began, self.other = 0.0, object()


class Saved(Counter):
    def state_dict(self):
        return {"steps": self.steps}


CHANGES = {
    "steps": lambda c: setattr(c, "steps", 1),
    "best": lambda c: setattr(c, "best", 0.5),
    "name": lambda c: setattr(c, "name", "b"),
    "losses": lambda c: c.losses.append(0.5),
    "by_name": lambda c: c.by_name.update(loss=0.5),
    "recent": lambda c: c.recent.append(0.5),
    "table": lambda c: c.table.__setitem__(0, 1.0),
    "center": lambda c: c.center.add_(1.0),
}
NOT_LOST = {
    "a library's": lambda c: c.wait(),
    "a point in time": lambda c: setattr(c, "began", time.monotonic()),
    "the hour": lambda c: setattr(c, "began", time.time()),
    "new": lambda c: setattr(c, "newest", 0.5),
    "the same": lambda c: setattr(c, "steps", 0),
    "another object": lambda c: setattr(c, "other", object()),
}


def begun(*callbacks):
    attributes = CallbackAttributes("Owner", ("state_dict",), "Do that.")
    attributes.begin(callbacks)
    return attributes


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_callback_counts_is_named(name):
    callback = Counter()
    attributes = begun(callback)
    assert attributes.changed() == []
    CHANGES[name](callback)
    assert attributes.changed() == [f"Counter.{name}"]


@pytest.mark.parametrize("name", NOT_LOST)
def test_what_no_restart_takes_is_not_named(name):
    callback = Counter()
    attributes = begun(callback)
    NOT_LOST[name](callback)
    assert attributes.changed() == []


def test_a_callback_that_says_what_is_saved_and_one_of_a_package_are_not_named(monkeypatch):
    class OfPackage(Counter):
        pass

    module = types.ModuleType("installed")
    module.__file__ = f"{__import__('sysconfig').get_path('purelib')}/installed.py"
    monkeypatch.setitem(sys.modules, "installed", module)
    OfPackage.__module__ = "installed"
    callbacks = Saved(), OfPackage(), Library()
    attributes = begun(*callbacks)
    for callback in callbacks:
        callback.steps = callback.waited = 1
    assert attributes.changed() == []


def test_one_whose_attributes_cannot_be_read_stops_nothing():
    class Odd:
        __slots__ = ()

    callback = Counter()
    attributes = begun(Odd(), callback)
    callback.steps = 1
    assert attributes.changed() == ["Counter.steps"]
    callback.table = type("ndarray", (), {})()
    attributes.tell_changed()


def test_the_job_is_told_once_and_of_three(agent, capsys):
    callback = Counter()
    attributes = begun(callback)
    for change in list(CHANGES.values())[:5]:
        change(callback)
    attributes.tell_changed()
    attributes.tell_changed()
    (sentence,) = sentences(agent)
    assert "Counter.steps, Counter.best, Counter.name and 2 more changed" in sentence
    assert "Do that." in sentence
    assert capsys.readouterr().err.count(sentence) == 1


def lightning(folder, stop, monkeypatch):
    import lightning.pytorch as pl

    from malletrain.integrations.lightning import MalleTrainCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, _):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=rescaled.RATE)

    class Plain(pl.Callback):
        steps = 0

        def __init__(self):
            self.batches, self.sum = 0, 0.0

        def on_train_start(self, trainer, module):
            self.sum = 1.0

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.batches += 1

    class Stateful(Plain):
        def state_dict(self):
            return {"batches": self.batches}

    class Stopping(pl.callbacks.EarlyStopping):
        def __init__(self):
            super().__init__("loss", check_on_train_epoch_end=False, strict=False)
            self.looks = 0

        def on_train_batch_end(self, *_):
            self.wait_count, self.looks = self.wait_count + 1, self.looks + 1

    monkeypatch.setattr(
        "malletrain.integrations.lightning.StateGuard",
        lambda: StopAt((lambda: trainer.global_step, stop)),
    )
    callback = MalleTrainCallback(folder)
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        callbacks=[Plain(), callback, Stateful(), Stopping()],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = callback.loader(rescaled.data(), 8, rescaled.GLOBAL_BATCH, seed=7)
    trainer.fit(Module(), loader, ckpt_path=callback.latest())


def hugging_face(folder, stop, monkeypatch):
    from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import ExportableState

    from malletrain.integrations.transformers import MalleTrainCallback

    class Plain(TrainerCallback):
        def __init__(self):
            self.batches, self.sum = 0, 0.0

        def on_train_begin(self, args, state, control, **_):
            self.sum = 1.0

        def on_step_end(self, args, state, control, **_):
            self.batches += 1

    class Stateful(Plain, ExportableState):
        def state(self):
            return {"args": {}, "attributes": {"batches": self.batches}}

    class Stopping(EarlyStoppingCallback):
        def __init__(self):
            super().__init__()
            self.looks = 0

        def on_train_begin(self, args, state, control, **_):
            pass

        def on_step_end(self, args, state, control, **_):
            self.early_stopping_patience_counter += 1
            self.looks += 1

    monkeypatch.setattr(
        "malletrain.integrations.transformers.StateGuard",
        lambda: StopAt((lambda: trainer.state.global_step, stop)),
    )
    args = TrainingArguments(
        str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=8,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    callback = MalleTrainCallback(global_batch_size=rescaled.GLOBAL_BATCH)
    others = [Plain(), callback, Stateful(), Stopping()]
    trainer = Trainer(Net(), args, train_dataset=rescaled.data(), callbacks=others)
    trainer.train(resume_from_checkpoint=callback.latest(str(folder)))


@pytest.mark.parametrize("train", [lightning, hugging_face])
def test_a_trainers_callbacks_are_named_once_in_a_job(agent, tmp_path, monkeypatch, train):
    pytest.importorskip("transformers" if train is hugging_face else "lightning")
    for stop in (3, 5):
        with pytest.raises(Stopped):
            train(tmp_path, stop, monkeypatch)
        notices = sentences(agent)
        assert len(notices) == (stop == 3)
        if notices:
            assert "Plain.batches, Stopping.looks changed in the training" in notices[0]
            assert ("ExportableState" in notices[0]) is (train is hugging_face)


class Weighted(torch.nn.Module):
    """A loss with a parameter of its own (sentence-transformers#2648)."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))


def trainer_with_loss(folder):
    from transformers import Trainer, TrainingArguments

    from malletrain.integrations.transformers import MalleTrainCallback

    net, loss = Net(), Weighted()
    parameters = [*net.parameters(), *loss.parameters()]
    args = TrainingArguments(
        str(folder),
        max_steps=1,
        per_device_train_batch_size=8,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    trainer = Trainer(
        net,
        args,
        train_dataset=rescaled.data(),
        callbacks=[MalleTrainCallback(global_batch_size=rescaled.GLOBAL_BATCH)],
        optimizers=(optimizer, None),
    )
    trainer.train()


def accelerate_with_loss(folder):
    from accelerate import Accelerator

    import malletrain
    from malletrain.integrations.accelerate import Guard

    accelerator, net, loss = Accelerator(cpu=True), Net(), Weighted()
    optimizer = torch.optim.SGD([*net.parameters(), *loss.parameters()], lr=0.1)
    model, optimizer = accelerator.prepare(net, optimizer)
    sampler = malletrain.ElasticSampler(rescaled.SAMPLES, global_batch_size=8)
    guard = Guard(accelerator, folder, sampler)
    guard.resume()
    for batch in torch.utils.data.DataLoader(rescaled.data(), batch_sampler=sampler):
        accelerator.backward(model(**batch)["loss"] * loss.scale)
        optimizer.step()
        guard.step()
        break


@pytest.mark.parametrize("train", [trainer_with_loss, accelerate_with_loss])
def test_parameters_outside_of_the_model_are_named(agent, tmp_path, capsys, train):
    pytest.importorskip("transformers" if train is trainer_with_loss else "accelerate")
    train(tmp_path)
    assert capsys.readouterr().err.count("trains 1 parameters that are of no module") == 1
