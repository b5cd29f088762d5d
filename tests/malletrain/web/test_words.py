"""The words of the page are those of the command line."""

from __future__ import annotations

import re
from pathlib import Path

from malletrain import web
from malletrain.render.scaling import STANDS

WORDS = Path(web.__file__).parent / "static" / "words.js"


def table(name):
    """A table of words.js."""
    found = re.search(rf"export const {name} = {{(.*?)}};", WORDS.read_text(), re.DOTALL)
    assert found
    return dict(re.findall(r'^  (\w+): "(.*)",$', found[1], re.MULTILINE))


def test_how_a_profile_stands():
    assert table("STANDS") == STANDS
