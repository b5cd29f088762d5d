"""JSON as PBS prints it."""

import contextlib
import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scavenger.interface import SchedulerError
from scavenger.pbs.parse import (
    decode,
    number_of,
    read_jobs,
    read_nodes,
    read_reservations,
    repair,
    text_of,
    words_of,
)
from scavenger.pbs.site import limit_of, read_site
from tests.draws import cases


class Anything(msgspec.Struct):
    A: object = None


def line(value):
    return f'{{\n\t"A":\t{value},\n\t"B":\t"end"\n}}\n'


@pytest.mark.parametrize(
    ("printed", "meant"),
    [
        ("005", "005"),
        ("-00.123", "-00.123"),
        (".5", ".5"),
        ("123.", "123."),
        ("inf", "inf"),
        ("nan", "nan"),
        ("0x1f", "0x1f"),
        ("1e999", "1e999"),
        ('"say "hi" (Sep 04)"', 'say "hi" (Sep 04)'),
        (r'''"'\"asads\"\'"''', """\'"asads"\\\'"""),
        (r'"ab\,c"', r"ab\,c"),
        ('"two\nlines"', "two\nlines"),
        ('"tab\there"', "tab\there"),
        ('"fine \\" \\u00e9 \\n"', 'fine " é \n'),
        ("17", 17),
        ("[]", []),
        ('["a", "b"]', ["a", "b"]),
        ("{\n\t}", {}),
        ("True", "True"),
    ],
)
def test_values_that_pbs_prints(printed, meant):
    assert meant == decode(line(printed), Anything, "qstat").A


def test_sound_json_is_left_as_it_is():
    text = (
        '{\n\t"A":\t{\n\t\t"b":\t[1, '
        '"x\\"y\\\\"],\n\t\t"c":\t{\n\t\t},\n\t\t"d":\tnull,\n\t\t"e":\ttrue\n\t}\n}\n'
    )
    assert repair(text) == text


@settings(max_examples=cases(60), deadline=None)
@given(st.text(st.characters(exclude_characters="\n\r", codec="utf-8"), max_size=30))
def test_any_text_on_one_line_comes_back_or_is_refused_in_words(text):
    try:
        value = decode(
            line(f'"{text}"'), Anything, "qstat"
        ).A  # not escaped at all, as old versions print it
    except SchedulerError:
        return
    assert isinstance(value, str)


@settings(max_examples=cases(80), deadline=None)
@given(
    st.one_of(
        st.text(max_size=80),
        st.binary(max_size=80).map(lambda b: b.decode("utf-8", "surrogateescape")),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.text(max_size=8),
            lambda c: (
                st.lists(c, max_size=3)
                | st.dictionaries(
                    st.sampled_from(
                        [
                            "nodes",
                            "Jobs",
                            "Server",
                            "Queue",
                            "timestamp",
                            "state",
                            "jobs",
                            "resv",
                            "estimated",
                            "x",
                        ]
                    ),
                    c,
                    max_size=4,
                )
            ),
        ).map(lambda value: json.dumps(value, indent="\t")),
    )
)
def test_readers_raise_nothing_but_scheduler_errors(text):
    for read in (
        read_nodes,
        lambda t: read_jobs(t, "malletrain-"),
        read_reservations,
        lambda t: read_site(t, t, t),
    ):
        try:
            read(text)
        except SchedulerError:
            pass


NODE = {
    "nodes": {
        "a[0]": {"state": "free", "jobs": ["1.s"], "resources_available": {"host": "a", "ncpus": 2}}
    }
}


@settings(max_examples=cases(60), deadline=None)
@given(st.data())
def test_a_damaged_answer_is_understood_or_refused(data):
    text = json.dumps(NODE, indent="\t", separators=(",", ":\t"))
    begin = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(begin, min(len(text), begin + 12)))
    try:
        read_nodes(text[:begin] + data.draw(st.text(max_size=4)) + text[end:])
    except SchedulerError:
        pass


def test_deep_nesting_is_refused_or_read():
    with contextlib.suppress(SchedulerError):  # Python 3.14 reads it
        assert "a" in read_nodes('{"nodes":' + '{"a":' * 100_000 + "1" + "}" * 100_001)


def test_loose_values():
    assert text_of(42) == "42"
    assert text_of(None) == ""
    assert words_of("R1.s, R2.s") == words_of(["R1.s", "R2.s"]) == ("R1.s", "R2.s")
    assert words_of("") == ()
    assert (text_of(10**5000), number_of(10**5000), number_of(float("nan"), 1.0)) == ("", 0.0, 1.0)
    assert (number_of("2gb"), number_of(3), number_of("x", 7.0)) == (2.0, 3.0, 7.0)


def test_every_limit_of_an_attribute_counts():
    """PBS prints an attribute of several limits as several keys of one name."""
    server = (
        '{\n"timestamp":1,\n"pbs_version":"23.06.06",\n"Server":{\n"s":{\n'
        '"max_run":"[u:PBS_GENERIC=5]",\n"max_run":"[u:ann=9]",\n"comment":"say "hi"",\n'
        '"max_run_res":{\n"ncpus":"[u:ann=64]",\n"ncpus":"[u:PBS_GENERIC=8]"\n}\n}\n}\n}\n'
    )
    site = read_site(server, '{"timestamp":1,"Queue":{}}')
    assert [limit_of(site.limits["max_run"], user) for user in ("ann", "bob")] == [9, 5]
    assert [limit_of(site.limits["max_run_res.ncpus"], u) for u in ("ann", "bob")] == [64, 8]
