"""Sweep files: what is read of them, and the sentence about a wrong one."""

from __future__ import annotations

import re

import pytest

from malletrain.sweep.spec import STORED, Sweep, SweepError, load_sweep

GOOD = """
[sweep]
metric = "accuracy"
direction = "maximize"
trials = 20
time = "2 h"

[job]
script = "train.py"
args = ["--epochs", "9"]
nodes = "1:4"

[space]
lr = { low = 1e-4, high = 0.1, log = true }
act = ["relu", "tanh"]

[pruner]
kind = "asha"
"""


def written(tmp_path, text):
    path = tmp_path / "my sweep.toml"
    path.write_text(text)
    return path


def test_a_file(tmp_path):
    sweep = load_sweep(written(tmp_path, GOOD))
    assert sweep.sweep.name == "my-sweep"
    assert sweep.sweep.time == 7200
    assert sweep.job.script == tmp_path / "train.py"
    assert sweep.job.workdir == tmp_path
    assert list(sweep.parameters) == ["lr", "act"]


def test_what_is_kept_of_it_is_all_of_it(tmp_path):
    sweep = load_sweep(written(tmp_path, GOOD))
    assert Sweep.model_validate(sweep.model_dump(mode="json")) == sweep


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('metric = "accuracy"', 'metrik = "accuracy"', 'line 3.*did you mean "metric"'),
        ("trials = 20", "trials = 0", "line 5: sweep.trials: 0 is too small"),
        ('time = "2 h"', "time = 2", 'line 6.*has no unit; accepted is a number .*"30 s"'),
        ('direction = "maximize"', 'direction = "up"', '"up" is no direction'),
        ("lr = { low = 1e-4", "lr = { low = 1e4", "line 13.*lr: low = 10000.0 is above high"),
        ('kind = "asha"', 'kind = "ahsa"', 'line 18.*accepted is "none", "asha"'),
        ('kind = "asha"', 'kind = "earlycurve"', "earlycurve needs max_steps"),
        ('metric = "accuracy"', 'metric = ["a", "b"]', "several metrics has no pruner"),
        ("[pruner]", '[sampler]\nkind = "grid"\n[pruner]', "a grid needs lists of values"),
        ('script = "train.py"', "", "line 8: job.script: this required key is missing"),
        ("[space]", "[spaces]", 'did you mean "space"'),
        ("trials = 20", 'name = "a b"', '"a b" is no name'),
        (
            '"--epochs", "9"',
            '"--rate={lrr}"',
            r"job.args: \{lrr\} is no parameter.*\{lr\}, \{act\}, \{trial\}",
        ),
        ("trials = 20", "trials = ", "line 5: This is not valid TOML"),
        ('["relu", "tanh"]', "[1.0, inf]", 'act: inf is no finite number.*as a text, "inf"'),
        ('["relu", "tanh"]', "[1.0, nan]", "act: nan is no finite number"),
        (
            '["relu", "tanh"]',
            "{ low = 0, high = 18446744073709551615 }",
            "act: whole numbers above 9,007,199,254,740,992 are stored as others",
        ),
        ("trials = 20", "node_hours = inf", "sweep.node_hours: .*finite"),
        ('nodes = "1:4"', "weight = inf", "job.weight: .*finite"),
        ("[pruner]", "[sampler]\nseed = -1\n[pruner]", "seed: -1 is no seed.*0 to 4294967295"),
        ("[pruner]", "[sampler]\nseed = 20261128123456\n[pruner]", "20261128123456 is no seed"),
        ("[pruner]", "[sampler]\noptions.a.b = [1, -inf]\n[pruner]", "a: -inf is no finite number"),
        (
            'kind = "asha"',
            'kind = "hyperband"\nmin_steps = 9\nmax_steps = 8',
            "min_steps = 9 is above max_steps = 8.*would stop no trial",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path, old, new, words):
    assert old in GOOD
    with pytest.raises(SweepError) as caught:
        load_sweep(written(tmp_path, GOOD.replace(old, new)))
    assert re.search(words, str(caught.value), re.DOTALL), str(caught.value)


def test_no_file(tmp_path):
    with pytest.raises(SweepError, match="cannot be read: No such file"):
        load_sweep(tmp_path / "none.toml")


def test_a_stored_sweep_of_an_earlier_release_can_still_be_read(tmp_path):
    stored = load_sweep(written(tmp_path, GOOD)).model_dump(mode="json")
    stored["sampler"]["seed"] = -1
    stored["pruner"] |= {"kind": "hyperband", "min_steps": 9, "max_steps": 8}
    assert Sweep.model_validate(stored, context={STORED: True}).sampler.seed == -1
    with pytest.raises(ValueError, match="no seed"):
        Sweep.model_validate(stored)


def test_from_python(tmp_path):
    import optuna

    made = Sweep.model_validate(
        {
            "sweep": {"name": "py", "metric": "loss"},
            "job": {"script": str(tmp_path / "t.py")},
            "space": {"lr": optuna.distributions.FloatDistribution(1e-3, 1.0, log=True)},
        }
    )
    assert made.space["lr"] == {"low": 1e-3, "high": 1.0, "log": True}
