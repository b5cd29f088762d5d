"""Which commands get through the gate: those that the scavengers make, and no other."""

import random
from dataclasses import replace

import pytest

from scavenger.batch.slots import SlotKind
from scavenger.batch.submission import Shrink
from scavenger.gate.rules import GateClosed, GateRules, gated
from scavenger.pbs.hosts import slot_chunk
from scavenger.pbs.job import SHARED_PLACE, chunk_of, qsub
from scavenger.slurm.job import sbatch, sbatch_host, sbatch_shared, shrink
from tests.scavenger.gate.gate_world import AGENT, NAMES, OPTIONS, PBS, lease_spec, settings

RULES = {
    kind: GateRules(
        kind,
        AGENT,
        "",
        "malletrain-",
        tuple(OPTIONS[kind]),
        {name: f"/usr/bin/{name}" for name in NAMES[kind]},
        {},
        1000,
    )
    for kind in NAMES
}


def submissions():
    """Name → (kind, what a scavenger runs)."""
    shared = [lease_spec(f"l{k}", f"n{k}") for k in (1, 2, 3)]
    least = settings(time_min_s=60.0)
    made = {
        "single": ("slurm", sbatch(settings(), lease_spec(), False)),
        "step": ("slurm", sbatch(least, lease_spec(), True)),
        "federated": ("slurm", sbatch(settings(), lease_spec(), False, cluster="north_1")),
    }
    pair = SlotKind("pair", {"gpu": 2, "cpus": 4, "memory_mb": 600}, whole_host=True)
    slots = [replace(one, node=f"c1/pair.{one.lease}", slot=pair) for one in shared]
    made["host"] = "slurm", sbatch_host(settings(), slots)
    for shape in ("array", "block"):
        others = {f"m{k}" for k in range(200)}
        one = settings(shape=shape)
        made[shape] = "slurm", sbatch_shared(one, shared, others, shape == "block")
    select = "1:host=n7.example.org:ncpus=64:mem=5242880kb:system=polaris"
    for name, shortest in (("fixed", None), ("fitted", 60.0)):
        made[name] = (
            "pbs",
            qsub(
                settings("pbs", time_min_s=shortest),
                name="malletrain-0a1b2c3d-l7",
                select=select,
                limit_s=3600.0,
                rerunnable=False,
            ),
        )
    return made


def passes(words, kind="slurm", **more):
    try:
        return gated(words, replace(RULES[kind], **more))
    except GateClosed:
        return None


@pytest.mark.parametrize("name", submissions())
@pytest.mark.parametrize("path", ["", "/tmp/mine/"])
def test_leases_are_asked_for_by_the_commands_of_the_rules(name, path):
    kind, words = submissions()[name]
    command = gated([path + words[0], *words[1:]], RULES[kind])
    assert command.argv == (f"/usr/bin/{words[0]}", *words[1:])
    assert command.submits
    assert not command.jobs


@pytest.mark.parametrize("name", submissions())
def test_a_submission_with_more_less_or_something_else_is_refused(name):
    """One option too many, any option of the site left out, any changed value."""
    kind, words = submissions()[name]
    more = ["--uid=0", "--wrap=id", "--priority=9", "--output=/home/ann/.bashrc", "--begin=now"]
    more += ["-o", "/home/ann/.bashrc", "-W", "block=true", "-v", "A=1", "--export=ALL", "-", "id"]
    more += ["--partition=batch", "--reservation=x", "--nodes=64", "--chdir=/home/ann", "x.sh"]
    for word in more:
        assert passes([*words, word], kind) is None, word
        assert passes([words[0], word, *words[1:]], kind) is None, word
    for option in OPTIONS[kind]:
        first = words.index(option if kind == "slurm" else option.split()[1])
        begins = first if kind == "slurm" else first - 1
        assert passes(words[:begins] + words[first + 1 :], kind) is None, option
        changed = [*words[:first], words[first] + "x", *words[first + 1 :]]
        assert passes(changed, kind) is None, option
    assert passes(words, kind, options=(*OPTIONS[kind], "--qos=low")) is None
    assert passes(words, kind, prefix="other-") is None


def test_a_pbs_lease_may_have_several_attribute_options_of_the_rules():
    words = submissions()["fixed"][1]
    first, second = ["-W", "umask=027"], ["-W", "group_list=hpc,sandbox=PRIVATE"]
    rules = (*OPTIONS["pbs"], " ".join(first), " ".join(second))
    assert passes([*words, *first, *second], "pbs", options=rules)
    assert passes([words[0], *second, *first, *words[1:]], "pbs", options=rules)
    for changed in (first, second, [*first, "-W", "group_list=hpc"], [*first, "-W", "umask=027"]):
        assert not passes([*words, *changed], "pbs", options=rules), changed
    for more in ("block=true", "umask=000", "Output_Path=/home/ann/.bashrc"):
        assert not passes([*words, *first, *second, "-W", more], "pbs", options=rules), more
        assert not passes([words[0], "-W", more, *words[1:], *first, *second], "pbs", options=rules)


