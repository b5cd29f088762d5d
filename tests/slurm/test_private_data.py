"""``check`` on a real Slurm that hides from ordinary users what the daemon has to see."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.slurm import guests
from tests.slurm.cluster import which
from tests.slurm.test_leases import scavenger

COMMANDS = ("sinfo", "squeue", "scontrol", "sdiag", "sbatch")


def as_user(slurm, name, folder):
    """The Slurm as this user sees it: each command runs as the user."""
    folder.mkdir()
    for command in COMMANDS:
        script = folder / command
        script.write_text(f'#!/bin/sh\nexec runuser -u {name} -- {which(command)} "$@"\n')
        script.chmod(0o755)
    path = f"{folder}:{slurm.environment['PATH']}"
    return SimpleNamespace(environment={**slurm.environment, "PATH": path})


@pytest.mark.parametrize(
    ("hidden", "words"),
    [
        ("none", ()),
        ("nodes", ("The polls of the daemon fail: ", "PrivateData=nodes hides them")),
        ("reservations", ("PrivateData=reservations hides reservations",)),
    ],
)
def test_what_slurm_hides_from_the_account_of_the_daemon_is_named(cluster, root, hidden, words):
    if reason := guests.missing():
        pytest.skip(reason)
    [name] = guests.users(1)
    slurm = cluster(1, extra=f"PrivateData={hidden}\n")
    findings = scavenger(as_user(slurm, name, root / "bin"), user=name).check()
    named = [
        sentence
        for works, sentence in findings
        if works is False and ("PrivateData" in sentence or "polls" in sentence)
    ]
    assert len(named) == bool(words), findings
    assert all(word in named[0] for word in words)
    operator = scavenger(slurm).check()
    assert not [s for works, s in operator if works is False and "PrivateData" in s], operator
