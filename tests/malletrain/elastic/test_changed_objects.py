"""An object of the run that only some ranks change."""

from __future__ import annotations

import math
from pathlib import Path

import numpy
import torch
from torch.optim.swa_utils import AveragedModel

import malletrain.elastic as elastic
from malletrain.elastic.same_on_all import ChangedObjects
from tests.malletrain.elastic.conductor import conducted


def keeps(folder: str, kind: str) -> None:
    """An average of the weights, or the lowest loss, that rank 0 alone keeps."""
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average, best = AveragedModel(model), {"loss": math.inf}
    run = elastic.Run(model=model, optimizer=optimizer, average=average, best=best)
    net = run.ddp(model)
    for _ in run.steps(6):
        with run.step(samples=2):
            optimizer.zero_grad()
            loss = net(torch.ones(2, 3)).square().sum()
            loss.backward()
            optimizer.step()
        if kind == "all" or run.rank == 0:
            if kind != "dict":
                average.update_parameters(model)
            best["loss"] = min(best["loss"], float(loss))
        Path(folder, f"done-{run.rank}").write_text(str(run.steps_done))


def test_a_module_that_rank_0_alone_changes_is_refused_after_two_steps(tmp_path):
    with conducted(tmp_path, keeps, str(tmp_path), "average") as c:
        c.round(c.start(2))
        c.until(lambda: not any(w.alive for w in c.workers), "all have given up")
        outputs = c.outputs()
    assert outputs.count("ElasticError: Only some ranks changed 'average' since the step") == 2
    assert [(tmp_path / f"done-{rank}").read_text() for rank in range(2)] == ["1", "1"]


def test_a_dict_that_rank_0_alone_changes_is_reported(tmp_path):
    with conducted(tmp_path, keeps, str(tmp_path), "dict") as c:
        c.round(c.start(2))
        c.finish()
        outputs = c.outputs()
    assert outputs.count("Only some ranks changed the dict 'best' between two steps") == 1
    assert (tmp_path / "done-0").read_text() == "6"


def test_what_all_ranks_change_is_not_reported(tmp_path):
    with conducted(tmp_path, keeps, str(tmp_path), "all") as c:
        c.round(c.start(2))
        c.finish()
        outputs = c.outputs()
    assert "Only some ranks" not in outputs


def test_each_kind_of_change_has_its_bit():
    first, second = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    values = {"best": 1.0, "seen": numpy.zeros(2), "list": [1]}
    changed = ChangedObjects(lambda: {"a": first, "b": second}, {"values": values})
    assert changed.since_last() == -math.inf
    assert changed.since_last() == 0
    with torch.no_grad():
        second.bias.add_(1)
    assert changed.since_last() == 0b010
    first.weight.data[0, 1] += 1
    assert changed.since_last() == 0b001
    values["best"] = 0.5
    assert changed.since_last() == 0b100
    values["seen"] = numpy.ones(2)
    values["best"] = math.nan
    assert changed.since_last() == 0b100
    changed.forget()
    assert changed.since_last() == -math.inf
    assert changed.names(0b110, 0b001) == (["a", "b"], ["values"])


def test_a_tensor_on_a_device_changes_with_what_is_written_to_it_or_replaces_it():
    values = {"loss": torch.zeros(2, device="meta"), "table": Odd()}
    changed = ChangedObjects(dict, {"values": values})
    changed.since_last()
    seen = [changed.since_last()]
    values["loss"].add_(1)
    seen.append(changed.since_last())
    values["loss"] = torch.zeros(2, device="meta")
    seen.append(changed.since_last())
    values["table"] = Odd()
    seen.append(changed.since_last())
    assert seen == [0, 1, 1, 1]


class Odd:
    """Values that cannot be compared."""

    __hash__ = None

    def __eq__(self, other):
        raise ValueError("The truth value is ambiguous.")
