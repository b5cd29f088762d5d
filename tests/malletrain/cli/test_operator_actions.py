"""Nodes that operators name at the command line, as the daemon receives them."""

from __future__ import annotations

import pytest

from tests.malletrain.cli.fake_daemon import Refuse

MANY = [f"node-{number:06d}.cluster" for number in range(50_000)]


@pytest.mark.parametrize("op", ["drain", "exclude", "resume"])
def test_more_names_than_a_request_holds_come_in_several(run, daemon, op):
    daemon.answers[op] = lambda params: {"sentence": f"{len(params['nodes'])} of them."}
    result = run(op, *MANY)
    assert result.exit_code == 0, result.output
    requests = [params["nodes"] for seen, params in daemon.seen if seen == op]
    assert [name for some in requests for name in some] == MANY
    assert len(requests) > 1
    assert result.output.splitlines() == [f"{len(some)} of them." for some in requests]


def refusing(without, code="refused"):
    """An operation that is refused where none of its nodes is in ``without``."""

    def do(params):
        there = without.intersection(params["nodes"])
        if not there:
            raise Refuse("May be leased again: nothing.", code)
        return {"sentence": f"May be leased again: {len(there)}."}

    return do


@pytest.mark.parametrize("there", [MANY[0], MANY[-1]], ids=["first", "last"])
def test_a_request_that_is_refused_keeps_none_of_the_others_back(run, daemon, there):
    daemon.answers["resume"] = refusing({there})
    result = run("resume", *MANY)
    requests = [params["nodes"] for op, params in daemon.seen if op == "resume"]
    assert [name for some in requests for name in some] == MANY
    assert len(requests) > 1
    assert (result.exit_code, result.stdout) == (0, "May be leased again: 1.\n")
    assert result.stderr.splitlines() == [
        f"Refused for {len(some):,} nodes, {some[0]} to {some[-1]}: May be leased again: nothing."
        for some in requests
        if there not in some
    ]


@pytest.mark.parametrize(("code", "ends"), [("refused", 1), ("usage", 2)])
def test_the_command_fails_where_all_of_them_are_refused(run, daemon, code, ends):
    daemon.answers["resume"] = refusing(set(), code)
    result = run("resume", *MANY)
    requests = [params["nodes"] for op, params in daemon.seen if op == "resume"]
    assert [name for some in requests for name in some] == MANY
    assert (result.exit_code, result.stdout) == (ends, "")
    assert len(result.stderr.splitlines()) == len(requests)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["drain", "n1", "n2"], {"nodes": ["n1", "n2"], "until": None, "why": ""}),
        (["drain", "--all"], {"nodes": ["*"], "until": None, "why": ""}),
        (["pause", "--why", "x"], {"release": False, "why": "x"}),
    ],
)
def test_few_come_in_one(run, daemon, words, expected):
    daemon.answers[words[0]] = lambda params: {"sentence": "Done."}
    result = run(*words)
    assert (result.exit_code, result.output) == (0, "Done.\n")
    assert [params for op, params in daemon.seen if op == words[0]] == [expected]
