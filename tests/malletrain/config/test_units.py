import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malletrain.config.units import (
    UnitError,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
    show_duration,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30 s", 30),
        ("5 min", 300),
        ("1.5 h", 5400),
        ("250ms", 0.25),
        ("2 d", 172800),
        (" .5  s ", 0.5),
        ("1e3 s", 1000),
        ("0 s", 0),
    ],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2 GiB", 2 * 2**30),
        ("500 MB", 500_000_000),
        ("1.5 KiB", 1536),
        ("0 B", 0),
        ("7B", 7),
        ("1 TB", 10**12),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("4G", 'write "4 GB" (powers of 1000) or "4 GiB" (powers of 1024, as the G of sbatch)'),
        ("4 K", '"4 kB" (powers of 1000) or "4 KiB"'),
    ],
)
def test_a_size_as_sbatch_writes_it_is_answered_with_both_meanings(text, words):
    with pytest.raises(UnitError, match=re.escape(words)):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (30, "30 has no unit"),
        (1.5, "1.5 has no unit"),
        ("30", '"30" has no unit'),
        (True, "True is not a quantity"),
        (None, "None is not a quantity"),
        ([], "[] is not a quantity"),
        ("", "is not a quantity"),
        ("s", "is not a quantity"),
        ("5 m", 'wrong unit "m"'),
        ("5 S", 'wrong unit "S"'),
        ("5 GiB", "GiB is a unit of size"),
        ("-1 s", "negative"),
        ("1e999 s", "too large"),
        ("1 s 2", "is not a quantity"),
        ("nan s", "is not a quantity"),
    ],
)
def test_what_is_no_duration(text, words):
    with pytest.raises(UnitError) as error:
        parse_duration(text)
    assert words in str(error.value)
    assert '"30 s"' in str(error.value)  # what is accepted is said every time


@pytest.mark.parametrize("text", [5, "5", "5 s", "-1 B", "1.5 B", "5 gib", "x"])
def test_what_is_no_size(text):
    with pytest.raises(UnitError, match="accepted is"):
        parse_size(text)


@given(st.floats(min_value=0, max_value=1e12))
def test_durations_survive_being_written(seconds):
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.integers(min_value=0, max_value=2**60))
def test_sizes_survive_being_written(size):
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.44, "9.4 s"),
        (59.6, "1 min"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (356400, "4 d 3 h"),
        (-61, "-1 min 1 s"),
    ],
)
def test_durations_for_reading(seconds, text):
    assert show_duration(seconds) == text
