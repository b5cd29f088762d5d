"""Live mode needs a newer torch than restart mode."""

import pytest
import torch

from malletrain.training.torch_private import LIVE_MODE_FROM


@pytest.fixture(autouse=True)
def _torch_is_new_enough():
    if torch.__version__ < LIVE_MODE_FROM:
        pytest.skip(f"live mode needs torch {LIVE_MODE_FROM}")
