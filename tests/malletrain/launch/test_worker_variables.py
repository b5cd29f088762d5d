"""Variables of the workers, round after round, by table."""

import pytest

from malletrain.launch.cores import allowed_cores
from malletrain.launch.worker_variables import WorkerVariables
from malletrain.protocol.payloads import NodeLayout

CORES = str(allowed_cores())


@pytest.mark.parametrize(
    ("before", "layouts", "after"),
    [
        ({}, [NodeLayout(1)], {"OMP_NUM_THREADS": CORES}),
        # What an earlier round set is not the user's.
        ({}, [NodeLayout(10_000 // 4), NodeLayout(1)], {"OMP_NUM_THREADS": CORES}),
        ({"OMP_NUM_THREADS": "7"}, [NodeLayout(2), NodeLayout(1)], {"OMP_NUM_THREADS": "7"}),
        ({"OMP_NUM_THREADS": "7"}, [NodeLayout(2, 3)], {"OMP_NUM_THREADS": "3"}),
        (
            {},
            [NodeLayout(2, 1, 4)],
            {"OMP_NUM_THREADS": "1", "MALLETRAIN_LOADER_WORKERS": "4"},
        ),
        ({}, [NodeLayout(2, 1, 4), NodeLayout(2, 1)], {"OMP_NUM_THREADS": "1"}),
    ],
)
def test_each_round_has_the_variables_of_its_layout(before, layouts, after):
    environment = dict(before)
    variables = WorkerVariables(environment)
    for layout in layouts:
        variables.set(layout)
    assert environment == after
