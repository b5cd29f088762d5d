"""Numbers in sentences."""

from __future__ import annotations

import pytest

from malletrain.protocol.counting import counted


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 nodes"), (1, "1 node"), (2, "2 nodes"), (12000, "12,000 nodes")]
)
def test_a_noun_has_its_plural_unless_there_is_one(number, text):
    assert counted(number, "node") == text
