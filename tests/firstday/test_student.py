"""A student's first day: her own script on a daemon of her own, after README and quickstart."""

from __future__ import annotations

import json
import re

import pytest


@pytest.fixture(scope="module")
def student(person):
    return person


def records(student, name):
    return [json.loads(line) for line in (student.work / name).read_text().splitlines()]


def test_a_first_day(student):
    output = student.types("malletrain submit fashion.py")
    assert output.status == 1
    assert "No daemon is running" in output.text
    assert "Start one with: malletrain daemon --config FILE" in output.text

    student.writes("typo.toml", '[scheduler]\nkind = "local"\n\n[scheduler.local]\nnode = 4\n')
    output = student.types("malletrain check --config typo.toml")
    assert output.status == 1
    assert "line 5" in output.text
    assert "nodes" in output.text

    daemon = student.starts_a_daemon()
    output = student.types("malletrain check --config local.toml")
    assert output.status == 0, output.text
    assert "would not work" not in output.text

    # Her training grows to all nodes, makes room for two urgent ones, and grows again.
    output = student.types("malletrain submit --no-profile --nodes 1:3 fashion.py --epochs 4")
    assert output.status == 0, output.text
    assert "Submitted fashion as job j1. Follow it with: malletrain logs fashion -f" in output.text
    follower = student.terminal()
    follower.start("malletrain logs fashion -f")
    student.until_it_trains_on("j1", 3)
    for number, lr in enumerate(("0.1", "0.2"), 1):
        one_more = f"--weight 10 --name lr-{lr} fashion.py --lr {lr} --record lr-{lr}.jsonl"
        assert student.types(f"malletrain submit {one_more}").status == 0
        student.until_it_trains_on("j1", 3 - number)
    output = student.types("malletrain status")
    assert output.status == 0
    for name in ("fashion", "lr-0.1", "lr-0.2"):
        assert name in output.text

    top = student.terminal(columns=80, rows=24)
    top.start("malletrain top")
    top.shows("fashion")
    top.press("q")
    assert top.ended().status == 0

    output = student.types("malletrain cancel lr-0.1 lr-0.2")
    assert output.status == 0
    assert output.text == "Job j2 (lr-0.1) is cancelled. Job j3 (lr-0.2) is cancelled."
    assert student.types("malletrain wait lr-0.1").status == 3, "it was cancelled"
    student.until_it_trains_on("j1", 3)
    student.writes("go", "")
    assert student.types("malletrain wait fashion").status == 0
    assert student.until_ended("j1").state == "completed"

    followed = follower.ended()
    assert followed.status == 0
    for epoch in range(1, 5):
        assert f"epoch {epoch} of 4 done" in followed.text

    output = student.types("malletrain show fashion")
    assert output.status == 0
    assert "completed" in output.text
    assert "accuracy" in output.text

    exactly_once_and_as_alone(student, followed.text)

    output = student.types("malletrain cancel fashion")
    assert output.status == 1
    assert output.text == "Job j1 is completed already."
    daemon.press("^C")
    assert daemon.ended().status in (0, 130)
    assert student.types("malletrain status").status == 1


def exactly_once_and_as_alone(student, followed):
    """She trained on each sample once an epoch, on 1, 2 and 3 nodes, and has the model of a run
    without MalleTrain.
    """
    steps = records(student, "record.jsonl")
    assert {step["ranks"] for step in steps} == {1, 2, 3}
    for epoch in range(4):
        seen = [i for step in steps if step["epoch"] == epoch for i in step["samples"]]
        assert sorted(seen) == list(range(250)), f"epoch {epoch}"
    alone = student.types("python fashion.py --epochs 4 --record alone.jsonl")
    assert alone.status == 0, alone.text
    result = re.compile(r"final accuracy (\S+) loss (\S+)")
    (mine,), (theirs,) = result.findall(followed), result.findall(alone.text)
    assert mine[0] == theirs[0]
    assert float(mine[1]) == pytest.approx(float(theirs[1]), rel=1e-4)
