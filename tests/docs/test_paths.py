"""What the pages name is there: files of the tree, and links between pages."""

from __future__ import annotations

import re

import pytest

from scavenger.batch.scavenger import BatchScavenger
from tests.bare import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("jobscripts/*/*.md")])
PLACE = re.compile(
    r"`((?:malletrain|scavenger|allocator|jpa|tests|benchmarks|jobscripts|site-configs|docs)"
    r"/[\w./*-]*)`"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_exists(page):
    named = PLACE.findall(page.read_text("utf-8"))
    missing = [name for name in named if not (any(ROOT.glob(name.rstrip("/"))))]
    assert not missing, f"{page.name} names {', '.join(missing)}; say where it is now."


def test_the_places_that_a_newcomer_looks_for_are_named():
    """A search by file name alone finds the answer on the page for newcomers."""
    page = (ROOT / "docs" / "development.md").read_text("utf-8")
    for topic in ("preemption notice", "lease is chosen", "bid is made", "worker is stopped"):
        (line,) = [line for line in page.splitlines() if line.startswith("| ") and topic in line]
        assert PLACE.search(line)


def test_the_methods_that_a_new_scheduler_defines_exist():
    """All abstract ones are named, and no other than those of the class."""
    page = (ROOT / "docs" / "new-scheduler.md").read_text("utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    named = set(re.findall(r"`(_\w+)`", "\n".join(rows)))
    assert named <= set(dir(BatchScavenger))
    abstract = {name for name in BatchScavenger.__abstractmethods__ if name.startswith("_")}
    assert abstract <= named
