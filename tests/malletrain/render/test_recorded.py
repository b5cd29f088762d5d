"""What people see, recorded: every table and the live screen at four widths, with forty jobs.

Look at the files under ``recorded/`` as a user would. After a wanted change they are made anew with
``MALLETRAIN_RECORD=1 pytest tests/malletrain/render/test_recorded.py``, and read again.
"""

import io
import os
import re
import time
from pathlib import Path

import pytest
from rich.cells import cell_len

from malletrain.render.columns import console
from tests.malletrain.render.forty import PICTURES, jobs

RECORDED = Path(__file__).parent / "recorded"
WIDTHS = (60, 80, 100, 200)


@pytest.fixture(autouse=True)
def clock_of_greenwich(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def printed(name, width):
    """What stands on a terminal of this width."""
    terminal = console(io.StringIO())
    terminal.width = width
    more = {"height": 24} if name == "top" else {}
    terminal.print(PICTURES[name](width), **more)
    return "".join(f"{line.rstrip()}\n" for line in terminal.file.getvalue().splitlines())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PICTURES)
def test_as_recorded(name, width):
    path = RECORDED / f"{name}-{width}.txt"
    text = printed(name, width)
    if os.environ.get("MALLETRAIN_RECORD"):
        RECORDED.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("width", [*WIDTHS, 40, 61, 79, 81, 93, 121])
@pytest.mark.parametrize("name", PICTURES)
def test_no_line_is_wider_than_the_terminal(name, width):
    assert max(cell_len(line) for line in printed(name, width).splitlines()) <= width


@pytest.mark.parametrize("width", range(40, 140))
def test_numbers_and_ids_of_jobs_are_whole(width):
    """A column that is shown has for every job what it has on the widest terminal."""
    heads = {"SAMPLES": lambda j: f"{j.samples:,.0f}", "NODES": lambda j: str(len(j.nodes)),
             "RESCALES": lambda j: str(j.rescales), "STATE": lambda j: j.state}  # fmt: skip
    lines = printed("status", width).splitlines()
    head = next(line for line in lines if line.startswith("JOB"))
    rows = [line for line in lines if re.match(r"j\d", line)]
    assert [row.split()[0] for row in rows] == [j.id for j in jobs()]
    for name, value in heads.items():
        if name in head.split():
            end = head.index(name) + len(name)
            begin = head.index(name) if name == "STATE" else 0
            for row, j in zip(rows, jobs(), strict=True):
                cell = row[begin:].split()[0] if name == "STATE" else row[:end].split()[-1]
                assert cell == value(j), (name, row)


@pytest.mark.parametrize("width", WIDTHS)
def test_reasons_are_whole(width):
    text = " ".join(printed("status", width).split())
    for reason in {j.reason for j in jobs() if j.reason}:
        assert reason in text


@pytest.mark.parametrize("width", WIDTHS)
def test_the_live_screen_shows_what_runs_before_what_waits(width):
    rows = re.findall(r"^j(\d+) .* (running|suspended|queued)", printed("top", width), re.M)
    assert [int(k) for k, _ in rows][:10] == list(range(28, 38))
    assert "queued" not in [state for _, state in rows]
    assert re.search(r"… and \d+ more: (1 suspended, )?20 queued", printed("top", width))
