"""The words of the page are those of the command line."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from malletrain import web
from malletrain.render.job_detail import PARTS, STANDS
from scavenger.hostlist import expand, fold
from tests.malletrain.cli.fake_daemon import status_view

WORDS = Path(web.__file__).parent / "static" / "words.js"


def table(name):
    """A table of words.js."""
    match = re.search(rf"export const {name} = {{(.*?)}};", WORDS.read_text(), re.DOTALL)
    assert match
    return dict(re.findall(r'^  (\w+): "(.*)",$', match[1], re.MULTILINE))


def evaluated(module: str, expression: str):
    """What an expression of the page's JavaScript comes to."""
    if (node := shutil.which("node")) is None:
        pytest.skip("node is not installed, so the page's JavaScript cannot be run by itself")
    code = f"import * as page from '{WORDS.parent / module}';"
    code += f"console.log(JSON.stringify({expression}))"
    done = subprocess.run(
        [node, "--input-type=module", "-e", code], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_times_of_nodes_are_said_as_people_say_them():
    values = [0, 1 / 3600, 0.08, 0.5, 0.999, 1, 12.34, 4711.2]
    assert evaluated("words.js", f"{values}.map(page.nodeTime)") == [
        *("0", "1.0 s", "5 min", "30 min", "60 min", "1.0 h", "12.3 h", "4711 h")
    ]


@pytest.mark.parametrize(
    "names",
    [
        *([], ["n1"], ["n2", "n1", "n3"], ["n01", "n02", "n10"], ["n8", "n9", "n10", "n11"]),
        *(["login", "gpu-a", "n1"], ["n1", "n1", "n3"], ["r1n1", "r1n2", "r2n1"], ["c1-01.site"]),
    ],
)
def test_names_of_nodes_are_those_of_the_command_line(names):
    folded = evaluated("words.js", f"page.hosts({json.dumps(names)})")
    assert sorted(folded) == sorted(fold(names)), "the same, whatever the order of the prefixes"
    assert sorted(expand(folded)) == sorted(set(names))


def test_what_is_wrong_at_a_site_is_what_status_says():
    fine = msgspec.to_builtins(status_view())
    wrong = fine | {
        "restraint": "No leases are requested.",
        "users_problems": ["Line 3 is wrong."],
        "failed_starts": ["No agent reported from n1."],
        "handler_failures": "2 messages failed.",
        "late": {"j1": "Its snapshot is late."},
    }
    listed = evaluated("words.js", f"[{json.dumps(fine)}, {json.dumps(wrong)}].map(page.problems)")
    assert listed == [
        [],
        [
            "No leases are requested.",
            "Line 3 is wrong.",
            "No agent reported from n1.",
            "2 messages failed.",
            "Its snapshot is late.",
        ],
    ]


def test_ticks_are_labelled_as_people_say_numbers():
    values = [0, 0.25, 1500, 20000, 200000, 1.5e6, 2e-6, -30000, 5e15]
    assert evaluated("words.js", f"{values}.map(page.tick)") == [
        *("0", "0.25", "1500", "20 k", "200 k", "1.5 M", "2e-6", "-30 k", "5000 T")
    ]


@pytest.mark.parametrize(
    ("low", "high", "most", "expected"),
    [
        (0, 919000, 4, [0, 500000, 1000000]),
        (0, 3, 4, [0, 1, 2, 3]),
        (0.1, 0.3, 4, [0.1, 0.15, 0.2, 0.25, 0.3]),
        (-0.5, 0.5, 4, [-0.5, 0, 0.5]),
    ],
)
def test_ticks_begin_and_end_beyond_the_curve(low, high, most, expected):
    assert evaluated("charts.js", f"page.ticks({low}, {high}, {most})") == expected


def test_forty_two_consecutive_jobs_differ_by_colour_or_pattern():
    cues = evaluated("timeline.js", "[...Array(60).keys()].map((k) => page.jobCue(`j${k}`))")
    assert [cues[k] for k in (0, 6, 7, 41, 42)] == [[0, 0], [6, 0], [0, 1], [6, 5], [0, 0]]
    for first in range(19):
        assert len({tuple(cue) for cue in cues[first : first + 42]}) == 42


def test_columns_without_anything_in_them_are_left_out():
    rows = [["a", "", 0, None], ["b", "", 1, None]]
    assert evaluated("dom.js", f"page.filled([1, 2, 3, 4], {json.dumps(rows)})") == [0, 2]


def test_the_parts_of_a_step():
    assert table("PARTS") == PARTS


PAGE = """
class Element {
  constructor(tag) { Object.assign(this, { tag, attributes: {}, children: [] }); }
  setAttribute(name, value) { this.attributes[name] = value; }
  append(child) { this.children.push(child); }
  replaceChildren() { this.children = []; }
  all() { return [this, ...this.children.flatMap((each) => each.all())]; }
}
globalThis.Node = Element;
globalThis.document = { createElement: (tag) => new Element(tag),
  createElementNS: (_, tag) => new Element(tag), createTextNode: (text) => new Element(text) };
"""
"""What the page's scripts need of a browser to create elements."""


def test_shares_over_time_are_stacked_to_the_top():
    """Two parts at two times: the areas begin at the bottom and end at 100 %."""
    points = [[100.0, 0.25, 0.75], [110.0, 0.5, 0.5]]
    outlines = evaluated(
        "charts.js",
        f"(() => {{ {PAGE} return page.shares('a label', {points}, ['data', 'computing']).all()"
        ".filter((each) => each.tag === 'path')"
        ".map((each) => [each.attributes.class, each.attributes.d]); })()",
    )
    bottom, top, begin, end = 154, 10, "47.0", "708.0"
    first, second = bottom - 0.25 * (bottom - top), bottom - 0.5 * (bottom - top)
    assert outlines == [
        ["area part0", f"M{begin} {first}L{end} {second}L{end} {bottom}.0L{begin} {bottom}.0Z"],
        ["area part1", f"M{begin} {top}.0L{end} {top}.0L{end} {second}L{begin} {first}Z"],
    ]


def test_how_a_profile_stands():
    assert table("STANDS") == STANDS
