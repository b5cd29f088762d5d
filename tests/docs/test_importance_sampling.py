"""The example of the page on importance sampling runs."""

import re
from pathlib import Path

import pytest

from tests.malletrain import forked_programs

PAGE = Path(__file__).parents[2] / "docs" / "importance-sampling.md"


@pytest.mark.slow
def test_the_example_of_the_page_draws_fewer_samples_after_the_first_epoch(tmp_path):
    pytest.importorskip("torch")
    script = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    made = forked_programs.run(script, folder=tmp_path)
    assert made.code == 0, made.errors
    lines = made.output.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["epoch 0", "epoch 1", "epoch 2"]
    assert all(50 <= int(re.search(r"draws (\d+)%", line)[1]) < 100 for line in lines)
