"""The example of the page on data caches runs and says what the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from malletrain.protocol import env

PAGE = Path(__file__).parents[2] / "docs" / "data-cache.md"


@pytest.mark.slow
def test_the_example_says_what_its_page_says(tmp_path):
    pytest.importorskip("torch")
    text = PAGE.read_text()
    example = text[text.index("`example.py` trains") :]
    script = re.search(r"```python\n(.*?)```", example, re.DOTALL)[1]
    output = re.search(r"\$ python example.py\n(.*?)```", example, re.DOTALL)[1]
    (tmp_path / "example.py").write_text(script)
    (tmp_path / "data").mkdir(mode=0o700)
    made = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env={**os.environ, env.DATA: str(tmp_path / "data")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert made.stdout == output
