"""``parallelize`` in the manner of torchtitan: parts of the model are wrapped before they are
sharded, and their tensors have other names then.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

import malletrain.elastic as elastic
from malletrain.elastic.sharded.model import exchange_parameters
from tests.malletrain.elastic.conductor import conducted
from tests.malletrain.elastic.sharded import scripts
from tests.malletrain.elastic.sharded.test_live import counts_as_if_undisturbed
from tests.malletrain.elastic.test_run import change_at, records
from tests.torch_versions import trains_shards


class Layer(torch.nn.Module):
    """With a buffer that no state dict has."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(before, after)
        self.register_buffer("scale", torch.full((after,), 1.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the same length."""
        return torch.tanh(self.linear(x)) * self.scale


class Layered(torch.nn.Module):
    """Two layers that can be exchanged for wrapped ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleDict({"0": Layer(8, 13), "1": Layer(13, 1)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number a sample."""
        for layer in self.layers.values():
            x = layer(x)
        return x


def parallelize(model: Layered, mesh: Any) -> None:
    for name, layer in model.layers.items():
        wrapped = torch.compile(checkpoint_wrapper(layer), backend="eager")
        model.layers.register_module(name, wrapped)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def train(folder: str, options: dict[str, Any]) -> None:
    """The training of the other tests with this model."""
    scripts.Net, scripts.parallelize = Layered, parallelize  # type: ignore[assignment, misc]
    scripts.train(folder, options)


@pytest.mark.parametrize(
    "every",
    [pytest.param(3, id="copies"), pytest.param(0, id="snapshot", marks=pytest.mark.thorough)],
)
@trains_shards
def test_a_wrapped_model_grows_and_goes_on_after_a_loss(tmp_path, monkeypatch, every):
    options = {
        "samples": 240,
        "gates": [6],
        "run": {"replicate_every": every},
        "snapshot": True,
        "holds": (2, 10),
    }
    with conducted(tmp_path, train, str(tmp_path), options) as c:
        members, new = c.start(2), c.start(1)
        c.round(members)
        change_at(c, tmp_path, 6)
        c.round([*members, *new], wait=False)
        c.until(c.all_checked_in, "all have checked in")
        (tmp_path / "go-6").touch()
        c.run()
        change_at(c, tmp_path, 10)
        c.round(c.lose(members[1]))
        c.finish()
        assert "rehearsal" not in c.outputs()
    monkeypatch.setattr(scripts, "Net", Layered)
    counts_as_if_undisturbed(tmp_path, options)
    assert {r["size"] for r in records(tmp_path)} == {2, 3}


def test_a_parameter_that_lost_its_name_is_named():
    class Other(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = Layered().layers

    old = Layered()
    optimizer = torch.optim.SGD(old.parameters(), lr=0.1)
    with pytest.raises(elastic.ElasticError, match=r"without the parameter layers\.0\.linear\.wei"):
        exchange_parameters(optimizer, old, Other())
