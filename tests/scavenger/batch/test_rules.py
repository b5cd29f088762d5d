"""Every rule lets a node pass or not, and says why."""

from __future__ import annotations

import time

import pytest

from scavenger.batch.rules import (
    RULES,
    Explanations,
    GapRules,
    HoursError,
    NodeFacts,
    choose,
    explain,
    parse_hours,
    passes,
    why_not,
)

NOW = 1_000_000.0
GAP = NodeFacts(
    "n1", "idle", True, partitions=("batch", "low"), features=("a100",), idle_since=NOW - 100
)
TODAY = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")[time.localtime(NOW).tm_wday]
OTHER_DAY = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")[(time.localtime(NOW).tm_wday + 3) % 7]


def verdict(node, rules):
    """The rules that did not let the node pass, with their sentences."""
    made = explain(node, rules, choose([node], rules, NOW, lambda n: 1.0), NOW)
    return {name: sentence for name, passed, sentence in made.rules if not passed}


def test_a_plain_idle_node_is_a_gap():
    rules = GapRules()
    assert verdict(GAP, rules) == {}
    assert passes(GAP, rules, NOW)
    made = explain(GAP, rules, choose([GAP], rules, NOW, lambda n: 1.0), NOW)
    assert made.is_gap
    assert [name for name, _, _ in made.rules] == [name for name, _ in RULES]
    assert all(sentence for _, _, sentence in made.rules)


@pytest.mark.parametrize(
    ("changes", "rules", "rule", "words"),
    [
        ({"idle": False, "state": "allocated"}, {}, "idle", "allocated"),
        ({"lease": "l7"}, {}, "idle", "lease l7"),
        ({"trouble": "it is drained (broken)"}, {}, "usable", "drained (broken)"),
        ({"reserved": "reservation maint has it"}, {}, "reservation", "maint has it"),
        (
            {"reserved_from": NOW + 60},
            {"min_free_s": 90.0},
            "reservation",
            "begins in 60 s, and a lease needs 90 s",
        ),
        ({"planned": True}, {}, "planned", "held for a waiting job"),
        ({"planned_at": NOW + 7200}, {}, "planned", "expected to start in 2.0 h"),
        ({"planned": True}, {"use_planned": True}, "planned", "does not say until when"),
        (
            {"planned_at": NOW + 60},
            {"use_planned": True, "min_free_s": 90.0},
            "planned",
            "a lease needs 90 s",
        ),
        ({}, {"partitions": frozenset({"gpu"})}, "partition", "it is in batch, low"),
        ({"partitions": ()}, {"partitions": frozenset({"low"})}, "partition", "none that is up"),
        ({}, {"exclude": frozenset({"n1"})}, "listed", "excludes it"),
        ({}, {"nodes": frozenset({"n2"})}, "listed", "not among the nodes"),
        ({}, {"features": frozenset({"a100", "ib"})}, "features", "it lacks ib"),
        ({}, {"hours": parse_hours([OTHER_DAY])}, "hours", "no leases are allowed"),
        (
            {"idle_since": NOW - 10},
            {},
            "turn",
            "idle for 10 s; the main scheduler has its turn for 30 s",
        ),
        ({"idle_since": None}, {}, "turn", "idle for 0 s"),
        ({}, {"hold": "it takes nodes back"}, "hold", "takes nodes back"),
    ],
)
def test_each_rule_says_why_a_node_is_no_gap(changes, rules, rule, words):
    node, rules = GAP._replace(**changes), GapRules(**rules)
    reasons = verdict(node, rules)
    assert words in reasons[rule]
    assert list(reasons) == [rule]
    assert not passes(node, rules, NOW)
    assert words in why_not(node, rules, choose([node], rules, NOW, lambda n: 1.0), NOW)


@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        ({"planned_at": NOW + 600, "planned": True}, {"use_planned": True, "min_free_s": 90.0}),
        ({"reserved_from": NOW + 600}, {"min_free_s": 90.0}),
        (
            {},
            {
                "partitions": frozenset({"low", "gpu"}),
                "nodes": frozenset({"n1"}),
                "features": frozenset({"a100"}),
            },
        ),
        ({}, {"hours": parse_hours([TODAY])}),
    ],
)
def test_what_is_allowed_passes(changes, rules):
    assert passes(GAP._replace(**changes), GapRules(**rules), NOW)


def nodes(count):
    return [GAP._replace(name=f"n{i}") for i in range(count)]


