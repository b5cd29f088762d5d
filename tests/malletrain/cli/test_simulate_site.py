"""``malletrain simulate --config``: the site's own settings are what is simulated."""

import json

import pytest

from malletrain.core import defaults
from malletrain.core.settings import ControllerSettings
from malletrain.sim import engine
from scavenger.trace import files, synthesis

SITE = """
[scheduler]
kind = "local"
[allocation]
t_fwd = "200 s"
debounce = "7 s"
min_interval = "44 s"
rescale_up = "6 s"
rescale_down = "5 s"
start = "9 s"
release_after = "77 s"
time_limit = "3 s"
prior_exponent = 0.8
[jobs]
max_running = 3
starvation = "20 min"
[profiling]
kappa = 1.5
"""


@pytest.fixture
def simulated(tmp_path, run, monkeypatch):
    """``simulated("--t-fwd", 5)``: the settings of the simulation, and its result."""
    file = tmp_path / "week.csv.gz"
    week = synthesis.synthesise(synthesis.SUMMIT, 40, 6 * 3600.0, seed=1, mean_idle=8.0)
    files.write(week, file)
    (tmp_path / "site.toml").write_text(SITE)
    all_settings = []

    def listening(idle, jobs, settings, *others):
        all_settings.append(settings)
        return simulate(idle, jobs, settings, *others)

    simulate = engine.simulate
    monkeypatch.setattr(engine, "simulate", listening)

    def call(*words):
        done = run("simulate", "--trace", file, "--jobs", 5, "--json", *words)
        assert done.exit_code == 0, done.output
        return all_settings[-1], json.loads(done.stdout)

    return call


def test_without_a_site_the_products_defaults_are_simulated(simulated):
    settings, _ = simulated()
    assert settings.controller() == ControllerSettings()
    assert settings.costs.up_s == defaults.RESCALE_UP_S
    assert ControllerSettings().min_interval_s == 30.0


def test_the_sites_settings_are_simulated_and_change_the_result(simulated, tmp_path):
    settings, result = simulated("--config", tmp_path / "site.toml")
    controller = settings.controller()
    assert (controller.planning.t_fwd_s, controller.planning.max_running) == (200.0, 3)
    assert (controller.planning.time_limit_s, controller.planning.prior_exponent) == (3.0, 0.8)
    assert (controller.debounce_s, controller.min_interval_s, controller.release_after_s) == (
        7.0,
        44.0,
        77.0,
    )
    assert controller.starvation_s == 1200.0
    assert controller.profiling.kappa == 1.5
    assert (settings.costs.up_s, settings.costs.down_s, settings.costs.start_s) == (6.0, 5.0, 9.0)
    assert result["samples"] != simulated()[1]["samples"]


def test_an_option_goes_before_the_site(simulated, tmp_path):
    settings, _ = simulated("--t-fwd", 50, "--config", tmp_path / "site.toml", "--max-jobs", 2)
    controller = settings.controller()
    assert (controller.planning.t_fwd_s, controller.planning.max_running) == (50.0, 2)
    assert controller.min_interval_s == 44.0
    assert settings.costs.up_s == 6.0


def test_a_site_that_is_wrong_is_refused_with_its_problems(run, tmp_path):
    (tmp_path / "site.toml").write_text('[scheduler]\nkind = "local"\n[allocation]\nsettel = "1 s"')
    done = run("simulate", "--trace", tmp_path / "x.csv", "--config", tmp_path / "site.toml")
    assert done.exit_code == 1
    assert "settel" in done.stderr
