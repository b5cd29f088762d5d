"""What operators name at the command line, as the daemon is told it."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("op", ["drain", "exclude", "resume"])
def test_more_names_than_a_request_holds_come_in_several(run, daemon, op):
    daemon.answers[op] = lambda params: {"sentence": f"{len(params['nodes'])} of them."}
    names = [f"node-{number:06d}.cluster" for number in range(50_000)]
    result = run(op, *names)
    assert result.exit_code == 0, result.output
    asked = [params["nodes"] for seen, params in daemon.seen if seen == op]
    assert [name for some in asked for name in some] == names
    assert len(asked) > 1
    assert result.output.splitlines() == [f"{len(some)} of them." for some in asked]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["drain", "n1", "n2"], {"nodes": ["n1", "n2"], "until": None, "why": ""}),
        (["drain", "--all"], {"nodes": ["*"], "until": None, "why": ""}),
        (["pause", "--why", "x"], {"release": False, "why": "x"}),
    ],
)
def test_few_come_in_one(run, daemon, words, told):
    daemon.answers[words[0]] = lambda params: {"sentence": "Done."}
    result = run(*words)
    assert (result.exit_code, result.output) == (0, "Done.\n")
    assert [params for op, params in daemon.seen if op == words[0]] == [told]
