"""Writes the tables of the reference pages from the tables in the code: python docs/_reference.py

A page says where each belongs: between ``<!-- table NAME -->`` and ``<!-- end -->``.
"""

import re
import sys
from pathlib import Path

from malletrain.config.reference import section_tables
from malletrain.protocol import env
from malletrain.protocol.phases import PHASES
from malletrain.rounds.interface import STAGES, RoundStage
from malletrain.rounds.live import LiveRounds
from malletrain.rounds.table import EVENTS, LIVE_TABLE, RESTART_TABLE, RoundEvent
from malletrain.sweep.spec import Sweep

sys.path.append(str(Path(__file__).resolve().parents[1] / "jobscripts" / "federated"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "jobscripts" / "llm"))

from fedcase.rounds import TRANSITIONS as FEDERATED_TRANSITIONS  # isort: skip
from llmserve.replica_life import LIFE_TRANSITIONS  # isort: skip
from llmserve.states import REPLICA_TRANSITIONS, REQUEST_TRANSITIONS  # isort: skip

PAGES = ("reference-states.md", "environment.md", "federated.md", "llm.md", "sweeps.md")
_PLACE = re.compile(r"(<!-- table ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _table(head, rows):
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _first_sentence(function):
    return " ".join(function.__doc__.split()).partition(". ")[0].rstrip(".") + "."


def _names(values):
    return ", ".join(f"`{value}`" for value in values)


def _transitions(rows):
    """A line for each row, with the first sentences of its guard and its steps."""
    lines = []
    for row in rows:
        guard = _first_sentence(getattr(LiveRounds, row.guard)) if row.guard else ""
        steps = [_first_sentence(getattr(LiveRounds, step)) for step in row.steps]
        stages = _names(row.stages) if len(row.stages) < len(RoundStage) else "any"
        does, then = " ".join(steps) or "Nothing.", _names(row.to)
        lines.append((f"`{row.event}`", stages, guard, does, then))
    return _table(("event", "stages", "if", "what happens", "stage afterwards, if another"), lines)


def _rows(table, but=()):
    known = {id(row) for rows in but for row in rows}
    rows = {id(r): r for rows in table.values() for r in rows if id(r) not in known}.values()
    return sorted(rows, key=lambda row: list(EVENTS).index(row.event))


def _picture(table):
    """The stages with those that can follow, and the events at which they do."""
    lines = []
    for stage in RoundStage:
        following = {}
        for event in EVENTS:
            for to in {to for row in table.get((stage, event), ()) for to in row.to}:
                if event not in (RoundEvent.STOPPED, RoundEvent.ENDED):
                    following.setdefault(to, []).append(event)
        for to in (each for each in RoundStage if each in following and each is not stage):
            lines.append((f"`{stage}`", f"`{to}`", _names(following[to])))
    return _table(("from", "to", "at"), lines)


def _next_states(table):
    """The states with those that follow, and the events at which they do."""
    following = {}
    for (state, event), to in table.items():
        following.setdefault((state, to), []).append(event.value)
    lines = [
        (f"`{state}`", f"`{to}`", "; ".join(events)) for (state, to), events in following.items()
    ]
    return _table(("from", "to", "when"), lines)


TABLES = {
    "federated-clients": _next_states(FEDERATED_TRANSITIONS),
    "llm-requests": _next_states(REQUEST_TRANSITIONS),
    "llm-replicas": _next_states(REPLICA_TRANSITIONS),
    "llm-replica-life": _next_states(LIFE_TRANSITIONS),
    "sweep": section_tables(Sweep, "###"),
    "phases": _table(("phase", "what it means"), [(f"`{k}`", v) for k, v in PHASES.items()]),
    "stages": _table(("stage", "what it means"), [(f"`{k}`", v) for k, v in STAGES.items()]),
    "events": _table(("event", "what it means"), [(f"`{k}`", v) for k, v in EVENTS.items()]),
    "picture": _picture(LIVE_TABLE),
    "restart": _transitions(_rows(RESTART_TABLE)),
    "live": _transitions(_rows(LIVE_TABLE, but=RESTART_TABLE.values())),
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
