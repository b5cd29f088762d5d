import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from infinicache.availability import (
    PoolChange,
    expected_losses,
    loss_probability,
    loss_with_copies,
    lost_within,
    monte_carlo,
)


def test_by_hand():
    assert loss_probability(4, 2, 1, 2) == pytest.approx(
        1 / 6
    )  # both of two chunks among both of two nodes
    assert loss_probability(400, 12, 2, 0) == 0
    assert loss_probability(12, 12, 2, 3) == 1
    with pytest.raises(ValueError, match="do not fit 4 nodes"):
        loss_probability(4, 5, 1, 1)


@given(st.integers(1, 40), st.data())
def test_more_gone_is_worse_and_more_parity_better(nodes, data):
    chunks = data.draw(st.integers(1, nodes))
    spare = data.draw(st.integers(0, chunks))
    lost_nodes = data.draw(st.integers(0, nodes - 1))
    here = loss_probability(nodes, chunks, spare, lost_nodes)
    assert 0 <= here <= 1
    assert loss_probability(nodes, chunks, spare, lost_nodes + 1) >= here - 1e-12
    assert loss_probability(nodes, chunks, spare + 1, lost_nodes) <= here + 1e-12


def test_monte_carlo_agrees_with_the_formula_for_one_event():
    names = tuple(f"n{i}" for i in range(20))
    rng = random.Random(1)
    changes = [PoolChange(0.0, names), PoolChange(100.0, lost=names[:6])]
    share, error = monte_carlo(changes, 8, 2, life_s=1000, repair_s=1, trials=4000, rng=rng)
    assert abs(share - loss_probability(20, 8, 2, 6)) < 4 * error + 1e-9


def test_repair_in_time_saves_objects():
    names = tuple(f"n{i}" for i in range(20))
    changes = [
        PoolChange(0.0, names),
        *(PoolChange(100.0 * (i + 1), lost=(names[i],)) for i in range(10)),
    ]
    fast, _ = monte_carlo(changes, 8, 2, life_s=5000, repair_s=50, trials=500, rng=random.Random(2))
    slow, _ = monte_carlo(
        changes, 8, 2, life_s=5000, repair_s=5000, trials=500, rng=random.Random(2)
    )
    assert fast == 0
    assert slow > 0.5


def test_a_pool_that_is_always_too_small():
    share, _ = monte_carlo(
        [PoolChange(0.0, ("a",)), PoolChange(9.0)],
        3,
        1,
        life_s=1,
        repair_s=1,
        trials=10,
        rng=random.Random(0),
    )
    assert share != share


def test_expected_losses_add_up():
    assert expected_losses([(2, 1), (2, 1)], 4, 2) == pytest.approx(2 / 6)


def test_copies_are_gone_with_both_their_nodes():
    """Against every way in which nodes can go and copies can lie, for a small pool."""
    nodes, chunks, spare = 5, 3, 1
    for lost_nodes in range(nodes + 1):
        lost = total = 0
        for taken in itertools.combinations(range(nodes), lost_nodes):
            for peers in itertools.product(range(nodes), repeat=chunks):
                if any(peer == own for own, peer in enumerate(peers)):
                    continue
                total += 1
                lost += sum(own in taken and peers[own] in taken for own in range(chunks)) > spare
        assert loss_with_copies(nodes, chunks, spare, lost_nodes, 1.0) == pytest.approx(
            lost / total
        )
    for lost_nodes in range(13):
        assert loss_with_copies(20, 12, 2, lost_nodes, 0.0) == pytest.approx(
            loss_probability(20, 12, 2, lost_nodes)
        )


def test_an_hour_has_its_share_of_the_losses():
    once = loss_probability(10, 3, 1, 2)
    assert lost_within([(10, 2)], 1.0, 3, 1) == pytest.approx(once)
    assert lost_within([(10, 2)] * 2, 0.5, 3, 1) == pytest.approx(once)
    assert lost_within([(10, 2)] * 2, 1.0, 3, 1) == pytest.approx(1 - (1 - once) ** 2)
    assert lost_within([(10, 1)] * 9, 1.0, 3, 1) == 0.0
    assert lost_within([(10, 10)], 1.0, 3, 1) == pytest.approx(1.0)
    assert lost_within([(10, 4)], 1.0, 3, 1, 1.0) < lost_within([(10, 4)], 1.0, 3, 1)
