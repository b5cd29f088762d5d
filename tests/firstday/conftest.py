"""A person on their first day: an account of their own, MalleTrain's wheel in a bare environment,
terminals.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import marked
from tests.bare import plain_variables
from tests.firstday.person import Person

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(scope="module")
def person(installed) -> Iterator[Person]:
    """Somebody with a home of a short path (sockets lie in it), in whose working folder their
    scripts are.
    """
    home = Path(tempfile.mkdtemp(prefix="mt-day-", dir="/tmp"))
    work = home / "work"
    shutil.copytree(SCRIPTS, work, ignore=shutil.ignore_patterns("__pycache__"))
    variables = {**plain_variables(home, installed / "bin"), marked.MARK: str(home)}
    somebody = Person(work, variables)
    try:
        with marked.session(str(home)):
            yield somebody
            somebody.leave()
    finally:
        shutil.rmtree(home, ignore_errors=True)
