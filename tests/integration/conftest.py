"""Fixtures of the integration tests."""

from __future__ import annotations

import pytest

from tests.integration.embedded import site


@pytest.fixture
def embedded(tmp_path):
    """A site of three virtual nodes with a running daemon."""
    with site(tmp_path, nodes=3) as made:
        yield made


@pytest.fixture(scope="module")
def standing(tmp_path_factory):
    """Such a site for the tests of a module, one after another. Their scripts make no optimizer."""
    with site(tmp_path_factory.mktemp("standing"), nodes=3, light=True) as made:
        yield made


@pytest.fixture
def shared(standing, request):
    """The module's site as a test finds it: no job, no node in use, nothing that has happened."""
    standing.begin(f"work-{request.node.name}")
    yield standing
    standing.clear()
