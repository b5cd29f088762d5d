"""No state of a node has the colour of a job, or of another state."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from malletrain import web
from malletrain.render.palette import JOB_COLOURS

CSS = (Path(web.__file__).parent / "static" / "page.css").read_text()
STATES = ("busy", "idle", "free", "leasing", "leaving", "sick", "slow")


def colours(scheme: str) -> dict[str, str]:
    """State → its colour in the light or the dark scheme."""
    roots = re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
    root = roots[("light", "dark").index(scheme)]
    values = dict(re.findall(r"--([a-z]+): (#[0-9a-f]+)", root))
    used = dict(re.findall(r"\.node-(\w+) \{ fill: var\(--(\w+)\)", CSS))
    return {state: values[used[state]].lower() for state in STATES}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_states_and_jobs_never_share_a_colour(scheme):
    colour_of = colours(scheme)
    assert len(set(colour_of.values())) == len(STATES), colour_of
    assert set(colour_of.values()).isdisjoint(colour.lower() for colour in JOB_COLOURS)


@pytest.mark.parametrize("state", ["leaving", "slow", "sick"])
def test_states_that_need_a_look_have_an_outline_of_their_own_too(state):
    strokes = re.findall(r"\.node-(leaving|slow|sick) \{[^}]*(stroke-dasharray: [^;]+);", CSS)
    assert dict(strokes)[state]
    assert len(dict(map(reversed, strokes))) == 3


def test_the_page_has_the_colours_of_the_command_line():
    matches = re.findall(r"\.job(\d) \{ fill: (#[0-9A-F]{6});", CSS)
    assert [colour for _, colour in sorted(matches)] == list(JOB_COLOURS)
