"""Injected causes of slow steps, in real jobs: the right one is named first."""

from __future__ import annotations

import random

import pytest

from benchmarks.step_breakdown import NAMED, Injection, drawn, run
from malletrain.render.job_detail import shares_sentence
from tests.integration.embedded import site
from tests.selection import every_change


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    """A site of two nodes for the jobs of all tests."""
    with site(tmp_path_factory.mktemp("step-breakdown") / "site", nodes=2) as made:
        yield made


def test_injections_follow_from_the_seed():
    assert drawn(random.Random(5)) == drawn(random.Random(5))
    assert drawn(random.Random(5), "link").cause == "link"


@pytest.mark.slow
@pytest.mark.parametrize(
    "causes",
    [
        pytest.param(("one-loader", "disk"), id="few"),
        pytest.param(tuple(NAMED), id="all", marks=pytest.mark.thorough),
    ],
)
def test_the_right_cause_is_named(embedded, causes):
    """The delays are several times what anything else takes, on a busy machine too."""
    pytest.importorskip("torch")
    for cause in causes:
        result = run(embedded, Injection(cause, 0.3, 1), steps=10)
        assert result.right, result
        assert shares_sentence(result.shares)


@pytest.mark.slow
@pytest.mark.parametrize("cause", every_change(["loader", "rank"], "rank"))
def test_the_right_cause_is_named_in_live_mode(embedded, cause):
    pytest.importorskip("torch")
    result = run(embedded, Injection(cause, 0.3, 1), steps=25, live=True)
    assert result.right, result
