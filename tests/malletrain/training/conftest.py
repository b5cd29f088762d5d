"""What the tests of the training side share."""

import pytest

from malletrain.training import report


@pytest.fixture(autouse=True)
def _sentences_are_printed_again():
    """A sentence that is printed once in a process is printed once in each test."""
    report.sentence_keys.clear()
