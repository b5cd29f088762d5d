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


def test_ranks_that_are_seeded_differently_differ_after_a_restore_too():
    def restored(rank, of_rank_0):
        random.seed(5)
        numpy.random.seed(5)
        torch.manual_seed(5 + rank)
        seeds = rng.RankSeeds(of_rank_0)
        rng.load(states)
        seeds.separate()
        return draw()

    random.seed(5)
    numpy.random.seed(5)
    torch.manual_seed(5)
    texts = []
    rng.RankSeeds(lambda text: texts.append(text) or text)
    draw()
    states = rng.state()
    as_rank_0 = draw()
    drawn = [restored(rank, lambda text: texts[0]) for rank in (0, 1, 2, 1)]
    assert drawn[0] == as_rank_0
    assert [d[:4] for d in drawn] == [as_rank_0[:4]] * 4
    assert len({d[4] for d in drawn}) == 3
    assert drawn[1] == drawn[3]


def test_generators_without_a_seed_are_not_those_of_rank_0():
    states, own = rng.state(), rng.RankSeeds(lambda text: '{"python": "another", "numpy": "one"}')
    expected = draw()
    rng.load(states)
    own.separate()
    assert not any(a == b for a, b in zip(draw(), expected, strict=True))


def test_a_branch_depends_on_the_state_and_the_number():
    def after(seed, number):
        torch.manual_seed(seed)
        rng.branch(number)
        return float(torch.rand(1))

    assert len({after(1, 4), after(1, 8), after(2, 4)}) == 3
    assert after(1, 4) == after(1, 4)
