"""Marks of tests that need more of torch than the oldest version that setup.cfg admits."""

from __future__ import annotations

import pytest

from malletrain.training.torch_private import gloo_ignores_operations, torch_release

trains_shards = pytest.mark.skipif(
    gloo_ignores_operations(),
    reason="MalleTrain refuses to train sharded models over gloo with torch before 2.9",
)
"""A sharded model is trained over two ranks or more. That it is refused with an older torch is
tested in tests/malletrain/training/test_sharded_gradients.py, and in live mode in
tests/malletrain/elastic/sharded/test_setup.py.
"""

reuses_meshes = pytest.mark.skipif(
    torch_release() < (2, 13),
    reason="an older torch stores the groups of a mesh elsewhere (torch_private.lend_group)",
)
"""A mesh of an earlier round is used again. With an older torch each round makes its own."""