def test_the_longest_horizons_come_first_and_the_reserve_keeps_the_shortest():
    horizon = {f"n{i}": float(i) for i in range(6)}
    rules = GapRules(reserve=2)
    choice = choose(nodes(6), rules, NOW, lambda n: horizon[n.name])
    assert [n.name for n in choice.gaps] == ["n5", "n4", "n3", "n2"]
    assert set(choice.exclusions) == {"n0", "n1"}
    assert choice.exclusions["n0"][0] == "reserve"
    assert "2 idle nodes are left" in explain(nodes(1)[0], rules, choice, NOW).rules[-1][2]


def test_leased_and_broken_nodes_do_not_count_as_reserve():
    mixed = [
        *nodes(3),
        GAP._replace(name="a", lease="l1"),
        GAP._replace(name="b", trouble="down"),
        GAP._replace(name="c", reserved="r"),
    ]
    assert len(choose(mixed, GapRules(reserve=2), NOW, lambda n: 1.0).gaps) == 1
    # Idle nodes that may not be leased for another reason are a reserve too.
    assert (
        len(
            choose(
                [*nodes(3), GAP._replace(name="d", partitions=())],
                GapRules(reserve=1),
                NOW,
                lambda n: 1.0,
            ).gaps
        )
        == 3
    )


def test_limits_on_all_leases_and_on_one_poll():
    rules = GapRules(max_at_once=3)
    assert len(choose(nodes(10), rules, NOW, lambda n: None).gaps) == 3
    choice = choose(nodes(10), rules, NOW, lambda n: None, (1, "the site allows 5 leases"))
    assert len(choice.gaps) == 1
    assert choice.exclusions["n9"] == ("at once", "the site allows 5 leases")
    assert choose(nodes(2), rules, NOW, lambda n: None, (-4, "x")).gaps == ()


def test_explanations_are_made_when_they_are_looked_at():
    rules = GapRules()
    all_nodes = nodes(3)
    made = Explanations(all_nodes, rules, choose(all_nodes, rules, NOW, lambda n: 1.0), NOW)
    assert len(made) == 3
    assert made[1].node == "n1"
    assert [e.node for e in made] == ["n0", "n1", "n2"]
    assert [e.node for e in made[1:]] == ["n1", "n2"]


def at(day, clock):
    """Epoch seconds of a weekday (0: Monday) of a week without a change of clocks."""
    hour, minute = map(int, clock.split(":"))
    return time.mktime((2026, 6, 1 + day, hour, minute, 0, 0, 0, -1))


@pytest.mark.parametrize(
    ("texts", "day", "clock", "remaining_s"),
    [
        ([], 0, "12:00", None),
        (["mon-sun"], 3, "12:00", None),
        (["mon-fri 19:00-07:00"], 0, "19:00", 12 * 3600),
        (["mon-fri 19:00-07:00"], 1, "06:30", 1800),
        (["mon-fri 19:00-07:00"], 0, "06:30", 0),
        (["mon-fri 19:00-07:00"], 5, "06:00", 3600),
        (["mon-fri 19:00-07:00"], 2, "12:00", 0),
        (["sat-sun"], 5, "00:00", 48 * 3600),
        (["sat"], 6, "00:00", 0),
        (["22:00-06:00"], 6, "23:00", 7 * 3600),
        (["22:00-06:00"], 0, "01:00", 5 * 3600),
        (["fri-mon"], 6, "12:00", 36 * 3600),
        (["sat", "SUN 00:00-12:00"], 5, "12:00", 24 * 3600),
        (["08:00-24:00"], 2, "23:00", 3600),
    ],
)
def test_seconds_left(texts, day, clock, remaining_s):
    assert parse_hours(texts).remaining_s(at(day, clock)) == remaining_s


@pytest.mark.parametrize(
    "text", ["", "always", "mon-", "25:00-26:00", "10:60-11:00", "mon 10", "10:00"]
)
def test_nonsense_is_refused_with_what_is_accepted(text):
    with pytest.raises(HoursError, match="accepted is"):
        parse_hours([text])


@pytest.mark.parametrize(
    ("evening", "hours_left"),
    [("2026-03-27", 7), ("2026-03-28", 6), ("2026-10-24", 8)],
    ids=["an ordinary night", "to daylight saving time", "from it"],
)
def test_the_night_of_a_change_to_or_from_daylight_saving_time(monkeypatch, evening, hours_left):
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
        time.tzset()
        now = time.mktime(time.strptime(f"{evening} 23:00", "%Y-%m-%d %H:%M"))
        left_s = parse_hours(["22:00-06:00"]).remaining_s(now)
    time.tzset()
    assert left_s == hours_left * 3600
