"""The reference pages of the docs say what the tables in the code say."""

import re
import runpy
from pathlib import Path

import pytest

import malletrain
from malletrain.launch import entry
from malletrain.protocol import env
from malletrain.protocol.phases import PHASES, AssignmentPhase
from malletrain.rounds.interface import STAGES, RoundStage

DOCS = Path(__file__).parents[3] / "docs"
REFERENCE = runpy.run_path(str(DOCS / "_reference.py"))


@pytest.mark.parametrize("page", REFERENCE["PAGES"])
def test_a_page_is_up_to_date(page):
    text = (DOCS / page).read_text()
    assert text == REFERENCE["rendered"](text), "run: python docs/_reference.py"


def test_the_tables_are_complete():
    assert list(PHASES) == list(AssignmentPhase)
    assert list(STAGES) == list(RoundStage)
    names = {v for k, v in vars(env).items() if k.isupper() and isinstance(v, str)}
    assert names == {name for name, *_ in env.TABLE}


def test_no_other_file_spells_a_variable():
    """Except in texts for people, and where nothing can be imported: in ``malletrain/__init__``,
    and in the entry of launchers, which runs before it is known that there is a malletrain.
    """
    spelled = re.compile(r'"MALLETRAIN_[A-Z_]+"')
    room = Path(malletrain.__file__).parent
    files = {
        str(path.relative_to(room))
        for path in room.rglob("*.py")
        if spelled.search(path.read_text())
    }
    assert files == {"__init__.py", "protocol/env.py", "launch/entry.py"}
    assert entry.UMASK == env.UMASK
