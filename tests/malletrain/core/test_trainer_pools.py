"""How many jobs change the pool in which they count."""

import pytest

from allocator import NodeInfo
from malletrain.core import trainer_plans
from malletrain.core.planning import Candidate
from malletrain.core.trainer_plans import MAX_MOVES, assign_pools

POOLS = {f"{pool}{k}": NodeInfo(pool) for pool in "ab" for k in range(200)}


@pytest.mark.parametrize(("most", "moved"), [(0, 0), (3, 3), (MAX_MOVES, MAX_MOVES), (1000, 100)])
def test_of_jobs_whose_pool_is_asked_for_too_much_a_limited_number_moves(monkeypatch, most, moved):
    """200 jobs that hold a node of ``a`` each would all have two: 100 find room in ``b``."""
    monkeypatch.setattr(trainer_plans, "MAX_MOVES", most)
    jobs = [Candidate(f"j{k}", 1, 2, (f"a{k}",)) for k in range(200)]
    pool_of = assign_pools({"one": jobs}, POOLS)
    assert [pool_of[c.job] for c in jobs].count("b") == moved
