"""Fixtures of the integration tests."""

from __future__ import annotations

import pytest

from tests.integration.embedded import site


@pytest.fixture
def embedded(tmp_path):
    """A site of three virtual nodes with a running daemon."""
    with site(tmp_path, nodes=3) as made:
        yield made
