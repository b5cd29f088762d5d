"""Mistakes that everybody makes on their first day: each ends in a sentence that says what was
wrong and names the mend.
"""

from __future__ import annotations

import pytest

from tests.selection import every_change

AT_SUBMISSION = {
    "a wrong path": ("fashin.py", ["no script", "fashin.py", "give the path of a Python file"]),
    "no nodes": ("--nodes 0:4 fashion.py", ["0 nodes at least", "1 <= MIN <= MAX"]),
    "nodes the wrong way round": (
        "--nodes 4:2 fashion.py",
        ["maximum below its minimum", "1 <= MIN <= MAX"],
    ),
    "a syntax error": ("syntax.py", ["syntax error in line 2", "mend it and submit it again"]),
    "a shell script": ("job.sh", ["is a shell script", "submit the Python script itself"]),
    "a name like an id": (
        "--name j1 fashion.py",
        ["looks like the id of a job", "choose another name"],
    ),
    "a service without value": ("--service fashion.py", ["--value FILE"]),
}
"""Mistakes reported at once: the rest of ``malletrain submit``, and words of the sentence."""

UNSAVED = """\
import pathlib, time
import malletrain

while not pathlib.Path("enough").exists():
    time.sleep(0.02)
    malletrain.report(1)
"""
HELD = """\
    snapshot.restore()
    import time
    open(f"begun-{args.lr}", "w").close()
    while os.path.exists(f"hold-{args.lr}"):
        time.sleep(0.02)
"""
"""A script that has looked for a snapshot goes on when it is let."""
SCRIPTS = {
    "syntax.py": "import torch\nfor epoch in range(3)\n    train()\n",
    "job.sh": "#!/bin/bash\npython fashion.py\n",
    "unsaved.py": UNSAVED,
    "missing.py": "import torchvison\n",
    "memory.py": "import os\nprint('epoch 1', flush=True)\nos.kill(os.getpid(), 9)\n",
}

ON_THE_NODE = {
    "argument": (
        "fashion.py --epoch",
        ["fashion.py: error: argument --epochs: expected one argument"],
    ),
    "package": ("missing.py", ["No module named 'torchvison'", "pip install"]),
    "sampled": ("sampled.py", ["Write DataLoader(dataset, batch_sampler=sampler)"]),
    "indivisible": (
        "--nodes 1:3 fashion.py --batch 2",
        ["a global batch of 2 samples cannot be shared by the 3 ranks", "Raise global_batch_size"],
    ),
    "not-live": (
        "--live fashion.py",
        ["does not use malletrain.elastic"],
    ),
    "memory": ("memory.py", ["was killed by signal 9", "out of memory"]),
}
"""What is known only where the script runs: by name of the job, what follows its ``--name``, and
what ``malletrain show`` has.
"""


EVERY_CHANGE = ("argument", "sampled", "memory")
"""A mistake of the command line, one of the script, and one of the machine."""


@pytest.fixture(scope="module")
def student(request, person):
    """A user with a daemon who has made all the mistakes that this run has a test of."""
    mistakes = {
        item.callspec.params.get("mistake")
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    for name, text in SCRIPTS.items():
        person.writes(name, text)
    fashion = (person.work / "fashion.py").read_text()
    person.writes("sampled.py", fashion.replace("batch_sampler=sampler", "sampler=sampler"))
    swept = fashion.replace("Snapshot(", 'Snapshot("run.pt", ')
    person.writes("swept.py", swept.replace("    snapshot.restore()\n", HELD, 1))
    person.writes("go", "")
    person.starts_a_daemon(tries=1)
    for name in ON_THE_NODE.keys() & mistakes:
        rest, _ = ON_THE_NODE[name]
        output = person.types(f"malletrain submit --no-profile --name {name} {rest}")
        assert output.status == 0, output.text
    return person


@pytest.mark.parametrize("mistake", AT_SUBMISSION)
def test_told_at_submission(student, mistake):
    command, words = AT_SUBMISSION[mistake]
    output = student.types(f"malletrain submit {command}")
    assert output.status == 2
    assert len(output.lines) == 1, output.lines
    for word in words:
        assert word in output.text


@pytest.mark.parametrize("mistake", every_change(ON_THE_NODE, *EVERY_CHANGE))
def test_told_by_the_job(student, mistake):
    _, words = ON_THE_NODE[mistake]
    assert student.types(f"malletrain wait {mistake}").status == 1
    output = student.types(f"malletrain show {mistake}")
    assert output.status == 0
    reason = output.text.partition("Script ")[0]
    for word in words:
        assert word in reason


@pytest.mark.thorough
def test_two_jobs_with_one_snapshot(student):
    holds = [student.work / f"hold-{rate}" for rate in ("0.1", "0.2")]
    for hold in holds:
        hold.touch()
    first = student.types("malletrain submit --name first swept.py --epochs 1 --lr 0.1")
    assert first.status == 0
    assert "Warning" not in first.text
    second = student.types("malletrain submit --name second swept.py --epochs 1 --lr 0.2")
    assert second.status == 0
    assert "(first) is not finished and saves to the same snapshot" in second.text
    assert "Give it another path, or none" in second.text
    # They start side by side and find no snapshot: it belongs to the one that saves first, and the
    # other one ends instead of training for nothing.
    begun = [student.work / f"begun-{rate}" for rate in ("0.1", "0.2")]
    student.until(lambda: all(path.exists() for path in begun), "both have begun")
    states = []
    for hold, name in zip(holds, ("first", "second"), strict=True):
        hold.unlink()
        states.append(student.until_ended(name).state)
    assert states == ["completed", "failed"]
    # The snapshot itself reports it to a job that comes later.
    student.types("malletrain submit --name third swept.py --epochs 1 --lr 0.3")
    assert student.until_ended("third").state == "failed"
    reason = student.types("malletrain show third").text.partition("Script ")[0]
    assert "belongs to job" in reason


def test_no_snapshot(student):
    student.types("malletrain submit --no-profile --nodes 1:3 unsaved.py")
    student.until(lambda: student.job("unsaved").samples > 0, "it trains")
    student.types("malletrain submit --weight 10 --name urgent unsaved.py")
    student.until(lambda: student.notices("unsaved"), "it is told")
    output = student.types("malletrain show unsaved")
    assert "The script keeps no snapshot: the job started from the beginning" in output.text
    assert "Add malletrain.Snapshot to it (docs/training-scripts.md)" in output.text


def test_options_after_the_script(student):
    output = student.types("malletrain submit --name late unsaved.py --nodes 1:2")
    assert output.status == 0
    assert "are passed to the script, because they stand after it: --nodes" in output.text
    assert "Put options of MalleTrain before unsaved.py" in output.text
