"""Shares in the simulator: three users' parts of a few nodes, and what each of them held."""

import pytest

from malletrain.core.settings import ControllerSettings, ShareSettings
from malletrain.sim.engine import simulate
from malletrain.sim.settings import SimSettings
from tests.malletrain.sim.conftest import job, trace_of

HOURS = 24.0 * 10
GAPS = {f"n{k}": [(0.0, 3600 * HOURS)] for k in range(6)}


def jobs():
    """The one who comes last, and wants most, has the fastest job."""
    return [
        job("x", rate=10.0, user="ann"),
        job("y", rate=15.0, user="bob"),
        job("z", rate=20.0, user="cyd"),
    ]


def parts(shares):
    site = ControllerSettings(shares=shares)
    settings = SimSettings(site=site, starvation_s=float("inf"))
    hours_of = simulate(trace_of(GAPS, 3600 * HOURS), jobs(), settings).node_hours_by_user
    total = sum(hours_of.values())
    assert total == pytest.approx(6 * HOURS, rel=0.01)
    return {user: hours / total for user, hours in hours_of.items()}


def test_the_plain_plan_serves_the_fastest_and_shares_serve_all():
    assert parts(None) == {"ann": 0.0, "bob": 0.0, "cyd": pytest.approx(1.0)}
    shares = ShareSettings({"ann": 3.0, "bob": 2.0, "cyd": 1.0})
    assert parts(shares) == pytest.approx({"ann": 3 / 6, "bob": 2 / 6, "cyd": 1 / 6}, abs=0.02)
