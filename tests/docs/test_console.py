"""What the runner of the docs' commands takes for a command, and what it takes for its output."""

from __future__ import annotations

import pytest

from tests.bare import plain_variables
from tests.docs.console import Block, blocks, commands, session

PAGE = """
Write this:

<!-- file: a.txt -->
```toml
x = 1
```

```console
$ cat a.txt    # shows it
x = 1
$ export Y=2; mkdir inner && cd inner
$ echo "$Y" \\
> three
2 three
```

<!-- not run: needs another machine -->
```console
$ false
```

<!-- until interrupted -->
```console
$ echo began; exec sleep 100
```
"""


def test_commands_and_what_they_say():
    entries = commands(Block("console", "$ a \\\n> b\nsaid\n$ c\n", ""))
    assert [(c.text, c.says) for c in entries] == [("a \\\nb", ["said"]), ("c", [])]


def test_output_without_a_command_is_refused():
    with pytest.raises(ValueError, match="begins without a command: said"):
        commands(Block("console", "said\n", ""))


def test_notes_belong_to_the_block_below():
    assert [b.note for b in blocks(PAGE)] == [
        "file: a.txt",
        "",
        "not run: needs another machine",
        "until interrupted",
    ]


def test_a_page_is_run_in_one_shell(tmp_path):
    with session(plain_variables(tmp_path), tmp_path) as shell:
        assert shell.page(PAGE) == 4
        assert shell.place == tmp_path / "inner"


@pytest.mark.parametrize(
    ("block", "why"),
    [
        ("$ echo wrong\nright", "did not say 'right'"),
        ("$ exit 3", "ended with 3"),
        ("$ malletrain-is-not-here", "ended with 127"),
    ],
)
def test_a_command_that_does_otherwise_than_its_page_says_fails(tmp_path, block, why):
    with (
        session(plain_variables(tmp_path), tmp_path) as shell,
        pytest.raises(AssertionError, match=why),
    ):
        shell.page(f"```console\n{block}\n```\n")
