"""The GPUs that a process may use."""

from __future__ import annotations

import pytest

from malletrain.protocol.gpus import count_gpus


@pytest.mark.parametrize(
    ("visible", "count"),
    [("0,1,2", 3), ("", 0), ("-1", 0), ("GPU-8932f937-d72c", 1), ("NoDevFiles", 0)],
)
def test_gpus_that_may_be_used(visible, count):
    assert count_gpus({"CUDA_VISIBLE_DEVICES": visible}) == count
