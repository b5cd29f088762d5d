"""Threads of the workers of real jobs: in each mode, as forks of a warm interpreter and as new
processes.
"""

from __future__ import annotations

import pytest

from malletrain.launch.cores import allowed_cores
from tests.integration.embedded import site

NOTE = """
import os, sys, torch, malletrain
if len(sys.argv) > 1:
    torch.set_num_threads(int(sys.argv[1]))
name = "threads-" + os.environ["MALLETRAIN_JOB"] + "-" + os.environ["LOCAL_RANK"]
with open(name, "w") as file:
    file.write(str(torch.get_num_threads()))
malletrain.report(1)
"""
LIVE = (
    NOTE
    + """
from malletrain import elastic
model = torch.nn.Linear(1, 1)
run = elastic.Run(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
"""
)
DEFAULT = max(1, allowed_cores() // 2)
EACH_MODE = (
    ("restart", (), {"OMP_NUM_THREADS": "5"}, 5),
    ("live", (), {}, DEFAULT),
)
FURTHER = (
    ("restart", (), {}, DEFAULT),
    ("restart", (), {"MALLETRAIN_PRELOAD": "0"}, DEFAULT),
    ("restart", ("3",), {}, 3),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(EACH_MODE, id="each mode"),
        pytest.param(FURTHER, id="further", marks=pytest.mark.thorough),
    ],
)
def test_threads_are_the_cores_by_the_processes_and_what_a_user_says_counts(tmp_path, cases):
    pytest.importorskip("torch")
    with site(tmp_path / "site", nodes=1) as embedded:
        scripts = {
            "restart": embedded.script("note.py", NOTE),
            "live": embedded.script("note_live.py", LIVE),
        }
        for mode, arguments, env, threads in cases:
            job = embedded.submit(
                scripts[mode],
                *arguments,
                nproc_per_node=2,
                env=env,
                mode=mode,
                profile=False,
            )
            embedded.until_state(job, "completed", "failed")
            notes = sorted(embedded.work.glob(f"threads-{job}-*"))
            assert [note.name[-1] for note in notes] == ["0", "1"], (mode, env)
            assert {note.read_text() for note in notes} == {str(threads)}, (mode, arguments, env)
