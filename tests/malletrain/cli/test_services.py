"""Services at the command line: what nodes are worth, and the members."""

from __future__ import annotations

import json

import pytest

from malletrain.protocol.views import MembersView, MemberView

TWO = (MemberView("n1", "h1", "h1:7"), MemberView("n2", "h2", "", 12.0, loading=True))


def view(version="1-a", members=TWO, **more):
    return MembersView("j1", 3, members, "ab" * 32, version, "running", **more)


@pytest.mark.parametrize(
    ("words", "params"),
    [
        (("8=100", "4=40.5"), {"values": {4: 40.5, 8: 100.0}}),
        (("--nothing",), {"values": {1: 0.0}}),
        (("--next", "25"), {"next_each": 25.0, "next_count": 1}),
        (("--next", "25", "--count", "0"), {"next_each": 25.0, "next_count": 0}),  # it refuses
        (
            ("--next", "2.5", "--count", "3", "--expires", "1 min"),
            {"next_each": 2.5, "next_count": 3, "expires_s": 60.0},
        ),
    ],
)
def test_values_reach_the_daemon(run, daemon, words, params):
    daemon.answers["worth"] = lambda params: {"sentence": "Job j1: so be it."}
    result = run("worth", "serve", *words)
    assert (result.exit_code, result.stdout) == (0, "Job j1: so be it.\n"), result.output
    assert daemon.seen[-1] == ("worth", {"job": "serve", "expires_s": None, **params})


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("4",), '"4" is not a number of nodes and its value'),
        (("four=4",), '"four=4" is not a number of nodes'),
        (("0=4",), "whole numbers of nodes from 1 to 100,000"),
        (("1000000000000=4",), "whole numbers of nodes from 1 to 100,000"),
        (("4=ten",), '4=ten: "ten" is not a value'),
        (("4=-1",), '4=-1: "-1" is not a value'),
        (("4=nan",), "not a value"),
        (("4=1", "04=2"), "4 nodes are valued twice"),
        (tuple(f"{k}=1" for k in range(1, 66)), "65 sizes are valued; name 64 at most"),
        (("--next", "inf"), '--next: "inf" is not a value'),
        (("--next", "1", "4=1"), "only one of them"),
        (("--nothing", "4=1"), "only one of them"),
        (("4=1", "--count", "2"), "--count belongs to --next"),
        (("--expires", "5 min"), "belong to a value; give one"),
        (("4=1", "--expires", "soon"), "--expires:"),
    ],
)
def test_wrong_words_are_refused_before_the_daemon_is_asked(run, daemon, words, says):
    result = run("worth", "serve", *words)
    assert result.exit_code == 2
    assert says in result.output
    assert daemon.seen == []


def test_it_shows_the_values_if_none_is_given(run, daemon):
    daemon.answers["members"] = lambda params: view(values={4: 40.0, 16: 99.5})
    assert run("worth", "serve").stdout == "nodes  value\n    4  40\n   16  99.5\n"
    daemon.answers["members"] = lambda params: view(values={1: 0.0}, values_expire_in_s=30.0)
    shown = run("worth", "serve").stdout
    assert shown == "Nodes are worth nothing to it.\nlapses in 30 s\n"
    assert json.loads(run("worth", "serve", "--json").stdout)["values"] == {"1": 0.0}


def test_members_that_load_and_leave_are_marked(run, daemon):
    daemon.answers["members"] = lambda params: view()
    assert run("members", "serve").stdout == "n1  h1:7\nn2  h2  loading  leaves within 12 s\n"


def test_members_are_followed_until_the_service_ends(run, daemon):
    answers = iter(
        [
            view(),
            view(),  # the time of the request was over
            view("2-a", TWO[:1]),
            view("", ()),
        ]
    )
    daemon.answers["members"] = lambda params: next(answers)
    result = run("members", "serve", "--follow")
    assert result.stdout == (
        "n1  h1:7\nn2  h2  loading  leaves within 12 s\n\nn1  h1:7\n\nJob j1 has no members now.\n"
    )
    requests = [(params["job"], params["since"]) for op, params in daemon.seen if op == "members"]
    assert requests == [("serve", ""), ("j1", "1-a"), ("j1", "1-a"), ("j1", "2-a")]
    assert run("members", "serve", "--follow", "--key").exit_code == 2
