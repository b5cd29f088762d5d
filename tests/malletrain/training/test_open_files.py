"""Files that a script keeps open have what was written before a snapshot, also where the process is
killed after it.
"""

from __future__ import annotations

import io
import os
import tempfile

import pytest

from malletrain.training import drain
from tests.malletrain import forked_programs

pytestmark = pytest.mark.slow

SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
import malletrain
how, folder = sys.argv[1:]
model = torch.nn.Linear(2, 1)
sampler = malletrain.ElasticSampler(64, global_batch_size=16)
snapshot = malletrain.Snapshot(Path(folder, "run.pt"), every_s=0.0, model=model, sampler=sampler)
snapshot.restore()
log = open(Path(folder, "log.csv"), "w")
for number, batch in enumerate(sampler):
    log.write(f"{number}\\n")
    sampler.advance()
    if how == "step":
        snapshot.step()
    if number == 1:
        if how == "save":
            snapshot.save()
        log.write("after the snapshot")
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["step", "save"])
def test_rows_of_before_a_snapshot_are_stored_with_it(tmp_path, how):
    ended = forked_programs.run(SCRIPT, how, str(tmp_path), folder=tmp_path)
    assert ended.code == -9, ended.errors
    assert (tmp_path / "log.csv").read_text() == "0\n1\n"


@pytest.mark.parametrize("mode", ["w", "a", "wb", "r+b"])
def test_files_of_all_kinds_are_written_out(tmp_path, mode):
    path = tmp_path / "rows"
    path.touch()
    with path.open(mode) as file:
        file.write(b"row" if "b" in mode else "row")
        assert path.read_bytes() == b""
        drain.flush()
        assert path.read_bytes() == b"row"


class Rows(io.TextIOWrapper):
    """A kind of files of the script's own."""


def test_files_of_a_kind_that_the_script_has_made_are_written_out(tmp_path):
    with Rows((tmp_path / "rows").open("wb")) as file:
        file.write("row")
        drain.flush()
        assert (tmp_path / "rows").read_bytes() == b"row"


def test_a_file_without_a_name_is_left_alone():
    with tempfile.TemporaryFile() as file:
        file.write(b"row")
        drain.flush()
        assert os.fstat(file.fileno()).st_size == 0


def test_a_pipe_is_left_alone_whose_reader_may_not_read():
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    with open(reader, "rb", buffering=0) as end, open(writer, "wb") as file:
        file.write(b"row")
        drain.flush()
        assert end.read() is None
        file.flush()
        assert end.read() == b"row"


def test_files_are_flushed_at_each_step_and_new_ones_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(drain, "LOOK_S", 0.0)
    flush, rows = drain.StepFlush(), [tmp_path / "first", tmp_path / "second"]
    with rows[0].open("w") as first, rows[1].open("w") as second:
        for text in ("x", "xy"):
            first.write(text[-1])
            flush.after_step()
            assert rows[0].read_text() == text
        second.write("row")
        flush.after_step()
        assert rows[1].read_text() == "row"
    flush.after_step()


def test_files_are_not_looked_for_at_each_step(tmp_path, monkeypatch):
    looks = []
    monkeypatch.setattr(drain, "LOOK_S", 1e9)
    monkeypatch.setattr(drain, "_written_files", lambda: looks.append(1) or {})
    flush = drain.StepFlush()
    for _ in range(100):
        flush.after_step()
    assert len(looks) == 1
