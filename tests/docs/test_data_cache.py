"""The example of the page on data caches runs and says what the page says."""

import re
from pathlib import Path

import pytest

from malletrain.protocol import env
from tests.malletrain import forked_programs

PAGE = Path(__file__).parents[2] / "docs" / "data-cache.md"


@pytest.mark.slow
def test_the_example_says_what_its_page_says(tmp_path):
    pytest.importorskip("torch")
    text = PAGE.read_text()
    example = text[text.index("`example.py` trains") :]
    script = re.search(r"```python\n(.*?)```", example, re.DOTALL)[1]
    output = re.search(r"\$ python example.py\n(.*?)```", example, re.DOTALL)[1]
    (tmp_path / "data").mkdir(mode=0o700)
    variables = {env.DATA: str(tmp_path / "data")}
    made = forked_programs.run(script, folder=tmp_path, environment=variables)
    assert made.code == 0, made.errors
    assert made.output == output
