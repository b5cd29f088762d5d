"""Variables of the workers, round after round, by table."""

import pytest

from malletrain.launch.cores import allowed_cores
from malletrain.launch.worker_variables import WorkerVariables
from malletrain.protocol.payloads import RoundLayout

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
