"""What a script says of its sharded model, and the sentences where it does not fit."""

import pytest
import torch

import malletrain.elastic as elastic
from malletrain.training.torch_private import gloo_ignores_operations
from tests.malletrain.elastic.conductor import conducted
from tests.malletrain.elastic.sharded.scripts import Net, optimizer_of, parallelize, train
from tests.malletrain.elastic.test_run import change_at

GOOD = {"build": Net, "parallelize": parallelize, "optimizer": optimizer_of}


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"parallelize": None}, TypeError, "needs build=, parallelize= and optimizer="),
        ({"optimizer": None}, TypeError, "all functions"),
        ({"model": Net()}, TypeError, "all functions"),
        ({"warmup": print}, TypeError, "warmup cannot run a sharded model"),
        ({"shard": "rack"}, ValueError, "shard must be 'all' or 'node', not 'rack'"),
        ({"replicate_every": -1}, ValueError, "a number of steps from 0, not -1"),
        ({"shard": "node", "replicate_every": 2}, ValueError, "every node holds the whole state"),
        ({"build": lambda: None}, TypeError, r"build\(\) returned a NoneType"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_a_sentence(arguments, error, says):
    with pytest.raises(error, match=f"elastic.Run: .*{says}"):
        elastic.Run(**{**GOOD, **arguments})


def test_an_optimizer_of_something_else_is_refused():
    from malletrain.elastic.sharded.model import exchange_parameters

    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    with pytest.raises(elastic.ElasticError, match="4 parameters that are not of the model"):
        exchange_parameters(optimizer, Net(), Net())


@pytest.mark.skipif(not gloo_ignores_operations(), reason="this torch averages over gloo")
@pytest.mark.parametrize("at_first", [2, 1])
def test_more_than_one_rank_is_refused_where_torch_adds_up_gradients(tmp_path, at_first):
    with conducted(tmp_path, train, str(tmp_path), {"samples": 120, "gates": [5]}) as c:
        members, new = c.start(at_first), c.start(2 - at_first)
        c.round(members, wait=at_first == 1)
        if new:
            change_at(c, tmp_path, 5)
            c.round([*members, *new], wait=False)
            c.until(c.all_checked_in, "all have checked in")
            (tmp_path / "go-5").touch()
        c.until(lambda: not any(w.alive for w in c.members), "all have ended")
        for worker in c.members:
            output = worker.output.read_text()
            assert "elastic.Run: the gradients of the model would be wrong: " in output
            assert "Install torch 2.9 or newer" in output
            assert worker.process.exitcode != 0