@pytest.mark.parametrize("again", ["umask=000", "Umask = 000", "sandbox=PRIVATE, umask=000"])
def test_an_attribute_of_a_pbs_lease_has_one_value(again):
    words, rules = submissions()["fixed"][1], (*OPTIONS["pbs"], "-W umask=027", f"-W {again}")
    with pytest.raises(GateClosed, match=r"qsub may have -W umask once\."):
        gated([*words, "-W", "umask=027", "-W", again], replace(RULES["pbs"], options=rules))


@pytest.mark.parametrize("name", submissions())
def test_a_letter_changed_anywhere_makes_a_lease_of_other_numbers_or_nothing(name):
    kind, words = submissions()[name]
    chance, through = random.Random(name), 0
    for _ in range(500):
        which = chance.randrange(1, len(words))
        at = chance.randrange(len(words[which]) + 1)
        mark = chance.choice("/;|&$` \n\0'\"<>%~\\")
        mutated = list(words)
        mutated[which] = words[which][:at] + mark + words[which][at:]
        through += passes(mutated, kind) is not None
    assert not through


@pytest.mark.parametrize(
    ("kind", "words", "jobs"),
    [
        ("slurm", "scancel 12 13_4 15.0", ("12", "13_4", "15.0")),
        ("slurm", "scancel --signal=TERM --batch 12", ("12",)),
        ("slurm", "scancel --signal=TERM 12.3", ("12.3",)),
        ("pbs", "qdel 12.pbs0 13[].pbs0.example.org", ("12.pbs0", "13[].pbs0.example.org")),
        ("pbs", "qsig -s SIGKILL 12.pbs0", ("12.pbs0",)),
    ],
)
def test_jobs_are_ended_by_their_numbers(kind, words, jobs):
    assert gated(words.split(), RULES[kind]).jobs == jobs


def test_nodes_are_given_back():
    words = shrink(Shrink("12", "ann", ("n1", "n2", "n4"), ("n3",)))
    command = gated(words, RULES["slurm"])
    assert command.jobs == ("12",)
    assert command.argv[0] == "/usr/bin/scontrol"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("slurm", ""),
        ("slurm", "scancel"),
        ("slurm", "scancel --signal=TERM"),
        ("slurm", "scancel --user=ann"),
        ("slurm", "scancel --name=x 12"),
        ("slurm", "scancel --signal=KILL 12"),
        ("slurm", "scancel 12 --state=RUNNING"),
        ("slurm", "scancel 12 ann"),
        ("slurm", "scancel --ctld 12"),
        ("slurm", "scontrol update JobId=12 TimeLimit=1"),
        ("slurm", "scontrol update JobId=12 NodeList=n1 TimeLimit=1"),
        ("slurm", "scontrol update NodeName=n1 State=DOWN"),
        ("slurm", "scontrol update JobName=x NodeList=n1"),
        ("slurm", "scontrol show job"),
        ("slurm", "squeue"),
        ("slurm", "squeue --version"),
        ("slurm", "srun id"),
        ("slurm", "sh -c id"),
        ("slurm", "/usr/bin/env sbatch"),
        ("slurm", "qsub --version"),
        ("slurm", "sbatch --version x"),
        ("pbs", "qdel -W force 12.pbs0"),
        ("pbs", "qdel all"),
        ("pbs", "qsig -s SIGTERM 12.pbs0"),
        ("pbs", "qsig -s SIGKILL"),
        ("pbs", "qalter -A x 12.pbs0"),
        ("pbs", "qstat -f"),
        ("pbs", "qsub -I"),
    ],
)
def test_anything_else_is_refused(kind, words):
    assert passes(words.split(), kind) is None


def test_commands_say_their_version_and_need_a_place_in_the_rules():
    assert gated(["sbatch", "--version"], RULES["slurm"]).argv == ("/usr/bin/sbatch", "--version")
    few = {"sbatch": "/usr/bin/sbatch"}
    assert passes(["scontrol", "update", "JobId=1", "NodeList=n1"], commands=few) is None
    with pytest.raises(GateClosed, match=r"scancel is not let through; what is: sbatch\."):
        gated(["scancel", "1"], replace(RULES["slurm"], commands=few))


def test_leases_of_slots_get_through_where_the_rules_demand_no_whole_nodes():
    gpu = SlotKind("gpu", {"gpu": 1, "shard": 4, "cpus": 8, "memory_mb": 61440})
    slurm = sbatch(settings(), replace(lease_spec(node="n7/gpu.3"), slot=gpu), False)
    pbs = qsub(
        settings("pbs"),
        name="malletrain-0a1b2c3d-l7",
        select=chunk_of(PBS, "n7.example.org", slot_chunk(gpu.amounts)),
        limit_s=3600.0,
        rerunnable=False,
        place=SHARED_PLACE,
    )
    shared = {
        "slurm": ("--partition=preemptable", "--comment=a b"),
        "pbs": ("-S /opt/shell.sh", "-q scavenge"),
    }
    for kind, words in (("slurm", slurm), ("pbs", pbs)):
        assert passes(words, kind, options=shared[kind]), words
        assert not passes(words, kind), "these rules demand whole nodes"
    for word in ("--gres=gpu:1 --uid=0", "--mem=1M;id", "--cpus-per-task=x"):
        assert not passes([*slurm, word], options=shared["slurm"])
