"""Ranks as the environment of a worker has them."""

from __future__ import annotations

import pytest

import malletrain.elastic
from malletrain.training.ranks import max_world


@pytest.mark.parametrize(
    ("variables", "argument", "ranks"),
    [
        ({}, None, 1),
        ({"WORLD_SIZE": "3"}, None, 3),
        ({"WORLD_SIZE": "3", "MALLETRAIN_MAX_WORLD_SIZE": "16"}, None, 16),
        ({"WORLD_SIZE": "3", "MALLETRAIN_MAX_WORLD_SIZE": "2"}, None, 3),
        ({"WORLD_SIZE": "3", "MALLETRAIN_MAX_WORLD_SIZE": "many"}, None, 3),
        ({"WORLD_SIZE": "3", "MALLETRAIN_MAX_WORLD_SIZE": "4"}, 5, 5),
        ({"WORLD_SIZE": "3"}, 2, 2),
    ],
)
def test_the_maximum_number_of_ranks(monkeypatch, variables, argument, ranks):
    for name in ("RANK", "WORLD_SIZE", "MALLETRAIN_MAX_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert max_world(argument) == ranks
    assert malletrain.elastic.max_world is max_world
