"""The end of a script in live mode: a job whose processes have ended well has all its results,
whichever process is lost while they are written.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from malletrain.protocol.phases import RESTART_CODE
from tests.malletrain.elastic import end_scripts
from tests.malletrain.elastic.conductor import Conductor, conducted


def results(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("result-*")}


def wrote(c: Conductor, folder: Path, number: int) -> None:
    worker = c.workers[number]
    path = folder / f"wrote-{worker.process.pid}"
    c.until(path.exists, f"worker {number} has written its results")


def writing(c: Conductor, folder: Path, rank: int) -> None:
    path = folder / f"result-{rank}"
    c.until(lambda: path.exists() and path.read_text() != "", f"rank {rank} writes its results")


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_lost_while_it_writes_has_the_others_start_again(tmp_path, lost):
    with conducted(tmp_path, end_scripts.train, str(tmp_path), {lost: "go"}) as c:
        members = c.start(3)
        c.round(members)
        writing(c, tmp_path, lost)
        for number in {0, 1, 2} - {lost}:
            wrote(c, tmp_path, number)
        survivors = c.lose(members[lost])
        c.round(survivors, wait=False)
        c.until(lambda: not any(w.alive for w in survivors), "the others end")
        assert [w.process.exitcode for w in survivors] == [RESTART_CODE] * 2, c.outputs()
        assert "has not written all of its results" in survivors[0].output.read_text()
        (tmp_path / "go").touch()
        c.round(c.start(2))
        c.finish()
    ranks = {0, 1, lost}
    assert results(tmp_path).items() >= {f"result-{r}": "first\nsecond\n" for r in ranks}.items()


def test_a_rank_lost_after_the_end_of_its_script_is_not_missed(tmp_path):
    with conducted(tmp_path, end_scripts.train, str(tmp_path), {0: "go"}) as c:
        members = c.start(2)
        c.round(members)
        writing(c, tmp_path, 0)
        c.until(lambda: c.script_ends() == 1, "rank 1 is at the end of its script")
        survivors = c.lose(members[1])
        c.round(survivors, wait=False)
        (tmp_path / "go").touch()
        c.finish()
    assert results(tmp_path) == {"result-0": "first\nsecond\n", "result-1": "first\nsecond\n"}
