"""How the slow-down of a job beside a lease is computed."""

from __future__ import annotations

import pytest

from benchmarks.noharm_slots import Window, read_repetitions, slow_downs

WINDOWS = [
    Window("", 0.0, 10.0),
    Window("train", 10.0, 20.0),
    Window("", 20.0, 30.0),
    Window("memory", 30.0, 40.0),
    Window("", 40.0, 50.0),
]


def steady(begin, end, duration):
    """Repetitions that follow each other."""
    count = round((end - begin) / duration)
    return [(begin + number * duration, duration) for number in range(count)]


def test_windows_are_compared_with_their_neighbours():
    # The machine is getting slower by itself: 0.1, 0.12, 0.14 s. Beside training a repetition takes
    # 0.11 s, which is the mean of its neighbours; beside memory 0.26 s, twice that of its own.
    durations = (0.1, 0.11, 0.12, 0.26, 0.14)
    repetitions = [
        each
        for window, duration in zip(WINDOWS, durations, strict=True)
        for each in steady(window.begin, window.end, duration)
    ]
    ratios = slow_downs(WINDOWS, repetitions)
    assert ratios["train"] == pytest.approx([0.0])
    assert ratios["memory"] == pytest.approx([1.0])


def test_repetitions_across_a_border_and_empty_windows_do_not_count():
    repetitions = [(1.0, 1.0), (9.5, 1.0), (12.0, 2.0), (25.0, 1.0)]
    assert slow_downs(WINDOWS, repetitions) == {"train": [1.0]}


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    path = tmp_path / "repetitions"
    path.write_text("1.0 0.5\n1.5 0.25\n1.75 0.")
    assert read_repetitions(path) == [(1.0, 0.5), (1.5, 0.25)]
