"""Outcomes that stay valid: a file with a line for each part, so that a later start of the driver
runs only what the file does not have for the same code.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path

from tests.zoo.cases import Outcome, Script
from tests.zoo.catalogue import SCRIPTS
from tests.zoo.pool import Part

_ROOT = Path(__file__).parents[2]
_CODE = (
    *("malletrain/*.py", "malletrain/elastic/**/*.py", "malletrain/integrations/*.py"),
    *("malletrain/launch/*.py", "malletrain/memory/*.py", "malletrain/protocol/*.py"),
    *("malletrain/training/**/*.py", "tests/*.py", "tests/malletrain/elastic/conductor.py"),
    *("tests/zoo/[a-z]*.py", "tests/zoo/scripts/*.py"),
)
"""What a case may run. Scripts import one another."""
_NEUTRAL = ("__main__.py", "catalogue.py", "known_failures.py", "pool.py", "record.py")
"""Files of the zoo on which no outcome depends."""


@cache
def common_code() -> bytes:
    """Return a digest of the code that the cases of all scripts share."""
    digest = hashlib.sha256(sys.version.encode())
    digest.update(importlib.metadata.version("torch").encode())
    paths = sorted({path for pattern in _CODE for path in _ROOT.glob(pattern)})
    zoo = Path(__file__).parent
    for path in paths:
        if path.parent == zoo and (path.name in _NEUTRAL or path.name.startswith("test_")):
            continue
        digest.update(str(path.relative_to(_ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.digest()


@cache
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def code_of(script: Script) -> str:
    """A digest of the code that decides how the cases of ``script`` end."""
    digest = hashlib.sha256(common_code() + repr(script).encode())
    for package in script.needs.split():
        for distribution in _distributions().get(package, ()):
            digest.update(importlib.metadata.version(distribution).encode())
    return digest.hexdigest()[:16]


class RecordFile:
    """A file of outcomes, to which several processes may append.

    Args:
        path: of the file, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
        # The last line of a driver that was killed may be unfinished.
        lines = [json.loads(line) for line in whole.splitlines()]
        self._recorded = {tuple(line["key"]): line["outcomes"] for line in lines}

    def add(self, part: Part, outcomes: list[Outcome]) -> None:
        """Append the outcomes of ``part`` if it is all boundaries of its change."""
        if not part.is_whole:
            return
        line = {"key": _key(part), "outcomes": [asdict(outcome) for outcome in outcomes]}
        with self._path.open("ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")

    def outcomes(self, part: Part) -> list[Outcome] | None:
        """The recorded outcomes of ``part`` with the present code; None if there are none."""
        recorded = self._recorded.get(tuple(_key(part))) if part.is_whole else None
        if recorded is None:
            return None
        return [Outcome(**{**one, "problems": tuple(one["problems"])}) for one in recorded]


def _key(part: Part) -> list[str | bool]:
    return [part.script, part.change, part.each, code_of(SCRIPTS[part.script])]
