"""Callbacks whose counters no checkpoint includes are named."""

from __future__ import annotations

import collections
import sys
import sysconfig
import time
import types

import numpy as np
import pytest
import torch

from malletrain.integrations.callback_attributes import CallbackAttributes
from malletrain.protocol.worker_channel import OwnerNotice
from malletrain.training import report
from malletrain.training.objects import warn_about_unsaved_parameters
from tests.malletrain.integrations import rescaled
from tests.malletrain.integrations.samples import Net
from tests.malletrain.integrations.test_checkpoints import StopAt, Stopped
from tests.malletrain.training.worker_side import as_worker


@pytest.fixture
def agent(monkeypatch):
    monkeypatch.setattr(report, "sentence_keys", set())
    with as_worker(monkeypatch) as agent:
        # the tests play the guard, and are not stopped
        monkeypatch.delenv("MALLETRAIN_FLAGS")
        yield agent


def sentences(agent, capsys):
    """The sentences about callbacks in the log; the job's owner gets none of them."""
    assert not agent.received(OwnerNotice)
    lines = capsys.readouterr().err.splitlines()
    return [line for line in lines if "does not save what other callbacks" in line]


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
    "a point in nanoseconds": lambda c: setattr(c, "steps", time.monotonic_ns()),
    "processor time": lambda c: setattr(c, "began", time.process_time()),
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


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("installed", f"{sysconfig.get_path('purelib')}/installed.py"),
        ("installed", "/opt/venv/lib/python3/site-packages/installed.py"),
        ("installed", "/usr/lib/python3/dist-packages/installed/callbacks.py"),
        ("torch.of_a_site", "/opt/site/torch/of_a_site.py"),
        ("lightning.of_a_site", "/opt/site/lightning/of_a_site.py"),
    ],
)
def test_a_callback_of_a_package_is_not_named(monkeypatch, name, file):
    class OfPackage(Counter):
        pass

    module = types.ModuleType(name)
    module.__file__ = file
    monkeypatch.setitem(sys.modules, name, module)
    OfPackage.__module__ = name
    callbacks = OfPackage(), Library()
    attributes = begun(*callbacks)
    for callback in callbacks:
        callback.steps = callback.waited = 1
    assert attributes.changed() == []


def test_a_callback_that_says_what_is_saved_is_not_named():
    attributes = begun(callback := Saved())
    callback.steps = 1
    assert attributes.changed() == []


class Unreadable:
    """Attributes of which nothing can be read."""

    @property
    def __dict__(self):
        raise RuntimeError("no attributes")


class Incomparable(float):
    """A number that cannot be compared."""

    __slots__ = ()

    def __ne__(self, other):
        raise RuntimeError("no comparison")

    __hash__ = None


class Odd:
    """As an array of numpy, of which nothing can be read."""


Odd.__name__ = "ndarray"


class OddType(type):
    """A class that does not say where it is from."""

    @property
    def __module__(cls):
        raise RuntimeError("no module")


def test_no_error_of_a_scripts_objects_reaches_the_script(agent, capsys):
    for odd in (Unreadable(), OddType("Named", (), {})()):
        attributes = begun(Counter(), odd)
        assert attributes.begun
        attributes.tell_changed()
    callback = Counter()
    attributes = begun(callback)
    callback.steps, callback.table, callback.center = 1, Odd(), None
    attributes.tell_changed()
    callback = Counter()
    callback.steps = {"best": Incomparable(0)}
    attributes = begun(callback)
    callback.steps = Incomparable(1)
    attributes.tell_changed()
    assert not sentences(agent, capsys)


def test_a_number_of_a_class_of_its_own_is_left_alone():
    callback = Counter()
    callback.steps = Incomparable(0)
    attributes = begun(callback)
    callback.steps, callback.best = Incomparable(1), 0.5
    assert attributes.changed() == ["Counter.best"]


def test_at_most_a_thousand_attributes_are_read():
    callback = Counter()
    vars(callback).update({f"number{n}": 0 for n in range(5000)})
    attributes = begun(callback)
    vars(callback).update({f"number{n}": 1 for n in range(5000)})
    assert 900 < len(attributes.changed()) <= 1000


def test_the_job_is_told_once_and_of_three(agent, capsys):
    callback = Counter()
    attributes = begun(callback)
    for change in list(CHANGES.values())[:5]:
        change(callback)
    attributes.tell_changed()
    attributes.tell_changed()
    (sentence,) = sentences(agent, capsys)
    assert "Counter.steps, Counter.best, Counter.name and 2 more changed" in sentence
    assert "Do that." in sentence


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
def test_a_trainers_callbacks_are_named_once_in_a_job(agent, capsys, tmp_path, monkeypatch, train):
    pytest.importorskip("transformers" if train is hugging_face else "lightning")
    for stop in (3, 5):
        with pytest.raises(Stopped):
            train(tmp_path, stop, monkeypatch)
        notices = sentences(agent, capsys)
        assert len(notices) == (stop == 3)
        if notices:
            assert "Plain.batches, Stopping.looks changed in the training" in notices[0]
            assert "if later steps need them." in notices[0]
            assert ("ExportableState" in notices[0]) is (train is hugging_face)
        report.sentence_keys.clear()


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


def test_a_module_whose_parameters_cannot_be_read_stops_nothing(capsys):
    class Broken(torch.nn.Linear):
        def parameters(self, recurse=True):
            raise RuntimeError("no parameters")

    broken = Broken(1, 1)
    optimizer = torch.optim.SGD([broken.weight, torch.nn.Parameter(torch.ones(1))], lr=0.1)
    warn_about_unsaved_parameters({"model": broken, "optimizer": optimizer}, "Trainer", "Do that.")
    assert "parameters that are of no module" not in capsys.readouterr().err
