from pathlib import Path

import pytest

from tests import everything

TESTS = """
import pytest

def test_good():
    pass

def test_bad():
    assert False

@pytest.mark.parametrize("n", [1, 2])
def test_skipped(n):
    pytest.skip("no node has it")

@pytest.fixture
def broken():
    raise OSError

def test_error(broken):
    pass
"""


def test_a_part_is_shown_with_its_tests_and_why_some_were_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_sample.py").write_text(TESTS)
    command = ("pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path))
    monkeypatch.setitem(everything.PARTS, "sample", command)
    monkeypatch.setitem(everything.PARTS, "module", ("platform",))
    outcomes = [everything.run(part, tmp_path) for part in ("sample", "module")]
    assert [each.ok for each in outcomes] == [False, True]
    assert outcomes[0].counts == {"passed": 1, "failed": 2, "skipped": 2}
    [header, sample, module, reason] = everything.table(outcomes).splitlines()
    assert header.split()[3:] == ["passed", "failed", "skipped"]
    assert sample.split()[:2] == ["sample", "FAILED"]
    assert sample.split()[3:] == ["1", "2", "2"]
    assert module.split()[3:] == ["-", "-", "-"]
    assert reason == "sample: 2 skipped: no node has it"


def test_a_part_has_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_sample.py").write_text(
        'import os\n\ndef test_it():\n    assert os.environ["COLOUR"] == "red"\n'
    )
    command = ("pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path))
    monkeypatch.setitem(everything.PARTS, "sample", command)
    assert not everything.run("sample", tmp_path).ok
    monkeypatch.setitem(everything.ENVIRONMENT, "sample", {"COLOUR": "red"})
    assert everything.run("sample", tmp_path).ok


def test_an_unknown_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        everything.main(["sutie"])
    assert "no part sutie; there are lint, suite" in capsys.readouterr().err
