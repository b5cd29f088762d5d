"""The pictures in the docs are those that the code draws."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.state_pictures import PICTURES, picture

IMAGES = Path(__file__).parents[2] / "docs" / "images"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_the_one_drawn_now(name):
    assert (IMAGES / name).read_text() == picture(*PICTURES[name]), (
        f"Run python -m benchmarks.state_pictures docs/images: {name} is an older one."
    )


def test_the_pale_pieces_are_the_share_that_moves():
    drawn = ElementTree.fromstring(picture(4, 6))
    bars = [r for r in drawn.iter("{http://www.w3.org/2000/svg}rect") if "fill-opacity" in r.attrib]
    pale = [float(r.attrib["width"]) for r in bars if r.attrib["fill-opacity"] == "0.3"]
    assert sum(pale) / 600 == pytest.approx(0.75 + 1 / 3, abs=0.002)
