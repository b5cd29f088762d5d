"""Known logs, known counts."""

from __future__ import annotations

import pytest

from benchmarks.peers_account import (
    Samples,
    count,
    finished,
    goodput,
    lines_of,
    pause,
    trained,
    usual_steps,
)

BATCH = 4


class Script:
    """Writes the logs that a training of the given groups would, a second a step."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.logs: dict[str, str] = {}

    def step(self, number: int, names: str, but: str = "", skip: int = -1) -> None:
        """One step of the processes ``names`` (rank by place); ``but``: killed before its line;
        ``skip``: a sample that nobody takes.
        """
        self.clock += 1.0
        due = range((number - 1) * BATCH, number * BATCH)
        for rank, name in enumerate(names):
            ids = " ".join(str(s) for s in due[rank :: len(names)] if s != skip)
            head = f"{number} {len(names)} {rank}"
            self.logs.setdefault(name, "")
            self.logs[name] += f"{self.clock:.2f} draw {head} {ids}\n"
            if name not in but:
                self.logs[name] += f"{self.clock + 0.5:.2f} done {head}\n"

    def lines(self):
        return [lines_of(text) for text in self.logs.values()]


def test_every_sample_once_over_changes_of_the_group():
    script = Script()
    for number, names in enumerate(["ab", "ab", "abc", "abc", "a", "a"], 1):
        script.step(number, names)
    assert count(script.lines()) == Samples(distinct=20, repeated=0, lost=0)


def test_usual_step_times_by_number_of_ranks_leave_out_changes():
    script = Script()
    for number, names in enumerate(["ab", "ab", "ab", "c", "c", "c"], 1):
        script.step(number, names)
        script.clock += 10.0 if number == 3 else 2.0 if names == "c" else 0.0
    assert usual_steps(script.lines()) == {2: 1.0, 1: 3.0}


def test_steps_done_again_after_a_loss_are_counted_sample_by_sample():
    script = Script()
    for number, names in [(1, "ab"), (2, "ab"), (3, "ab"), (2, "c"), (3, "c"), (4, "c"), (5, "c")]:
        script.step(number, names)
    assert count(script.lines()) == Samples(distinct=16, repeated=8, lost=0)


def test_a_sample_that_nobody_took_is_lost():
    script = Script()
    for number in range(1, 5):
        script.step(number, "ab", skip=5)
    assert count(script.lines()) == Samples(distinct=11, repeated=0, lost=1)


def test_a_rank_killed_before_its_line_counts_if_the_group_finished_the_step():
    script = Script()
    script.step(1, "ab")
    script.step(2, "ab", but="b")
    script.step(3, "a")
    script.step(4, "a")
    assert count(script.lines()) == Samples(distinct=12, repeated=0, lost=0)


def test_a_step_given_up_counts_when_it_was_repeated():
    script = Script()
    script.step(1, "ab")
    script.step(2, "ab", but="ab")  # b is killed in it, and a goes on alone
    script.step(2, "a")
    script.step(3, "a")
    assert len(trained(script.lines())) == 4
    assert count(script.lines()) == Samples(distinct=8, repeated=0, lost=0)


def test_a_killed_rank_and_its_successor_count_once():
    script = Script()
    script.step(1, "ab")
    script.step(2, "ab", but="ab")
    script.step(2, "ac")
    script.step(3, "ac")
    assert count(script.lines()) == Samples(distinct=8, repeated=0, lost=0)


def test_a_line_cut_short_is_left_out():
    (line,) = lines_of("1.0 draw 1 2 0 0 2\n2.0 do")
    assert (line.kind, line.samples) == ("draw", (0, 2))


def test_the_pause_is_the_longest_time_without_a_step():
    script = Script()
    for number in (1, 2):
        script.step(number, "ab")
    script.clock += 7.0
    for number in (3, 4):
        script.step(number, "a")
    done = finished(script.lines())
    assert pause(done, begin=3.0, end=12.0) == pytest.approx(8.0)
    assert pause(done, begin=10.6, end=12.0) == pytest.approx(1.0)
    assert pause(done, begin=12.0, end=15.0) == pytest.approx(3.5)  # no step ever came


def test_goodput_is_throughput_relative_to_an_undisturbed_training():
    assert goodput(samples=600, seconds=60.0, undisturbed=20.0) == pytest.approx(0.5)
