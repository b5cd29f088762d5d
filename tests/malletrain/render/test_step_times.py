"""Where a step's time goes, as ``malletrain show`` prints it."""

import io

import pytest
from rich.console import Console

from malletrain.protocol.views import JobDetail, RankTimesView, StepTimesView
from malletrain.render.job_detail import PARTS, shares_sentence, step_duration, step_times


def test_the_shares_are_a_sentence():
    shares = {"data": 0.41, "computing": 0.48, "others": 0.11, "transfer": 0.004}
    expected = "41 % waiting for data, 48 % computing, 11 % waiting for other ranks"
    assert shares_sentence(shares) == expected


def test_words_are_those_of_the_parts():
    from malletrain.core.step_times import SHARES
    from malletrain.web.history import STACKED

    assert set(PARTS) == set(SHARES) == set(STACKED)


@pytest.mark.parametrize(
    ("duration", "text"),
    [(3.14159, "3.14 s"), (0.12, "120 ms"), (0.00025, "0.25 ms"), (0.0, "0")],
)
def test_durations_within_a_step(duration, text):
    assert step_duration(duration) == text


def test_a_view_without_ranks_is_complete():
    assert StepTimesView(0.1, {"computing": 1.0}, "Advice.").ranks == ()


def printed(ranks, rank_count=0):
    """The lines below the advice."""
    steps = StepTimesView(0.2, {"computing": 1.0}, "Advice.", tuple(ranks), "", rank_count)
    console = Console(file=io.StringIO(), width=100, color_system=None)
    for part in step_times(JobDetail(job=None, spec={}, steps=steps)):
        console.print(part)
    return console.file.getvalue().partition("Advice.")[2].splitlines()


def rank(number, exchange_s, data_s=0.01):
    computing_s = 0.2 - data_s - (exchange_s or 0.0)
    return RankTimesView(number, f"n{number // 4}", 0.2, data_s, exchange_s, None, computing_s)


def first_cells(lines):
    return [line.split()[0] for line in lines if line.strip()[:1].isdigit() or "median" in line[:8]]


def test_few_ranks_have_a_line_each():
    assert first_cells(printed([rank(k, 0.05) for k in range(8)])) == [str(k) for k in range(8)]
    assert printed([rank(0, None)]) == [""]


def test_of_many_ranks_those_at_both_ends_and_the_median_have_a_line():
    """Ranks 20 to 23, on one node, come last; rank 40 comes first."""
    ranks = [
        rank(k, 0.02 + 0.001 * (k - 20) if 20 <= k < 24 else 0.09 if k == 40 else 0.07)
        for k in range(64)
    ]
    lines = printed(ranks)
    text = "Of 64 ranks the 5 that come last to exchanges, the 2 that come first, and the median"
    assert text in " ".join(lines)
    shown = first_cells(lines)
    assert shown[:4] == ["20", "21", "22", "23"]
    assert shown[6:] == ["40", "median"]
    assert len(shown) == 8
    median = lines[-1].split()
    assert median == ["median", "200", "ms", "10", "ms", "120", "ms", "70", "ms"]


def test_without_exchanges_the_ranks_that_wait_for_data_come_last():
    lines = printed([rank(k, None, data_s=0.001 * (k + 1)) for k in range(9)])
    assert "wait longest for data" in " ".join(lines)
    assert first_cells(lines) == ["8", "7", "6", "5", "4", "1", "0", "median"]


def test_of_ranks_that_are_not_all_known_the_last_have_a_line():
    lines = printed([rank(k, 0.001 * (64 - k)) for k in range(64)], rank_count=500)
    assert "Of 500 ranks the 7 that come last to exchanges:" in lines
    assert first_cells(lines) == ["63", "62", "61", "60", "59", "58", "57"]
