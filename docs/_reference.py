"""Writes the tables of the reference pages from the tables in the code: python docs/_reference.py

A page says where each belongs: between ``<!-- table NAME -->`` and ``<!-- end -->``.
"""

import re
from pathlib import Path

from malletrain.config.reference import section_tables
from malletrain.protocol import env
from malletrain.protocol.phases import PHASES
from malletrain.rounds.interface import STAGES
from malletrain.sweep.spec import Sweep

PAGES = ("reference-states.md", "environment.md", "sweeps.md")
_PLACE = re.compile(r"(<!-- table ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _table(head, rows):
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


TABLES = {
    "sweep": section_tables(Sweep, "###"),
    "phases": _table(("phase", "what it means"), [(f"`{k}`", v) for k, v in PHASES.items()]),
    "stages": _table(("stage", "what it means"), [(f"`{k}`", v) for k, v in STAGES.items()]),
    "environment": _table(
        ("variable", "what it means", "set by", "read by"),
        [(f"`{name}`", *rest) for name, *rest in env.TABLE],
    ),
}


def rendered(page):
    """The text of a page with its tables as the code has them now."""
    return _PLACE.sub(lambda m: m[1] + "\n" + TABLES[m[2]] + "\n" + m[3], page)


if __name__ == "__main__":
    for name in PAGES:
        path = Path(__file__).with_name(name)
        path.write_text(rendered(path.read_text()))
