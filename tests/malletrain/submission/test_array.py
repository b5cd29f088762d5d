"""``--array``, ``--time-limit`` and ``--notify``: which words are accepted, and what they mean."""

from __future__ import annotations

import pytest

from malletrain.protocol.messages import JobSpec, Notification
from malletrain.submission.error import SpecError
from malletrain.submission.spec import NOTIFY_EVENTS, notification, time_limit_of
from malletrain.submission.task_lists import indices, one_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1-4", (1, 2, 3, 4)),
        ("0-20:5", (0, 5, 10, 15, 20)),
        ("7", (7,)),
        ("9, 1-2, 2", (9, 1, 2)),
        ("1-1000", tuple(range(1, 1001))),
    ],
)
def test_indices(text, expected):
    assert indices(text) == expected


@pytest.mark.parametrize("text", ["", "a", "4-1", "1-4:0", "-3", "1-1001", "1-999999999", "1,,2"])
def test_what_is_no_array_is_refused(text):
    with pytest.raises(SpecError):
        indices(text)


def test_one_of_an_array_has_its_index_in_name_arguments_and_variables():
    spec = JobSpec(
        "n" * 64, "", "/s", "/", "p", ("--seed", "{index}", "x{index}y"), {"A": "{index}"}
    )
    one = one_of(spec, 12)
    assert one.name == "n" * 61 + "-12"
    assert one.args == ("--seed", "12", "x12y")
    assert one.env == {"A": "12", "MALLETRAIN_ARRAY_INDEX": "12"}


def test_time_limits():
    assert (time_limit_of(None), time_limit_of("90 min"), time_limit_of("1.5 h")) == (0, 5400, 5400)
    for wrong in ("90", "0 s", "400 d", "soon"):
        with pytest.raises(SpecError, match="--time-limit"):
            time_limit_of(wrong)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "ann@example.org",
            Notification("ann@example.org", "mail", NOTIFY_EVENTS),
        ),
        ("end=ann@b", Notification("ann@b", "mail", ("end",))),
        ("at-risk=ann@b", Notification("ann@b", "mail", ("at-risk",))),
        ("failure=https://h/x?a=b", Notification("https://h/x?a=b", "webhook", ("failure",))),
        (
            "https://h/?end=1",
            Notification("https://h/?end=1", "webhook", NOTIFY_EVENTS),
        ),
        ("start,end=command:echo a=b", Notification("echo a=b", "command", ("start", "end"))),
    ],
)
def test_notifications(text, expected):
    assert notification(text) == expected


@pytest.mark.parametrize(
    "text", ["", "nobody", "command:", "ftp://x", "sometimes=a@b", "a@b\nBcc: c"]
)
def test_nobody_to_notify(text):
    with pytest.raises(SpecError, match="is no receiver"):
        notification(text)
