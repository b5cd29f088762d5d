"""The generators go on where their saved states were, through a snapshot's safe loading."""

import io
import random

import numpy
import torch

from malletrain.training import rng


def draw():
    return (
        random.random(),
        random.gauss(0, 1),
        numpy.random.normal(),
        numpy.random.randint(1000),
        float(torch.rand(1)),
    )


def test_every_generator_goes_on_where_it_was():
    draw()  # an odd number of normal draws leaves a second one cached, which is part of the state
    file = io.BytesIO()
    torch.save(rng.state(), file)
    first = [draw() for _ in range(3)]
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    file.seek(0)
    rng.load(torch.load(file, weights_only=True))
    assert [draw() for _ in range(3)] == first


def test_states_of_generators_that_are_not_here_are_left_out():
    before = torch.get_rng_state()
    rng.load({"another library": [1, 2, 3]})
    assert torch.equal(torch.get_rng_state(), before)
