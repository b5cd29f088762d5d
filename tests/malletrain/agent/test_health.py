"""When a node's health is looked after, and what is made of what the checks say. Checks are played;
real ones are in test_checks.
"""

from __future__ import annotations

from malletrain.agent.health import (
    MAX_UNKNOWN_RESULTS,
    RETRY_DELAY_S,
    Check,
    HealthWatch,
    checks_of,
)
from malletrain.protocol.site_rules import HealthPlan

EVERY, LIMIT = 100.0, 10.0


class Played:
    """A run of a check, ended by the test."""

    def __init__(self, command):
        self.command = command
        self.done = self.killed = False
        self.code = None
        self.printed = ""

    def over(self):
        return self.done

    def kill(self):
        self.killed = True

    def end(self, code, printed=""):
        self.done, self.code, self.printed = True, code, printed


class Node:
    """A watch over checks named by letters."""

    def __init__(self, names="a"):
        self.runs = []
        checks = [Check((name,), self.verdict) for name in names]
        self.watch = HealthWatch(checks, EVERY, LIMIT, self.start)

    def verdict(self, code, printed):
        return "" if code == 0 else f"bad: {code} {printed}"

    def start(self, command):
        self.runs.append(Played(command[0]))
        return self.runs[-1]

    def step(self, now, code=None, printed=""):
        """A step, after the newest run has ended with ``code``."""
        if code is not None:
            self.runs[-1].end(code, printed)
        self.watch.step(now)
        return "".join(run.command for run in self.runs)


def test_nothing_is_to_look_at_where_there_are_no_checks():
    watch = Node("").watch
    watch.step(0.0)
    assert watch.first_checks_done
    assert not watch.is_checking
    assert not watch.sick


def test_all_checks_are_passed_before_the_first_look_is_over():
    node = Node("ab")
    assert node.step(0.0) == "a"
    assert node.step(1.0, 0) == "a"
    assert not node.watch.first_checks_done
    assert node.step(1.1) == "ab"
    node.step(2.0, 0)
    assert node.watch.first_checks_done
    assert not node.watch.sick


def test_the_next_look_begins_an_interval_after_the_end_of_the_last():
    node = Node()
    node.step(0.0)
    node.step(5.0, 0)
    assert node.step(104.9) == "a"
    assert node.step(105.0) == "aa"


def test_one_failure_is_enough_and_nothing_is_looked_at_any_more():
    node = Node("ab")
    node.step(0.0)
    node.step(1.0, 3, "no scratch")
    assert node.watch.sick == "bad: 3 no scratch"
    assert node.watch.first_checks_done
    assert node.step(500.0) == "a"


def test_a_check_that_hangs_is_killed_and_not_waited_for():
    node = Node()
    node.step(0.0)
    node.step(9.9)
    assert not node.runs[0].killed
    node.step(10.0)
    assert node.runs[0].killed
    assert node.watch.sick == "bad: None "


def test_a_check_that_was_swept_away_with_a_job_is_begun_anew():
    node = Node("ab")
    node.step(0.0)
    node.runs[0].done = True  # and nobody knows its exit code
    node.step(1.0)
    assert not node.watch.sick
    assert node.step(1.0 + RETRY_DELAY_S) == "aa"
    node.step(3.0, 0)
    assert node.step(3.1) == "aab"


def test_a_check_whose_result_is_always_lost_is_not_begun_anew_for_ever():
    node = Node("ab")
    now = 0.0
    while node.watch.is_checking and len(node.runs) < 20:
        if node.step(now):
            node.runs[-1].done = True  # and nobody knows its exit code
        now += RETRY_DELAY_S
    assert [run.command for run in node.runs] == ["a"] * MAX_UNKNOWN_RESULTS
    assert node.watch.first_checks_done
    assert "The health check a ran 3 times and its result cannot be written" in node.watch.sick


def test_lost_results_count_anew_after_one_that_is_known():
    node = Node("ab")
    now = 0.0
    for has_result in (False, False, True, False, False, True):
        node.step(now)
        node.runs[-1].end(0 if has_result else None)
        node.step(now)
        now += RETRY_DELAY_S
    assert "".join(run.command for run in node.runs) == "aaabbb"
    assert node.watch.first_checks_done
    assert not node.watch.sick


def test_a_failure_of_workers_is_looked_into_at_once_and_from_the_beginning():
    node = Node("ab")
    node.step(0.0)
    node.step(1.0, 0)
    node.step(1.1)
    node.watch.check_soon()
    node.step(2.0, 0)  # what had begun before says nothing of it
    assert node.watch.is_checking
    assert node.step(2.1) == "aba"
    node.step(3.0, 0)
    node.step(3.1)
    node.step(4.0, 0)
    assert not node.watch.is_checking
    node.watch.check_soon()
    assert node.watch.is_checking
    assert node.step(4.1) == "ababa"


def test_a_command_that_cannot_be_started_is_a_failure():
    def start(command):
        raise OSError(2, "No such file")

    watch = HealthWatch(
        [Check(("x",), lambda code, output: f"{code}: {output}")], EVERY, LIMIT, start
    )
    watch.step(0.0)
    assert watch.sick == "126: [Errno 2] No such file"


def site_check(code, printed):
    (check,) = checks_of(HealthPlan(("/usr/sbin/nhc", "-q"), timeout_s=60.0), 0)
    return check.verdict(code, printed)


def test_the_last_line_of_the_sites_check_is_the_reason():
    output = (
        "checking\nERROR:  nhc:  Health check failed:  check_fs_mount:  /scratch not mounted\n\n"
    )
    assert site_check(0, output) == ""
    assert site_check(1, output) == (
        "The health check nhc failed with code 1: ERROR:  nhc:  Health check failed:  "
        "check_fs_mount:  /scratch not mounted"
    )
    assert site_check(2, "") == "The health check nhc failed with code 2, and said nothing"
    late = "The health check nhc did not end within 60 s and was killed: checking"
    assert site_check(None, "checking") == late
