"""What a site's configuration says to the core: where it says nothing, the core's own defaults."""

from __future__ import annotations

from dataclasses import replace

import pytest

from malletrain.config.model import Config, parse_config
from malletrain.core.settings import ControllerSettings, ProfilingSettings
from malletrain.daemon.site.settings import (
    controller_settings,
    round_settings,
    slot_prices,
    unpriced_slots,
)


def site(text: str = "") -> Config:
    return parse_config('[scheduler]\nkind = "local"\n' + text)


def test_a_site_that_says_nothing_has_the_cores_defaults():
    assert controller_settings(site()) == ControllerSettings(profiling=ProfilingSettings())


@pytest.mark.parametrize(
    ("kind", "gaps", "turn_s"),
    [
        ("local", "", 0.0),
        ("slurm", "", 30.0),
        ("pbs", "", 30.0),
        ("pbs", '[gaps]\nidle_for = "7 s"\n', 7.0),
    ],
)
def test_a_node_that_is_reclaimed_is_left_to_the_main_scheduler_for_its_turn(kind, gaps, turn_s):
    # Found on PBS: its next user was expected to have the node in 5 s, and had it after 31.
    settings = controller_settings(parse_config(f'[scheduler]\nkind = "{kind}"\n{gaps}'))
    assert settings.reclaim_way_s == ControllerSettings().reclaim_way_s + turn_s


def test_what_a_site_says_counts():
    settings = controller_settings(
        site('[allocation]\nmin_interval = "7 s"\nstart = "40 s"\n[profiling]\nenabled = false\n')
    )
    default = ControllerSettings()
    cost = replace(default.planning.cost, start_s=40.0)
    planning = replace(default.planning, cost=cost)
    assert settings == replace(default, planning=planning, min_interval_s=7.0)


def test_the_host_of_a_slot_is_known_to_rounds():
    assert round_settings(site()).by_host(["c1/g.0", "c2/g.0", "c1/g.1"]) == (
        *("c1/g.0", "c1/g.1"),
        "c2/g.0",
    )


KINDS = """
[[scheduler.local.slots]]
name = "gpu"
memory = "1 GiB"
[[scheduler.local.slots]]
name = "cpu"
memory = "1 GiB"
price = 0.1
"""


def test_a_slot_costs_its_part_of_a_host_unless_the_site_says_what_it_costs():
    assert slot_prices(site(KINDS), {"gpu": 0.25, "cpu": 0.5}) == {"gpu": 0.25, "cpu": 0.1}
    assert slot_prices(site(KINDS), {}) == {"gpu": 1.0, "cpu": 0.1}
    assert slot_prices(site(), {}) == {}


def test_a_price_is_known_once_the_site_or_a_poll_says_it():
    assert unpriced_slots(site(KINDS), {}) == {"gpu"}
    assert unpriced_slots(site(KINDS), {"gpu": 0.25}) == set()
