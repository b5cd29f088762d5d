"""From a configuration file to what the scavenger of Slurm is told."""

from pathlib import Path

import pytest

from malletrain.config.model import ConfigError, parse_config
from malletrain.config.schedulers import reserved_sbatch_option
from malletrain.daemon.site.advertise import AddressError
from malletrain.daemon.site.backends import backend, slurm_settings
from malletrain.identity.keys import KeyRing
from scavenger.interface import SchedulerError
from scavenger.slurm.scavenger import SlurmScavenger

LEAST = '[daemon]\nstate_dir = "{state}"\n[scheduler]\nkind = "slurm"\n'


def config(tmp_path, slurm="", gaps="", daemon=""):
    text = LEAST.format(state=tmp_path / "state").replace("[scheduler]", f"{daemon}\n[scheduler]")
    return parse_config(f"{text}[scheduler.slurm]\n{slurm}\n[gaps]\n{gaps}\n")


def test_defaults(tmp_path):
    settings = slurm_settings(config(tmp_path, 'partition = "low"'))
    assert settings.lease.partition == "low"
    assert settings.lease.exclusive
    assert settings.time_limit_s == 12 * 3600
    assert settings.time_min_s is None, "Slurm need not fit a lease in where it can preempt it"
    assert settings.grace_s is None
    assert settings.output_dir == tmp_path / "state" / "leases"
    assert settings.idle_for_s is None
    assert settings.needed_grace_s == 15.0
    assert "#MALLETRAIN-LEASE" in settings.template
    assert settings.template.rstrip().endswith('exec "$@"')


def test_what_a_site_may_want(tmp_path):
    slurm = """
    mode = "backfill"
    qos = "low"
    gres = "gpu:4"
    exclusive = false
    options = ["--licenses=a b"]
    time_min = "10 min"
    grace = "20 s"
    submit_as = ["sudo", "-n", "-u", "{owner}", "--"]
    keep_output = false
    """
    gaps = """
    nodes = ["n[1-3]", "m1"]
    exclude = ["n2"]
    features = ["ib"]
    hours = ["sat-sun"]
    reserve = 2
    idle_for = "10 s"
    hold = "4 s"
    classes = ["a100"]
    """
    settings = slurm_settings(config(tmp_path, slurm, gaps))
    assert settings.backfill
    assert (
        settings.lease.qos,
        settings.lease.gres,
        settings.lease.exclusive,
        settings.lease.options,
    ) == (
        "low",
        "gpu:4",
        False,
        ("--licenses=a b",),
    )
    assert (settings.time_min_s, settings.grace_s, settings.output_dir) == (600.0, 20.0, None)
    assert settings.rules.nodes == {"n1", "n2", "n3", "m1"}
    assert settings.rules.exclude == {"n2"}
    assert settings.rules.features == {"ib"}
    assert settings.rules.reserve == 2
    assert len(settings.rules.hours.spans) == 1
    assert (settings.idle_for_s, settings.hold_s, settings.node_classes) == (10.0, 4.0, ("a100",))


@pytest.mark.parametrize(
    ("slurm", "gaps", "key", "words"),
    [
        ("", 'hours = ["always"]', "gaps.hours", "accepted is"),
        ("", 'nodes = ["n[1-"]', "gaps.nodes", "no list of nodes"),
        ("", 'features = "ib"', "gaps.features", "a list of texts"),
        ('options = ["licenses=x"]', "", "scheduler.slurm.options", "is no option"),
        (
            'options = ["--licenses=x", "--clusters=other"]',
            "",
            "scheduler.slurm.options",
            "--clusters cannot be an option of leases: leases are looked for in the daemon's own",
        ),
        ('submit_as = ["sudo"]', "", "scheduler.slurm.submit_as", "must hold {owner}"),
        ('launch = "mpirun"', "", "scheduler.slurm.launch", '"auto"'),
        ("grace = 5", "", "scheduler.slurm.grace", "5 has no unit"),
    ],
)
def test_what_is_wrong_is_said_at_its_key(tmp_path, slurm, gaps, key, words):
    with pytest.raises(ConfigError) as error:
        config(tmp_path, slurm, gaps)
    [problem] = error.value.problems
    assert problem.key.startswith(key)
    assert words in problem.message


@pytest.mark.parametrize(
    ("option", "reserved"),
    [
        ("--clusters=a,b", "--clusters"),
        ("--clus=a", "--clusters"),
        ("-Mother", "--clusters"),
        ("-M", "--clusters"),
        ("--job-name=x", "--job-name"),
        ("--requeue", "--requeue"),
        ("--wait", "--wait"),
        ("--wait-all-nodes=1", ""),
        ("--cluster-constraint=x", ""),
        ("--comment=--array", ""),
        ("--mem=5G", ""),
        ("-C", ""),
    ],
)
def test_options_that_would_make_leases_unknown_are_reserved(option, reserved):
    match = reserved_sbatch_option(option)
    assert (match[0] if match else "") == reserved


def test_the_tag_is_of_the_daemons_key(tmp_path):
    site_config = config(tmp_path)
    before = slurm_settings(site_config).tag
    KeyRing(site_config.state_dir)
    after = slurm_settings(site_config).tag
    assert len(before) == len(after) == 8
    assert before != after == slurm_settings(site_config).tag


def test_a_batch_script_of_the_sites_own(tmp_path):
    own = tmp_path / "own.sh"
    own.write_text('#!/bin/bash\nmodule load python\n#MALLETRAIN-LEASE\nexec "$@"\n')
    assert "module load" in slurm_settings(config(tmp_path, f'script = "{own}"')).template
    with pytest.raises(SchedulerError, match="cannot be read"):
        slurm_settings(config(tmp_path, 'script = "/no/such"'))


def test_the_backend(tmp_path, monkeypatch):
    site_config = config(tmp_path)
    one = backend(site_config)
    assert isinstance(one.connect(site_config), SlurmScavenger)
    assert one.grace_s(site_config) == 30.0
    one.prepare(site_config)
    assert (Path(site_config.state_dir) / "leases").is_dir()
    monkeypatch.setenv("PATH", str(tmp_path))
    findings = list(one.check(site_config))
    assert "scontrol is not installed" in findings[0][1]
    with pytest.raises(AddressError, match=r"cannot reach the daemon at 127\.0\.0\.1;"):
        one.host(site_config)
