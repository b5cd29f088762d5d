"""What a script says of its sharded model, and the sentences where it does not fit."""

import pytest
import torch

import malletrain.elastic as elastic
from tests.malletrain.elastic.sharded.scripts import Net, optimizer_of, parallelize

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
