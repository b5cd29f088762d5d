"""What a site's configuration says to the core: where it says nothing, the core's own defaults."""

from __future__ import annotations

from dataclasses import replace

from malletrain.config.model import Config, parse_config
from malletrain.core.settings import ControllerSettings, ProfilingSettings
from malletrain.daemon.settings import controller_settings


def site(text: str = "") -> Config:
    return parse_config('[scheduler]\nkind = "local"\n' + text)


def test_a_site_that_says_nothing_has_the_cores_defaults():
    assert controller_settings(site()) == ControllerSettings(profiling=ProfilingSettings())


def test_what_a_site_says_counts():
    told = controller_settings(
        site('[allocation]\nmin_interval = "7 s"\nstart = "40 s"\n[profiling]\nenabled = false\n')
    )
    default = ControllerSettings()
    cost = replace(default.planning.cost, start_s=40.0)
    planning = replace(default.planning, cost=cost)
    assert told == replace(default, planning=planning, min_interval_s=7.0)
