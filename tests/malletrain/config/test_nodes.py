"""The network of the jobs, as it is written in a site's file."""

import pytest

from malletrain.config.model import ConfigError, parse_config

SITE = '[scheduler]\nkind = "local"\n[nodes]\n'


def test_a_class_may_have_a_network_of_its_own():
    nodes = parse_config(SITE + 'interface = "auto"\ninterface_of = ["a100=ib0", "old="]\n').nodes
    assert [nodes.interface_for(name) for name in ("default", "a100", "old")] == ["auto", "ib0", ""]


def test_nothing_is_chosen_where_nothing_is_said():
    assert parse_config(SITE).nodes.interface_for("default") == ""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('interface = "10.1.0.1/16"', 'line 4: nodes.interface: "10.1.0.1/16" is no network'),
        ('interface = "two words"', "neither the name of an interface"),
        ('interface_of = ["a100"]', "not of the form CLASS=INTERFACE"),
        ('interface_of = ["a100=10.1/x"]', '"10.1/x" is no network'),
    ],
)
def test_what_names_no_network_is_refused_with_its_line(line, words):
    with pytest.raises(ConfigError) as refused:
        parse_config(SITE + line + "\n")
    assert words in str(refused.value)
