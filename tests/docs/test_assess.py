"""The example of the page about ``malletrain assess``, run as it stands there."""

from __future__ import annotations

import shlex

from malletrain.cli import main
from tests.bare import ROOT
from tests.command_runner import CliRunner
from tests.docs.console import blocks, commands


def test_the_example_of_gpus_on_shared_hosts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "assess.md").read_text("utf-8")
    runs = 0
    for block in blocks(page):
        if (name := block.note_after("file:")) is not None:
            (tmp_path / name).write_text(block.text)
        for command in commands(block) if block.kind == "console" else ():
            program, *argv = shlex.split(command.text)
            assert program == "malletrain"
            done = CliRunner().invoke(main, argv)
            assert done.exit_code == 0, done.output
            printed = [line.strip() for line in done.output.splitlines()]
            assert command.says == printed[: len(command.says)]
            assert len(command.says) > 10
            runs += 1
    assert runs == 1
