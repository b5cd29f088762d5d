"""The figures of the benchmark of layouts, from known throughputs."""

import pytest

from benchmarks.layout import Repeat, medians, print_table

USUAL, FAST, MIDDLE = "1 process × 2 threads", "2 processes × 1 thread", "1 process × 1 thread"


def repeat(number, chosen, *rates):
    """One repeat in which a job has found this layout in 20 s."""
    table = dict(zip((USUAL, FAST, MIDDLE), rates, strict=True))
    return Repeat("perceptron", number, table, USUAL, chosen, 20.0, 1500.0)


def test_a_choice_is_compared_with_the_median_of_all_repeats(capsys):
    repeats = [
        repeat(0, FAST, 100.0, 180.0, 120.0),
        repeat(1, MIDDLE, 90.0, 200.0, 150.0),
        repeat(2, USUAL, 110.0, 220.0, 130.0),
    ]
    rates = medians(repeats)
    assert rates == {USUAL: 100.0, FAST: 200.0, MIDDLE: 130.0}
    assert repeats[0].figures(rates) == {
        "chosen/best": 1.0,
        "chosen/default": 2.0,
        "search_s": 20.0,
        "search/default": 0.75,  # 1500 of 2000 samples
    }
    assert repeats[1].figures(rates)["chosen/best"] == pytest.approx(0.65)
    assert repeats[2].figures(rates)["chosen/default"] == 1.0
    print_table(repeats)
    lines = capsys.readouterr().out.splitlines()
    assert "chosen 1 of 3, default" in lines[2]
    assert "200 (180 to 220) samples/s" in lines[3]
