"""A folder is of one work, on any file system and any kind of CPU."""

from __future__ import annotations

import dataclasses
import errno
import os

import numpy as np
import pytest
from windsr import WindsrError
from windsr.folder_facts import agree, facts_of_fields, record

from tests.jobscripts.windsr import scripts

FACTS = {"method": "srcnn", "draw": [1, 2], "data": {"spacing": 2000.0, "wind": [5.0, 2.0]}}


@pytest.fixture(params=[errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def without_links(request, monkeypatch):
    """A file system without hard links, as some in user space."""

    def refused(source, target):
        raise OSError(request.param, "not here", source, None, target)

    monkeypatch.setattr(os, "link", refused)


def test_work_begins_and_goes_on_without_hard_links(tmp_path, without_links):
    path = tmp_path / "facts.json"
    agree(path, FACTS, "other work")
    agree(path, FACTS, "other work")
    with pytest.raises(WindsrError, match=r"holds other work \(other method\)"):
        agree(path, {**FACTS, "method": "unet"}, "other work")
    record(path, {**FACTS, "method": "unet"})
    agree(path, {**FACTS, "method": "unet"}, "other work")
    assert [each.name for each in tmp_path.iterdir()] == ["facts.json"]


def test_another_error_is_not_hidden(tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(OSError, match="no space"):
        agree(tmp_path / "facts.json", FACTS, "other work")
    assert not list(tmp_path.iterdir())


def test_what_only_one_version_records_does_not_count(tmp_path):
    path = tmp_path / "facts.json"
    record(path, {**FACTS, "of an earlier version": 1})
    agree(path, {**FACTS, "of a later version": 2}, "other work")


def noisy(values, seed):
    """The values with other last digits."""
    noise = np.random.default_rng(seed).normal(size=values.shape)
    return (values * (1.0 + 1e-6 * noise)).astype(values.dtype)


@pytest.mark.parametrize(
    ("change", "is_other"),
    [
        ("digits", False),
        ("wind", True),
        ("spread", True),
        ("terrain", True),
        ("times", True),
        ("area", True),
        ("spacing", True),
    ],
)
def test_fields_that_differ_by_more_than_rounding_are_others(tmp_path, change, is_other):
    """Winds that are brought to another grid have other last digits on another kind of CPU."""
    fields = scripts.small()
    wind, mean = fields.wind, fields.wind.mean()
    changes = {
        "digits": {
            "wind": noisy(wind, 1),
            "terrain": noisy(fields.terrain, 2),
            "y": fields.y * (1.0 + 1e-7),
            "x": fields.x * (1.0 + 1e-7),
        },
        "wind": {"wind": wind * np.float32(1.01)},
        "spread": {"wind": np.maximum(mean + (wind - mean) * np.float32(0.99), 0.0)},
        "terrain": {"terrain": fields.terrain * np.float32(1.01)},
        "times": {"times": fields.times + np.timedelta64(1, "h")},
        "area": {"wind": wind[:, 1:], "terrain": fields.terrain[1:], "y": fields.y[1:]},
        "spacing": {"y": fields.y * 2.0, "x": fields.x * 2.0},
    }
    other = dataclasses.replace(fields, **changes[change])
    path = tmp_path / "facts.json"
    agree(path, {"data": facts_of_fields(fields, True)}, "other work")
    if is_other:
        with pytest.raises(WindsrError, match="other data"):
            agree(path, {"data": facts_of_fields(other, True)}, "other work")
    else:
        agree(path, {"data": facts_of_fields(other, True)}, "other work")
