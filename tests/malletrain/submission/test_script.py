"""The output folders that a command line and a script name."""

from __future__ import annotations

import pytest

from malletrain.submission.script import output_folders

PARSER = """
import argparse
OUT = "constant"
p = argparse.ArgumentParser()
p.add_argument("--data", default="data")
p.add_argument("--slow", action="store_true")
p.add_argument("-o", "--output-dir", default="by-default")
"""


@pytest.mark.parametrize(
    ("script", "args", "folders"),
    [
        ("", ["--output_dir", "out"], {"out"}),
        ("", ["--output-dir=out/"], {"out"}),
        ("", ["--out", "a", "--save_dir", "b", "--logging_dir", "c", "-o", "d"], set("abcd")),
        ("", ["--data", "d", "--model", "m", "--lr", "0.1", "--resume", "x/checkpoint-3"], set()),
        ("", ["runs/first"], set()),
        ("", ["data", "results"], {"results"}),
        ("", ["out.pt", "train.log"], set()),
        ("", ["trained"], {"trained"}),
        ("", ["--slow", "out"], set()),
        (PARSER, [], {"by-default"}),
        (PARSER, ["-o", "given"], {"given"}),
        (PARSER, ["--slow", "results", "--output-dir=x"], {"results", "x"}),
        ("TrainingArguments('a', lr=1)\nSeq2SeqTrainingArguments(output_dir='b')", [], {"a", "b"}),
        ("OUT = 'c'\ntransformers.TrainingArguments(OUT)\nSFTConfig(output_dir=OUT)", [], {"c"}),
        ("MalleTrainCallback('a')\nGuard(acc, 'b', s)\nGuard(acc, folder='c')", [], set("abc")),
        ("ModelCheckpoint(dirpath='a')\nSummaryWriter('b')", [], {"a", "b"}),
        ("TrainingArguments(args.out)\nMalleTrainCallback()", [], set()),
        ("def", ["--out", "x"], {"x"}),
    ],
)
def test_folders_that_are_named(tmp_path, script, args, folders):
    (tmp_path / "s.py").write_text(script)
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "malletrain.json").write_text("{}")
    paths = output_folders(str(tmp_path / "s.py"), args, str(tmp_path))
    assert paths == {str(tmp_path / name) for name in folders}
