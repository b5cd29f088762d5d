"""The configuration of an agent at its start."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from malletrain.agent.config import parse_config
from malletrain.identity.keys import new_pair
from malletrain.protocol import env

SERVER_KEY = "-" + "a" * 39  # a key may begin with a minus sign


SECRET = new_pair().secret


@pytest.fixture
def options():
    return {"endpoint": "tcp://head:1", "lease": "l1", "node": "n1", "server-key": SERVER_KEY}


def argv(options):
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def test_options(options):
    config = parse_config(
        argv({**options, "grace-s": "120", "host": "10.0.0.7", "gpus": "2", "run-dir": "/scratch"}),
        {env.LEASE_KEY: SECRET},
    )
    assert (config.endpoint, config.lease, config.node, config.server_key) == (
        "tcp://head:1",
        "l1",
        "n1",
        SERVER_KEY,
    )
    assert (config.grace_s, config.host, config.gpus, config.run_dir) == (
        120.0,
        "10.0.0.7",
        2,
        Path("/scratch"),
    )
    assert config.secret_key not in repr(config)


def test_environment_and_precedence(options):
    environment = {
        f"MALLETRAIN_{name.upper().replace('-', '_')}": value for name, value in options.items()
    }
    environment |= {"CUDA_VISIBLE_DEVICES": "0,1,2", env.LEASE_KEY: SECRET}
    config = parse_config(["--node", "other"], environment)
    assert (config.node, config.lease, config.grace_s, config.gpus) == ("other", "l1", 30.0, 3)
    assert config.run_dir is None
    assert config.secret_key == SECRET
    assert env.LEASE_KEY not in environment, "jobs would inherit it"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("server-key", "short", "--server-key is not a CURVE key"),
        ("grace-s", "soon", "--grace-s is 'soon'; it must be a number of seconds"),
        ("gpus", "many", "--gpus is 'many'; it must be a whole number"),
        ("lease", "", "--lease is missing (or MALLETRAIN_LEASE in the environment)"),
    ],
)
def test_what_is_wrong_is_said(options, name, value, words):
    with pytest.raises(ValueError, match="The agent cannot start") as caught:
        parse_config(argv({**options, name: value}), {env.LEASE_KEY: SECRET})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "words"), [({}, "is missing"), ({env.LEASE_KEY: "short"}, "is no CURVE key")]
)
def test_the_key_of_the_lease_must_be_there(options, environment, words):
    with pytest.raises(ValueError, match=f"{env.LEASE_KEY} in the environment {words}"):
        parse_config(argv(options), environment)


def test_what_an_agent_starts_can_wait_for_its_children():
    """Slurm 25.05 starts jobs with SIGCHLD blocked, and programs inherit what is blocked."""
    program = (
        "import os, signal, sys; from malletrain.agent.__main__ import main; code = main();"
        "blocked = signal.pthread_sigmask(signal.SIG_BLOCK, []); print(code, len(blocked))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert run.stdout == "2 0\n"  # it has no options
