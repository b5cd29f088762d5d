"""What would have the ranks' models drift apart without a word: learning rates that differ, parts
of the training that the run does not hold, parameters that are trained on some ranks only.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import malletrain.elastic as elastic
from malletrain.elastic import same_on_all
from malletrain.elastic.module_modes import modes_of
from tests.malletrain.elastic.conductor import Conductor, conducted

X = torch.arange(8.0).reshape(2, 4) / 8


def model_and_optimizer() -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(folder: str, kind: str) -> None:
    """As scripts are written that were not made for this. ``counter``: of their own, by which they
    compute the learning rate. ``optimizer``, ``model``, ``head``: it is not passed. ``thaws``: the
    first layer is frozen, and trained after so many steps.
    """
    model, optimizer = model_and_optimizer()
    head = torch.nn.Linear(1, 1)
    arguments: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if kind == "head":
        optimizer.add_param_group({"params": head.parameters()})
    if kind == "thaws":
        model[0].requires_grad_(False)
    arguments.pop(kind, None)
    run = elastic.Run(**arguments)
    net = run.ddp(model)
    for counter, done in enumerate(run.steps(1 << 30)):
        if kind == "counter":
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + counter)
        if kind == "thaws" and done == 3:
            model[0].requires_grad_(True)
            model[1].eval()
        with run.step(samples=2):
            optimizer.zero_grad()
            head(net(X * (run.rank + 1))).square().sum().backward()
            optimizer.step()
            time.sleep(0.005)
        Path(folder, f"at-{run.world_size}").write_text(str(run.steps_done))
        if Path(folder, "stop").exists():
            run.request_stop()
    end = [run.digest(), repr(modes_of(model)), run.world_size]
    Path(folder, f"end-{run.rank}").write_text(json.dumps(end))


def steps_at(folder: Path, size: int) -> int:
    path = folder / f"at-{size}"
    return int(path.read_text() or 0) if path.exists() else 0


def grown(c: Conductor, folder: Path) -> None:
    """Two train; a third one joins when they have done ten steps."""
    members = c.start(2)
    c.round(members)
    c.until(lambda: steps_at(folder, 2) >= 10, "ten steps are done")
    c.round([*members, *c.start(1)], wait=False)


@pytest.mark.thorough
def test_a_counter_of_the_scripts_own_is_noticed_when_somebody_joins(tmp_path):
    with conducted(tmp_path, train, str(tmp_path), "counter") as c:
        grown(c, tmp_path)
        c.until(lambda: not any(w.alive for w in c.workers), "all have given up")
        outputs = c.outputs()
    assert outputs.count("made their last update at different learning rates") == 3
    assert "rank 2: 0.005 now), so that their models now differ" in outputs
    assert steps_at(tmp_path, 3) <= steps_at(tmp_path, 2) + 2


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("optimizer", "This Adam trains the run's model and is not of the run's state"),
        ("model", r"run.ddp\(model\): 4 of 4 parameters are of no module"),
        ("head", "The optimizer trains 2 parameters that are of no module"),
    ],
)
def test_what_the_run_does_not_hold_is_refused(tmp_path, kind, says):
    with pytest.raises(elastic.ElasticError, match=says):
        train(str(tmp_path), kind)


def test_another_optimizer_of_something_else_is_nobodys_business(tmp_path):
    model, optimizer = model_and_optimizer()
    run = elastic.Run(model=model, optimizer=optimizer)
    other, others = model_and_optimizer()
    with run.step(samples=1):
        other(X).sum().backward()
        others.step()
    assert run.steps_done == 1


def test_a_layer_that_is_trained_later_is_exchanged_and_so_at_who_joins(tmp_path):
    """Each rank has other samples: without an exchange their layers are not the same."""
    with conducted(tmp_path, train, str(tmp_path), "thaws") as c:
        grown(c, tmp_path)
        c.until(lambda: steps_at(tmp_path, 3) >= 20, "it trains on three")
        (tmp_path / "stop").touch()
        c.finish()
    ends = [json.loads(path.read_text()) for path in tmp_path.glob("end-*")]
    assert len(ends) == 3
    assert len({digest for digest, _, _ in ends}) == 1
    assert {switches for _, switches, _ in ends} == {ends[0][1]}
    assert "'0.weight': True" in ends[0][1]
    assert "'1': False" in ends[0][1]


@pytest.mark.parametrize(
    ("rank_rates", "different"),
    [
        ([same_on_all.UNKNOWN, same_on_all.UNKNOWN], False),
        ([0.3, same_on_all.UNKNOWN], False),
        ([0.3, 0.1 + 0.2], False),
        ([0.3, 0.3001, same_on_all.UNKNOWN], True),
        ([0.0, 0.0], False),
        ([0.0, 1e-6], True),
    ],
)
def test_rates_differ_by_more_than_rounding(rank_rates, different):
    maxima = [max(one) for one in zip(*map(same_on_all.both, rank_rates), strict=True)]
    assert same_on_all.differ(*maxima) is different


def test_every_rate_counts():
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    groups = [{"params": [first], "lr": 0.1}, {"params": [second], "lr": torch.tensor(0.2)}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.0)
    before = same_on_all.rate_of(optimizer)
    for group, key, value in ((0, "lr", 0.2), (1, "lr", 0.1), (0, "betas", (0.8, 0.999))):
        original = optimizer.param_groups[group][key]
        optimizer.param_groups[group][key] = value
        assert same_on_all.rate_of(optimizer) != before
        optimizer.param_groups[group][key] = original
    assert same_on_all.rate_of(optimizer) == before
    assert same_on_all.rate_of(optimizer, before) > before
