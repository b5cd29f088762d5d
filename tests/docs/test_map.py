"""The commands of docs/map.md, as a user with a daemon types them."""

from __future__ import annotations

import os
import sys

import pytest

from tests.bare import ROOT
from tests.docs.console import session
from tests.integration.embedded import site

pytestmark = pytest.mark.slow
PAGE = (ROOT / "docs" / "map.md").read_text("utf-8")


def test_the_page_as_it_stands(tmp_path):
    with site(tmp_path / "site") as standing:
        folder = os.path.dirname(sys.executable)
        variables = {
            **os.environ,
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            "MALLETRAIN_STATE_DIR": str(standing.state),
            "COLUMNS": "120",
        }
        home = tmp_path / "home"
        home.mkdir()
        with session(variables, home) as shell:
            assert shell.page(PAGE) >= 14
