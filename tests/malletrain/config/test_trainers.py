"""[[trainer]]: what is accepted, where a mistake is told, and what comes of it."""

import pytest

from allocator import Goal
from malletrain.cli.check import trainers as findings
from malletrain.config.model import ConfigError, parse_config
from malletrain.config.reference import example_toml, reference_markdown
from malletrain.core.pools import DEADLINES_FIRST
from malletrain.daemon.engine.parties import Parties
from malletrain.daemon.site.settings import controller_settings

LOCAL = '[scheduler]\nkind = "local"\n'
SITE = """
[scheduler]
kind = "local"
[shares]
accounts = ["geo cyd dan"]
[[trainer]]
name = "gpus"
objective = "efficiency"
users = ["ann"]
groups = ["wheel"]
node_classes = ["a100"]
[[trainer]]
name = "urgent"
objective = "deadlines"
accounts = ["geo"]
node_classes = ["milan", "rome"]
"""


def parse(*trainers):
    """A configuration with these trainers, each as the lines below its header."""
    return parse_config(LOCAL + "".join(f"[[trainer]]\n{text}\n" for text in trainers))


def test_what_the_core_is_told():
    gpus, urgent, rest = controller_settings(parse_config(SITE)).trainers
    assert (gpus.name, gpus.goal) == ("gpus", Goal.EFFICIENCY)
    assert gpus.node_classes == {"a100"}
    assert gpus.deadline_weight is None
    assert (urgent.goal, urgent.deadline_weight) == (Goal.EFFICIENCY, DEADLINES_FIRST)
    assert urgent.node_classes == {"milan", "rome"}
    assert (rest.name, rest.goal, rest.node_classes) == ("default", Goal.THROUGHPUT, None)
    assert rest.other_classes == {"a100", "milan", "rome"}


def test_without_there_are_none():
    config = parse_config(LOCAL)
    assert controller_settings(config).trainers == ()
    assert Parties(config).trainer("ann") == ""


@pytest.mark.parametrize(
    ("user", "trainer"),
    [
        ("ann", "gpus"),  # by name, although in a group of the same one
        ("cyd", "urgent"),
        ("dan", "urgent"),  # the account goes before the group
        ("eve", "gpus"),
        ("fay", "default"),
    ],
)
def test_a_job_is_of_exactly_one(user, trainer):
    groups = {"dan": "wheel", "eve": "wheel", "fay": "users"}
    assert Parties(parse_config(SITE), lambda name: groups.get(name, "")).trainer(user) == trainer


def test_who_names_nobody_takes_the_rest():
    config = parse('name = "a"', 'name = "b"\nusers = ["ann"]\nnode_classes = ["k"]')
    assert [t.name for t in controller_settings(config).trainers] == ["b", "a"]
    assert Parties(config, lambda name: "").trainer("bob") == "a"


@pytest.mark.parametrize(
    ("trainers", "problem"),
    [
        (('name = "a"', 'name = "a"\nusers = ["x"]'), '"a" is the name of two trainers'),
        (
            ('name = "a"\nusers = ["x"]', 'name = "b"\nusers = ["x", "y"]'),
            '"x" is in users of the trainers "a" and "b"; leave it in one of them',
        ),
        (('name = "a"', 'name = "b"'), 'the trainers "a" and "b" name no users'),
        (
            (
                'name = "a"\nusers = ["x"]\nnode_classes = ["k", "l"]',
                'name = "b"\nnode_classes = ["l"]',
            ),
            '"l" is in node_classes of the trainers "a" and "b"; leave it in one of them',
        ),
        (
            (
                'name = "a"\nusers = ["x"]\nnode_classes = ["k"]',
                'name = "b"\nnode_classes = ["k"]',
            ),
            '"k" is in node_classes of the trainers "a" and "b"; leave it in one of them',
        ),
        (
            ('name = "a"\nusers = ["x"]', 'name = "b"'),
            'the trainers "a" and "b" name no node_classes, .* name some in one of them',
        ),
        (
            ('name = "a"\nusers = ["x"]',),
            'the trainers "a" and "default" name no node_classes, .* name some in one of them',
        ),
        (('name = "default"\nusers = ["x"]',), "give this one another name"),
    ],
)
def test_trainers_that_are_not_disjoint(trainers, problem):
    with pytest.raises(ConfigError, match=problem):
        parse(*trainers)


@pytest.mark.parametrize(
    ("second", "line", "key", "sentence"),
    [
        ('name = "b"\nobjektive = "x"', 7, "trainer.1.objektive", 'did you mean "objective"?'),
        ('name = "b"\nobjective = "speed"', 7, "trainer.1.objective", '"speed" is not known'),
        ('name = "b"\nnode_classes = "x"', 7, "trainer.1.node_classes", "is not a list"),
        ('users = ["y"]', 5, "trainer.1.name", 'add a line name = "..."'),
        ('name = "b c"', 6, "trainer.1.name", '"b c" is not accepted'),
    ],
)
def test_a_mistake_is_told_at_its_line(second, line, key, sentence):
    with pytest.raises(ConfigError) as caught:
        parse('name = "a"', second)
    (problem,) = caught.value.problems
    assert (problem.line, problem.key) == (line, key)
    assert sentence in problem.message


def test_one_pair_of_brackets_is_told():
    with pytest.raises(ConfigError, match=r"write \[\[trainer\]\] above its keys"):
        parse_config(LOCAL + '[trainer]\nname = "a"\n')


def test_what_check_says():
    sentences = [sentence for _, sentence in findings(parse_config(SITE))]
    assert sentences[:3] == [
        "gpus: efficiency, on nodes of a100; its jobs are those of users ann and groups wheel.",
        "urgent: deadlines, on nodes of milan, rome; its jobs are those of accounts geo.",
        "default: throughput, on all nodes but a100, milan, rome; its jobs are those of whom no "
        "other trainer names.",
    ]
    assert "serves one user" in sentences[3]
    assert [sentence for _, sentence in findings(parse_config(LOCAL))] == [
        "There is one plan for all jobs (no [[trainer]])."
    ]


def test_check_names_classes_that_belong_to_no_trainer():
    trainers = '[[trainer]]\nname = "a"\nnode_classes = ["k"]\n'
    sentences = [
        s for _, s in findings(parse_config(f'{LOCAL}[gaps]\nclasses = ["k"]\n{trainers}'))
    ]
    assert sentences == [
        "a: throughput, on nodes of k; its jobs are those of whom no other trainer names."
    ]
    config = parse_config(f'{LOCAL}[gaps]\nclasses = ["k", "m"]\n{trainers}')
    assert (
        None,
        "Nodes of m (classes in [gaps]) belong to no trainer, so no job runs there; name them in "
        "node_classes of a [[trainer]].",
    ) in list(findings(config))


def test_the_reference_and_the_example_have_it():
    assert "## [[trainer]]" in reference_markdown()
    assert parse_config(example_toml()).trainer == []
