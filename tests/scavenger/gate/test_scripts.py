"""Which batch scripts get through the gate: those of leases, of every shape, and no other."""

import random
import subprocess
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scavenger.batch.lease_script import Part, lease_script
from scavenger.gate.rules import GateClosed, GateRules, check_script
from scavenger.slurm.job import batch_script, host_script, shared_script, step_options
from tests.scavenger.gate.gate_world import AGENT, TEMPLATES, lease_spec, settings

RULES = GateRules("slurm", AGENT, TEMPLATES["slurm"], "malletrain-", (), {}, {}, 1000)
TEXT = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=40)
MINE = [
    ": >mine\n",
    "$(: >mine)",
    "`: >mine`",
    "; : >mine;",
    "';: >mine;'",
    "&: >mine\n",
    "\n",
    "'",
    '"',
    "#",
    "set -- id\n",
]


SLOT = step_options({"gpu": 2, "gpu:a100": 2, "shard": 1, "cpus": 8, "memory_mb": 1000})


def scripts():
    """Name → the script of leases of one shape."""
    one = lease_spec()
    some = [lease_spec(f"l{k}", f"n{k}", MALLETRAIN_NODE_CLASS="xyz"[k]) for k in range(3)]
    made = {
        "alone": batch_script(TEMPLATES["slurm"], one.argv, one.env, True, one.keep_at_home),
        "silent": batch_script(TEMPLATES["slurm"], one.argv, one.env, False),
    }
    for shape in ("array", "block"):
        for count in (1, 3):
            made[f"{shape} of {count}"] = shared_script(
                settings(shape=shape), some[:count], shape == "block"
            )
    slots = [one.part._replace(node=f"c1/gpu.{k}") for k, one in enumerate(some)]
    for count in (1, 3):
        made[f"host of {count}"] = host_script(TEMPLATES["slurm"], SLOT, slots[:count])
    return made


def refused(script, rules=RULES):
    try:
        check_script(script, rules)
    except GateClosed:
        return True
    return False


@pytest.mark.parametrize("name", scripts())
def test_scripts_of_leases_get_through(name):
    check_script(scripts()[name], RULES)


@given(TEXT, TEXT, st.lists(TEXT, min_size=1, max_size=3))
def test_whatever_a_lease_is_told_arrives_or_is_refused(value, other, words):
    """No text of a lease's own makes the gate fail, or lets something else through."""
    argv = [*AGENT, *(word for text in words for word in ("--endpoint", text))]
    env = {"MALLETRAIN_A": value, "MALLETRAIN_B": other}
    check_script(batch_script(RULES.template, argv, env, False), RULES)


def test_pbs_scripts_get_through():
    one, rules = lease_spec(), replace(RULES, kind="pbs", template=TEMPLATES["pbs"])
    part = Part(one.node, one.argv, {**one.env, "MALLETRAIN_OUTPUT": "/dev/null"}, None, True)
    check_script(lease_script(TEMPLATES["pbs"], part), rules)
    assert refused(lease_script(TEMPLATES["slurm"], part), rules)


@pytest.mark.parametrize(
    ("argv", "env"),
    [
        (("/bin/sh", "-c", "id"), {}),
        (("/opt/malletrain/bin/python", "-c", "import os"), {}),
        (("/opt/malletrain/bin/python", "-m", "malletrain.agent.x"), {}),
        ((), {}),
        ((*AGENT, "--endpoint"), {}),
        ((*AGENT, "id", "--endpoint"), {}),
        (AGENT, {"LD_PRELOAD": "/tmp/x.so"}),
        (AGENT, {"PATH": "/tmp"}),
        (AGENT, {"malletrain_a": "x"}),
    ],
)
def test_a_lease_that_runs_something_else_does_not(argv, env):
    assert refused(batch_script(RULES.template, argv, env, False))
    for shape in ("array", "block"):
        some = [lease_spec("l1", "n1"), replace(lease_spec("l2", "n2"), argv=argv or ("x",))]
        some[1] = replace(some[1], env={**some[1].env, **env})
        assert refused(shared_script(settings(shape=shape), some, False))
    assert refused(host_script(RULES.template, SLOT, [one.part for one in some]))


@pytest.mark.parametrize(
    "node", ["#CHOICE", "#AMOUNTS", "#SLOTS", "'", "c1/gpu.0'", "c1", "c1/gpu.0;id", "c1/gpu.0 c2"]
)
def test_slots_have_names_of_slots(node, tmp_path):
    env = {"MALLETRAIN_X": "$(: >mine)"}
    slots = [lease_spec(**env).part._replace(node=name) for name in (node, "c1/gpu.1")]
    script = host_script(RULES.template, SLOT, slots)
    assert refused(script)
    run(script.decode(), tmp_path)
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("word", ["--overlap", "--gres=gpu:1;id", "--chdir=/", "x", "--mem=1G"])
def test_slots_ask_for_their_amounts_only(word):
    slots = [lease_spec().part._replace(node="c1/gpu.0")]
    check_script(host_script(RULES.template, SLOT, slots), RULES)
    assert refused(host_script(RULES.template, [*SLOT, word], slots))


@pytest.mark.parametrize("name", scripts())
def test_nothing_that_is_put_into_a_script_is_run(name, tmp_path):
    """Anywhere: in the rules' own part, between the leases, in the words of one. What gets through
    all the same says other values to the agent: a shell is asked.
    """
    script, chance = scripts()[name].decode(), random.Random(name)
    accepted = []
    for _ in range(200):
        at = chance.randrange(len(script))
        changed = chance.choice(
            [
                script[:at] + chance.choice(MINE) + script[at:],
                script[:at] + script[at + 1 :],
                script[:at] + chance.choice("x$`'\";|&\n") + script[at + 1 :],
                script[:at] + script[chance.randrange(len(script)) :],
            ]
        )
        if not refused(changed.encode()):
            accepted.append(changed)
    assert accepted
    assert len(accepted) < 150
    for changed in accepted[:10]:
        run(changed, tmp_path)
    assert not (tmp_path / "mine").exists()
    run(script.replace("\nset --", "\n: >mine\nset --", 1) + "\n: >mine\n", tmp_path)
    assert (tmp_path / "mine").exists() or name != "silent", "such a thing would be seen"


def run(script, folder):
    """By a shell, on a node that has no programs."""
    environment = {"PATH": "", "SLURMD_NODENAME": "n1", "SLURM_JOB_CPUS_PER_NODE": "1"}
    subprocess.run(
        ["/bin/sh", "-s"],
        input=script.encode(),
        cwd=folder,
        env=environment,
        capture_output=True,
    )


def test_an_empty_script_and_one_that_is_no_text_do_not():
    for script in (b"", b"#!/bin/sh\nid\n", b"\xff\xfe", TEMPLATES["slurm"].encode()):
        assert refused(script)
