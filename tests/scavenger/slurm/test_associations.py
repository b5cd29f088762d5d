"""Slurm's associations: what a share of the tree comes to."""

import pytest

from scavenger.slurm.associations import Associations, parse_associations

TREE = """\
root|||1|
root||root|1|
arts|root||10|
arts||bob|1|
arts||cyd|parent|
physics|root||30|
lasers|physics||1|
lasers||dan|5|
optics|physics||3|
optics||ann|1|
optics||ann|7|gpu
optics||dan|3|
"""
"""Of sacctmgr -nP show associations format=account,parentname,user,share,partition."""
USERS = "ann|optics\nbob|arts\ncyd|arts\ndan|lasers\neve|gone\nroot|root\n"


def test_parts_multiply_down_the_tree():
    associations = parse_associations(TREE, USERS)
    assert associations.accounts["ann"] == "optics"
    assert "eve" not in associations.accounts, "her account is not there"
    # The user root has a share of the root as well: 10, 30 and 1.
    assert associations.account_shares == pytest.approx(
        {"arts": 10 / 41, "physics": 30 / 41, "lasers": 30 / 41 / 4, "optics": 30 / 41 * 3 / 4}
    )
    assert (
        associations.user_shares["bob"] == associations.user_shares["cyd"] == pytest.approx(5 / 41)
    )
    assert associations.user_shares["dan"] == pytest.approx(30 / 41 / 4), (
        "by way of the default account"
    )
    assert associations.user_shares["ann"] == pytest.approx(30 / 41 * 3 / 4 / 4)


def test_nothing_comes_of_nothing():
    associations = parse_associations("", "")
    assert (associations.accounts, associations.account_shares, associations.user_shares) == (
        {},
        {},
        {},
    )


def test_a_tree_that_is_no_tree_does_not_hang():
    associations = parse_associations("a|b||1|\nb|a||1|\na||ann|1|\n", "ann|a\n")
    assert associations.accounts == {"ann": "a"}


def test_names_with_capitals_are_those_that_slurm_has_in_lower_case():
    associations = Associations(accounts={"ann": "lab"})
    assert [associations.account(name) for name in ("ann", "Ann", "bob")] == ["lab", "lab", ""]
