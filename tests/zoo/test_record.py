"""Recorded outcomes of the zoo."""

from __future__ import annotations

from tests.zoo import record
from tests.zoo.cases import Outcome
from tests.zoo.pool import Part
from tests.zoo.record import RecordFile

PART = Part("restart/epoch_scheduler", "grow", "", 1, 0)
OUTCOMES = [Outcome(PART.script, PART.change, "step 0 0", 2, ("is lost",), boundaries=3)]


def test_outcomes_of_the_same_code_are_kept(tmp_path):
    RecordFile(tmp_path / "record").add(PART, OUTCOMES)
    later = RecordFile(tmp_path / "record")
    assert later.outcomes(PART) == OUTCOMES
    assert later.outcomes(Part(PART.script, "shrink", "", 1, 0)) is None


def test_outcomes_of_other_code_do_not_count(tmp_path, monkeypatch):
    RecordFile(tmp_path / "record").add(PART, OUTCOMES)
    monkeypatch.setattr(record, "code_of", lambda script: "another")
    assert RecordFile(tmp_path / "record").outcomes(PART) is None


def test_a_script_that_others_import_is_code(tmp_path, monkeypatch):
    script = tmp_path / "tests" / "zoo" / "scripts" / "plain.py"
    script.parent.mkdir(parents=True)
    monkeypatch.setattr(record, "_ROOT", tmp_path)
    digests = set()
    for text in ("STEPS = 4", "STEPS = 5"):
        script.write_text(text)
        digests.add(record.common_code.__wrapped__())
    assert len(digests) == 2


def test_a_part_of_some_boundaries_is_not_recorded(tmp_path):
    RecordFile(tmp_path / "record").add(Part(PART.script, "grow", "saved", 1, 0), OUTCOMES)
    assert not (tmp_path / "record").exists()


def test_a_line_that_is_unfinished_does_not_count(tmp_path):
    path = tmp_path / "record"
    RecordFile(path).add(PART, OUTCOMES)
    path.write_bytes(path.read_bytes() + b'{"key": ["restart/')
    assert RecordFile(path).outcomes(PART) == OUTCOMES
