"""What a configuration says of the cost of leases, and what `check` says of it."""

import pytest

from malletrain.cli.check import accounting
from malletrain.config.model import ConfigError, parse_config
from malletrain.daemon.site.backends import slurm_settings
from malletrain.daemon.site.settings import controller_settings

SLURM = '[scheduler]\nkind = "slurm"\n[scheduler.slurm]\npartition = "low"\n'


def test_watts_by_class():
    config = parse_config(SLURM + '[accounting]\nwatts = ["default 120 350.5", "a100 = 300 1600"]')
    assert config.accounting.watts_by_class == {"default": (120, 350.5), "a100": (300, 1600)}


@pytest.mark.parametrize("text", ["a100", "a100 300", "a100 1600 300", "a100 x y", ""])
def test_watts_that_say_nothing_are_refused(text):
    with pytest.raises(ConfigError, match="watts idle, watts with a job"):
        parse_config(SLURM + f'[accounting]\nwatts = ["{text}"]')


def test_a_class_is_named_once():
    with pytest.raises(ConfigError, match="write each class once"):
        parse_config(SLURM + '[accounting]\nwatts = ["a 1 2", "a 1 3"]')


def test_the_rules_reach_the_controller_and_the_scavenger():
    more = 'min_lease = "30 min"\nmax_leases_per_user = 7\nleave_at_limits = true\n'
    config = parse_config(SLURM + more + '[accounting]\nmin_charge = "1 h"')
    core, scavenger = controller_settings(config), slurm_settings(config)
    assert (core.min_charge_s, core.min_lease_s, core.max_leases_per_owner) == (3600, 1800, 7)
    assert core.due_s == 3600
    assert (scavenger.min_lease_s, scavenger.max_leases_per_user) == (1800, 7)
    assert scavenger.lease.leave_at_limits
    assert (scavenger.submit_rate, scavenger.submit_burst, scavenger.request_rate) == (1, 10, 2)
    plain = controller_settings(parse_config('[scheduler]\nkind = "local"'))
    assert (plain.due_s, plain.max_leases_per_owner) == (0, 0)


@pytest.mark.parametrize(
    ("text", "verdicts", "words"),
    [
        ("", [True], "no min_charge"),
        ('[accounting]\nmin_charge = "1 h"', [True, None], "less than 1 h"),
        ('[gaps]\nexpected_length = "2 h"\n[accounting]\nmin_charge = "1 h"', [True], "1 h"),
        ('time_limit = "30 min"\n[accounting]\nmin_charge = "1 h"', [True, None, False], "longer"),
        ('[accounting]\nwatts = ["default 1 2"]', [True, True], "kWh by node class"),
        ('[accounting]\nwatts = ["a100 1 2"]', [True, False], "a100, which is no class"),
        (
            '[gaps]\nclasses = ["a100", "h100"]\n[accounting]\nwatts = ["a100 1 2"]',
            [True, None],
            "does not name h100",
        ),
    ],
)
def test_what_check_says(text, verdicts, words):
    findings = list(accounting(parse_config(SLURM + text)))
    assert [works for works, _ in findings] == verdicts, findings
    assert words in " ".join(sentence for _, sentence in findings)
