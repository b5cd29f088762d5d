"""``malletrain check`` of a daemon of several users, and ``malletrain key``."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from malletrain.cli import check_users
from malletrain.config.model import ConfigError, parse_config
from malletrain.daemon.site.backends import agent_program
from malletrain.identity.keys import new_pair, user_name
from tests.scavenger.gate.gate_world import GateWorld
from tests.waiting import PATIENCE_S

SUBMIT_AS = '["env", "OWNER={owner}"]'

SLOTS = """[[scheduler.slurm.slots]]
name = "gpu"
gpus = 1
cpus = 2
memory = "300 MiB"
"""
LIMITED_MEMORY = """SLURM_VERSION = 22.05.8
PartitionName=preemptable Nodes=n1 MaxMemPerNode=16000 State=UP
"""
"""What ``scontrol show config`` and ``scontrol show partition`` print."""


def findings(daemon, tmp_path, submit_as=SUBMIT_AS, shape="single", name=None, more=""):
    text = (
        f"[daemon]\n{daemon}\n[scheduler]\nkind = 'slurm'\n[scheduler.slurm]\nsubmit_as = "
        f"{submit_as}\nlease_shape = '{shape}'\n{more}"
    )
    return list(check_users.users(parse_config(text, directory=tmp_path), name))


def test_one_user():
    assert list(check_users.users(parse_config('[scheduler]\nkind = "local"'))) == [
        (True, "The daemon serves the user who runs it, and nobody else.")
    ]


def test_a_list_of_users(tmp_path, monkeypatch):
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    (bin_dir / "sbatch").write_text(
        '#!/bin/sh\necho "slurm 22.05 for $OWNER"; [ "$OWNER" != eve ] || { echo "eve may not" '
        ">&2; exit 1; }\n"
    )
    (bin_dir / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_dir}:/usr/bin:/bin")
    users = tmp_path / "users"
    users.write_text(f"ada {new_pair().public}\nbob {new_pair().public}\n")
    results = findings('users = "users"', tmp_path)
    assert (True, f"{users} lists 2 users.") in results
    assert (True, "The daemon's user may submit as ada.") in results
    assert (
        None,
        "Clients of other users cannot find the daemon; set announce in [daemon], such as "
        "/etc/malletrain/daemon.json.",
    ) in results
    users.write_text(f"ada/x {new_pair().public}\nbob@corp.example {new_pair().public}\n")
    results = findings('users = "users"', tmp_path)
    assert any(not ok and "line 1, is left out: 'ada/x' is no user name" in s for ok, s in results)
    assert (True, f"{users} lists 1 user.") in results
    assert (None, f"{users} lists bob@corp.example, whom this host does not know.") in results
    users.write_text(f"eve {new_pair().public}\n")
    assert any(
        not works and "may not submit as eve: eve may not. Allow it" in sentence
        for works, sentence in findings('users = "users"', tmp_path)
    )
    users.chmod(0o666)
    assert any(
        works is False and "can be written by others" in sentence
        for works, sentence in findings('users = "users"', tmp_path)
    )
    assert any(
        works is False and "not a command here" in s
        for works, s in findings('users = "users"', tmp_path, '["no-sudo", "{owner}"]')
    )


def test_where_the_daemon_announces_itself(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    (closed / "inner").mkdir()
    results = findings('munge = true\nannounce = "closed/inner/daemon.json"', tmp_path)
    assert any(works is False and "they may not enter" in sentence for works, sentence in results)
    results = findings('munge = true\nannounce = "nowhere/daemon.json"', tmp_path)
    assert any(
        works is False and "cannot be written: make" in sentence for works, sentence in results
    )


def test_a_python_that_others_cannot_run(tmp_path, monkeypatch):
    private = tmp_path / "venv"
    private.mkdir(mode=0o700)
    monkeypatch.setattr(sys, "prefix", str(private))
    assert any(
        works is False and "install it where everybody may read it" in s
        for works, s in findings("munge = true", tmp_path)
    )


@pytest.mark.parametrize(
    ("daemon", "kind", "words"),
    [
        ("munge = true", "slurm", "set submit_as in [scheduler.slurm]"),
        ('users = "users"', "pbs", "set submit_as in [scheduler.pbs]"),
        ("munge = true", "local", "the embedded cluster serves one user only"),
    ],
)
def test_leases_of_several_users_must_be_their_own(daemon, kind, words):
    with pytest.raises(ConfigError) as caught:
        parse_config(f"[daemon]\n{daemon}\n[scheduler]\nkind = '{kind}'")
    assert words in str(caught.value)


def test_the_key_of_a_user(run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    first, second = run("key"), run("key")
    assert first.stdout == second.stdout
    assert first.stdout.split()[0] == user_name()
    assert (
        json.loads(Path(tmp_path / "malletrain/client.key").read_text())["public"]
        == first.stdout.split()[1]
    )
    monkeypatch.setenv("XDG_CONFIG_HOME", "/proc/none")
    refused = run("key")
    assert refused.exit_code == 1
    assert refused.stderr.startswith(
        "The directory /proc/none, where your key is kept, cannot be made"
    )


def test_a_named_user_is_tried_where_none_is_listed(tmp_path, monkeypatch):
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    (bin_dir / "sbatch").write_text('#!/bin/sh\necho "$OWNER" >> "$0.asked"\n')
    (bin_dir / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_dir}:/usr/bin:/bin")
    monkeypatch.setattr(check_users, "TRY_S", PATIENCE_S)
    by_munge = f'munge = true\nmunge_socket = "{tmp_path}/none"'
    untried = [
        sentence for works, sentence in findings(by_munge, tmp_path) if "was not tried" in sentence
    ]
    assert len(untried) == 1
    assert "no user is listed; name one with --user" in untried[0]
    assert not (bin_dir / "sbatch.asked").exists()
    named = findings(by_munge, tmp_path, name="nobody")
    assert (True, "The daemon's user may submit as nobody.") in named
    assert (bin_dir / "sbatch.asked").read_text() == "nobody\n"
    unknown = findings(by_munge, tmp_path, name="no-such-user")
    assert (
        False,
        "Submissions cannot be tried as no-such-user (--user), who is no user of this host.",
    ) in unknown
    assert (bin_dir / "sbatch.asked").read_text() == "nobody\n"


def test_blocks_need_scontrol_too(tmp_path, monkeypatch):
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for name, status in (("sbatch", 0), ("scontrol", 1)):
        (bin_dir / name).write_text(f'#!/bin/sh\necho "sudo: {name} of $OWNER"; exit {status}\n')
        (bin_dir / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_dir}:/usr/bin:/bin")
    (tmp_path / "users").write_text(f"ada {new_pair().public}\n")
    refusals = {}
    for shape in ("array", "block"):
        results = findings('users = "users"', tmp_path, shape=shape)
        refusals[shape] = [
            sentence for works, sentence in results if works is False and "back" in sentence
        ]
    assert refusals["array"] == []
    assert refusals["block"] == [
        "The daemon's user may not give back single nodes of a block as ada: sudo: scontrol of "
        "ada. Allow it (for sudo: a line in sudoers), or change submit_as."
    ]


def test_commands_of_pbs_are_found_as_the_daemon_finds_them(tmp_path, monkeypatch):
    """Under sudo or systemd they are in no PATH: ``/etc/pbs.conf`` says where."""
    (bin_dir := tmp_path / "pbs" / "bin").mkdir(parents=True)
    (bin_dir / "qsub").write_text('#!/bin/sh\necho "pbs_version = 23.06.06 for $OWNER"\n')
    (bin_dir / "qsub").chmod(0o755)
    (tmp_path / "pbs.conf").write_text(f"PBS_EXEC={tmp_path}/pbs\n")
    monkeypatch.setenv("PBS_CONF_FILE", str(tmp_path / "pbs.conf"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    (tmp_path / "users").write_text(f"ada {new_pair().public}\n")
    text = (
        "[daemon]\nusers = 'users'\n[scheduler]\nkind = 'pbs'\n"
        f"[scheduler.pbs]\nsubmit_as = {SUBMIT_AS}"
    )
    results = list(check_users.users(parse_config(text, directory=tmp_path)))
    assert (True, "The daemon's user may submit as ada.") in results


def test_whether_leases_get_through_the_gate(tmp_path, monkeypatch):
    """A gate with the rules of another partition, then with those of this site."""
    monkeypatch.setattr(check_users, "TRY_S", PATIENCE_S)
    world = GateWorld(tmp_path / "gate", agent=list(agent_program()))
    world.tools.answers("sbatch", "slurm 22.05")
    world.tools.answers("scontrol", LIMITED_MEMORY)
    monkeypatch.setenv("PATH", f"{world.tools.root}:{os.environ['PATH']}")
    program = world.root / "malletrain-lease"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(world.prefix()[2:])} "$@"\n')
    program.chmod(0o755)
    (tmp_path / "users").write_text(f"ada {new_pair().public}\n")

    def gate_findings(*submit_as, name=None, more=""):
        prefix = json.dumps(["env", "A={owner}", *submit_as])
        results = findings('users = "users"', tmp_path, prefix, name=name, more=more)
        return [(works, sentence) for works, sentence in results if "malletrain-lease" in sentence]

    assert [works for works, _ in gate_findings()] == [None]
    assert "can submit any job as the users" in gate_findings()[0][1]
    assert "malletrain-lease must be the last word" in gate_findings(str(program), "--")[-1][1]
    [(works, why)] = gate_findings(str(program))
    assert works is False
    assert 'sbatch must have "--partition=preemptable" too' in why
    world.write(agent=list(agent_program()), options=["--exclusive", "--mem=0"])
    only = "As others the daemon's account can submit and end leases only (malletrain-lease)."
    assert gate_findings(str(program)) == [(True, only)]
    partition = 'partition = "preemptable"'
    in_partition = ["--exclusive", "--partition=preemptable"]
    world.write(agent=list(agent_program()), options=[*in_partition, "--mem=0"])
    [(works, why)] = gate_findings(str(program), more=partition)
    assert works is False
    assert "A lease of a node of ada does not get through" in why
    world.write(agent=list(agent_program()), options=[*in_partition, "--mem=16000"])
    assert gate_findings(str(program), more=partition) == [(True, only)]
    [(works, why)] = gate_findings(str(program), more=SLOTS)
    assert works is False
    assert "A lease of a slot of kind gpu of ada does not get through" in why
    world.write(agent=list(agent_program()), options=[])
    assert gate_findings(str(program), more=SLOTS) == [(True, only)]
    world.write(agent=list(agent_program()), options=["--exclusive", "--mem=0"])
    (tmp_path / "users").write_text("")
    [_, (works, untried)] = gate_findings(str(program))
    assert works is None
    assert "not tried, because no user is listed" in untried
    assert gate_findings(str(program), name="nobody") == [(True, only)]
    assert not [call for call in world.tools.calls() if "--parsable" in call]


@pytest.fixture
def gate_of(tmp_path, monkeypatch):
    """Call it for (imitated commands, the findings about the gate), with a gate that accepts leases
    of slots, and of whole nodes with 16000 MB.
    """
    monkeypatch.setattr(check_users, "TRY_S", PATIENCE_S)
    world = GateWorld(tmp_path / "gate", agent=list(agent_program()))
    world.tools.answers("sbatch", "slurm 22.05")
    monkeypatch.setenv("PATH", f"{world.tools.root}:{os.environ['PATH']}")
    program = world.root / "malletrain-lease"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(world.prefix()[2:])} "$@"\n')
    program.chmod(0o755)
    (tmp_path / "users").write_text(f"ada {new_pair().public}\n")
    submit_as = json.dumps(["env", "A={owner}", str(program)])

    def gate_findings(options, more):
        world.write(agent=list(agent_program()), options=options)
        results = findings('users = "users"', tmp_path, submit_as, more=more)
        return [(works, sentence) for works, sentence in results if "malletrain-lease" in sentence]

    return world.tools, gate_findings


def test_without_an_answer_of_slurm_no_cause_is_guessed(gate_of):
    """How much memory a lease requests is known from Slurm. With --mem=0 the gate would refuse."""
    tools, gate_findings = gate_of
    tools.fails("scontrol", "Unable to contact slurm controller")
    options = ["--exclusive", "--partition=preemptable", "--mem=16000"]
    [(works, sentence)] = gate_findings(options, 'partition = "preemptable"')
    assert works is None
    assert sentence.startswith("Whether leases of ada get through malletrain-lease was not tried:")
    assert "Unable to contact slurm controller" in sentence


def test_with_slots_slurm_is_not_asked_for_memory(gate_of):
    tools, gate_findings = gate_of
    tools.fails("scontrol", "Unable to contact slurm controller")
    [(works, _)] = gate_findings([], SLOTS)
    assert works is True
    assert tools.calls("scontrol") == []
