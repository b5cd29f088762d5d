"""Variables of the workers, round after round, by table."""

import os

import pytest

from malletrain.launch import restart
from malletrain.launch.cores import allowed_cores
from malletrain.launch.worker_variables import WorkerVariables
from malletrain.protocol import env
from malletrain.protocol.launcher_channel import LaunchOrder
from malletrain.protocol.payloads import JobSpec, RoundLayout

CORES = str(allowed_cores())
CHOSEN = {"OMP_NUM_THREADS": CORES, "MALLETRAIN_THREADS": CORES}
"""Variables if the job names no number of threads."""


@pytest.mark.parametrize(
    ("before", "layouts", "after"),
    [
        ({}, [RoundLayout(1)], CHOSEN),
        # What an earlier round set is not the user's.
        ({}, [RoundLayout(10_000 // 4), RoundLayout(1)], CHOSEN),
        ({}, [RoundLayout(1), RoundLayout(2, 3)], {"OMP_NUM_THREADS": "3"}),
        ({"OMP_NUM_THREADS": "7"}, [RoundLayout(2), RoundLayout(1)], {"OMP_NUM_THREADS": "7"}),
        ({"OMP_NUM_THREADS": "7"}, [RoundLayout(2, 3)], {"OMP_NUM_THREADS": "3"}),
        (
            {},
            [RoundLayout(2, 1, 4)],
            {"OMP_NUM_THREADS": "1", "MALLETRAIN_LOADER_WORKERS": "4"},
        ),
        ({}, [RoundLayout(2, 1, 4), RoundLayout(2, 1)], {"OMP_NUM_THREADS": "1"}),
    ],
)
def test_each_round_has_the_variables_of_its_layout(before, layouts, after):
    environment = dict(before)
    variables = WorkerVariables(environment)
    for layout in layouts:
        variables.set(layout)
    assert environment == after


def test_a_measured_number_of_threads_is_named_as_malletrains():
    """As --threads auto has it, from the search and after it."""
    environment: dict[str, str] = {}
    variables = WorkerVariables(environment, tunes_threads=True)
    for threads in (3, 2):
        variables.set(RoundLayout(2, threads))
        assert environment == {
            "OMP_NUM_THREADS": str(threads),
            "MALLETRAIN_THREADS": str(threads),
        }


@pytest.mark.parametrize(("tuned", "named"), [(("threads",), "3"), ((), None)])
def test_a_launcher_knows_whether_the_number_of_threads_is_measured(monkeypatch, tuned, named):
    launched = []

    class Launcher:
        def __init__(self, order, command, variables, samples):
            launched.append(variables)

        def run(self):
            return 0

    monkeypatch.setattr(restart.live, "LiveLauncher", Launcher)
    monkeypatch.delenv(env.DATA, raising=False)
    for name in CHOSEN:
        monkeypatch.setenv(name, "")
    spec = JobSpec("train", "ann", "train.py", "/", "python", mode="live", tuned=tuned)
    assert restart.run(LaunchOrder("j1", spec, "", "n1", "", 1.0, 1.0)) == 0
    launched[0].set(RoundLayout(1, 3))
    assert os.environ.get("MALLETRAIN_THREADS") == named
