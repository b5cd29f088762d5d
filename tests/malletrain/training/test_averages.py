"""An average of the weights that the script did not pass is named."""

from __future__ import annotations

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import malletrain
from malletrain.training.unsaved_objects import UnsavedAverages
from tests.malletrain.training.worker_side import as_plain_script


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    with as_plain_script(monkeypatch):
        yield


def passed(average):
    return {"average": average}


def as_state(average):
    return {"states": {"average": average.state_dict()}}


def inside(average):
    return {"both": torch.nn.ModuleList([average])}


def in_own_class(average):
    class Callback:
        def state_dict(self):
            return {"average": average.state_dict()}

        def load_state_dict(self, state):
            average.load_state_dict(state["average"])

    return {"callback": Callback()}


def weights_in_dict(average):
    return {"states": {"ema": average.module.state_dict()}}


def later_in_dict(average):
    return {"states": {"ema": None}}


def in_own_state_dict(average):
    class Model(torch.nn.Linear):
        def get_extra_state(self):
            return average.state_dict()

        def set_extra_state(self, state):
            average.load_state_dict(state)

    return {"other": Model(2, 1)}


def only_its_module(average):
    return {"ema": average.module}


def absent(average):
    return {}


def others(average):
    own = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    return {
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "scaler": torch.amp.GradScaler("cpu"),
        "sampler": malletrain.ElasticSampler(8, global_batch_size=2, rank=0, world_size=1),
        "counts": {"best": 1.0, "losses": [1.0, 2.0], "name": "x"},
    }


@pytest.mark.parametrize(
    ("objects", "is_named"),
    [
        *((absent, True), (others, True), (passed, False), (as_state, False), (inside, False)),
        (only_its_module, True),
        *(
            (in_own_class, False),
            (weights_in_dict, False),
            (later_in_dict, False),
            (in_own_state_dict, False),
        ),
    ],
)
def test_an_average_that_is_not_saved_is_named_once(objects, is_named, tmp_path, capsys):
    model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    average, of_other = AveragedModel(model), AveragedModel(other)
    snapshot = malletrain.Snapshot(tmp_path / "x.pt", model=model, **objects(average))
    of_other.update_parameters(other)
    snapshot.save()
    assert "average" not in capsys.readouterr().err
    average.update_parameters(model)
    snapshot.save()
    snapshot.save()
    messages = capsys.readouterr().err
    assert messages.count("was not given the average of 'model' (AveragedModel)") == is_named


def test_a_module_that_cannot_be_read_stops_nothing():
    class Odd(torch.nn.Linear):
        def parameters(self, recurse=True):
            raise RuntimeError("not yet")

    model, other = Odd(2, 1), torch.nn.Linear(2, 1)
    averages = UnsavedAverages("Snapshot", {"model": model})
    average = AveragedModel(other)
    average.update_parameters(other)
    averages.tell_unsaved()
