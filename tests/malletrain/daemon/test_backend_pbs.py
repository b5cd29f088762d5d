"""From a configuration file to what the scavenger of PBS is told."""

from pathlib import Path

import pytest

from malletrain.config.model import ConfigError, load_config, parse_config
from malletrain.daemon.site.advertise import AddressError
from malletrain.daemon.site.backends import backend, pbs_settings
from scavenger.interface import SchedulerError
from scavenger.pbs.scavenger import PbsScavenger

SITES = Path(__file__).parents[3] / "site-configs"


def config(tmp_path, pbs="", gaps=""):
    text = (
        f'[daemon]\nstate_dir = "{tmp_path}/state"\n[scheduler]\nkind = '
        f'"pbs"\n[scheduler.pbs]\n{pbs}\n[gaps]\n{gaps}\n'
    )
    return parse_config(text)


def test_defaults(tmp_path):
    settings = pbs_settings(config(tmp_path, 'queue = "low"'))
    assert settings.lease.queue == "low"
    assert settings.lease.resources == ("ncpus", "ngpus", "mem")
    assert settings.lease.place == "pack:exclhost"
    assert settings.time_min_s is None, "PBS need not fit a lease in where it can preempt it"
    assert settings.lease.rerunnable == "auto"
    assert settings.output_dir == tmp_path / "state" / "leases"
    assert settings.needed_grace_s == 15.0
    assert "#MALLETRAIN-LEASE" in settings.template
    assert settings.template.rstrip().endswith('exec "$@"')


def test_what_a_site_may_want(tmp_path):
    pbs = """
    mode = "backfill"
    account = "a1"
    project = "p"
    resources = []
    select = "system=polaris"
    place = "scatter:excl"
    options = ["-l", "filesystems=home:eagle"]
    rerunnable = "yes"
    grace = "20 s"
    keep_output = false
    submit_as = ["sudo", "-n", "-u", "{owner}", "--"]
    """
    settings = pbs_settings(
        config(tmp_path, pbs, 'features = ["gpu_type=a100"]\nexclude = ["n[1-2]"]')
    )
    assert settings.backfill
    assert (settings.time_min_s, settings.grace_s, settings.output_dir) == (300.0, 20.0, None)
    assert (settings.lease.resources, settings.lease.select, settings.lease.place) == (
        (),
        "system=polaris",
        "scatter:excl",
    )
    assert settings.lease.options == ("-l", "filesystems=home:eagle")
    assert settings.lease.rerunnable == "yes"
    assert settings.rules.features == {"gpu_type=a100"}
    assert settings.rules.exclude == {"n1", "n2"}


@pytest.mark.parametrize(
    ("pbs", "key", "words"),
    [
        ('submit_as = ["sudo"]', "scheduler.pbs.submit_as", "must hold {owner}"),
        ('rerunnable = "maybe"', "scheduler.pbs.rerunnable", '"auto"'),
        ("time_limit = 5", "scheduler.pbs.time_limit", "5 has no unit"),
        ('partition = "x"', "scheduler.pbs.partition", ""),
    ],
)
def test_what_is_wrong_is_said_at_its_key(tmp_path, pbs, key, words):
    with pytest.raises(ConfigError) as error:
        config(tmp_path, pbs)
    [problem] = error.value.problems
    assert problem.key.startswith(key)
    assert words in problem.message


def test_the_backend(tmp_path, monkeypatch):
    site_config = config(tmp_path)
    one = backend(site_config)
    assert isinstance(one.connect(site_config), PbsScavenger)
    assert one.grace_s(site_config) == 10.0
    one.prepare(site_config)
    assert (Path(site_config.state_dir) / "leases").is_dir()
    monkeypatch.setenv("PATH", str(tmp_path))
    findings = list(one.check(site_config))
    assert "qstat is not installed" in findings[0][1]
    with pytest.raises(AddressError, match=r"cannot reach the daemon at 127\.0\.0\.1;"):
        one.host(site_config)
    with pytest.raises(SchedulerError, match="cannot be read"):
        pbs_settings(config(tmp_path, 'script = "/no/such"'))


@pytest.mark.parametrize("name", ["pbs.toml", "polaris.toml"])
def test_the_sites_that_come_with_it(name, tmp_path):
    site_config = load_config(SITES / name)
    assert site_config.scheduler.kind == "pbs"
    assert pbs_settings(site_config).lease.queue == "preemptable"
