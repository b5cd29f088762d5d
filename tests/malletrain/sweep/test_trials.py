"""The jobs of trials, and whose snapshots are deleted."""

from __future__ import annotations

import os
import re

import pytest

from malletrain.sweep import trials
from malletrain.sweep.ledger import Ledger
from malletrain.sweep.space import written
from malletrain.sweep.spec import Sweep, SweepError, SweepSection
from malletrain.training import snapshot_file
from tests.malletrain.sweep.sweep_world import World


def sweep_in(folder, **job):
    (folder / "train.py").write_text("pass")
    section = {"script": str(folder / "train.py"), "workdir": str(folder), **job}
    return Sweep.model_validate(
        {
            "sweep": {"name": "s", "metric": "loss", "trials": 4, "at_once": 4},
            "job": section,
            "space": {"x": {"low": 0.0, "high": 1.0}},
        }
    )


def test_each_of_several_metrics_may_need_a_direction(tmp_path):
    sweep = sweep_in(tmp_path)
    section = {"name": "s", "metric": ["loss", "acc"], "trials": 4, "at_once": 4}
    several = sweep.model_copy(update={"sweep": SweepSection.model_validate(section)})
    assert trials.check(several)[0] == (
        "The smallest values of loss and acc are the best, because the sweep names no direction. "
        'If the largest are, write a direction for each, such as direction = ["maximize", '
        '"minimize"].'
    )


def test_a_trial_is_a_malleable_job(tmp_path):
    sweep = sweep_in(tmp_path, nodes="1:8", args=["--out", "{trial}"], env={"A": "1"}, weight=2.0)
    world = World(sweep)
    spec = trials.job_of(world.engine.ledger, 3, {"x": 0.5})
    assert (spec.name, spec.min_nodes, spec.max_nodes, spec.weight) == ("s-3", 1, 8, 2.0)
    assert spec.args == ("--out", "3", "--x", "0.5")
    assert spec.env == {"A": "1", "MALLETRAIN_TRIAL": "3", "MALLETRAIN_UMASK": "0022"}
    assert spec.key.endswith("-3")
    other = trials.job_of(world.engine.ledger, 4, {"x": 0.5})
    assert spec.sweep == other.sweep == f"s/{spec.key.removesuffix('-3')}"
    assert spec.key != trials.job_of(world.engine.ledger, 4, {"x": 0.5}).key


@pytest.mark.parametrize(
    ("profile", "key", "on"), [("auto", "", True), ("shared", "sweep s", True), ("off", "", False)]
)
def test_whether_trials_share_a_profile(tmp_path, profile, key, on):
    sweep = sweep_in(tmp_path, profile=profile)
    spec = trials.build_job(sweep, "s-0", {"x": 0.5}, 0)
    assert (spec.profile_key, spec.profile) == (key, on)


@pytest.mark.parametrize(
    ("sizes", "counts", "largest"),
    [({}, "", 1), ({"slots": "1:3"}, "slots", 3), ({"gpus": "2"}, "gpus", 2)],
)
def test_the_size_of_a_trial_in_slots_and_gpus(tmp_path, sizes, counts, largest):
    spec = trials.build_job(sweep_in(tmp_path, **sizes), "s-0", {"x": 0.5}, 0)
    assert (spec.counts, spec.max_nodes) == (counts, largest)
    with pytest.raises(SweepError, match="--nodes and --gpus each give the size"):
        trials.build_job(sweep_in(tmp_path, nodes="1", gpus="1"), "s-0", {"x": 0.5}, 0)


def test_a_trials_parameters_may_say_how_large_its_model_is(tmp_path):
    (tmp_path / "sizes_of_trials.py").write_text(
        "def both(x): return 1e6 * x, 1e9\ndef one(x): return 5\ndef none(x): return x.y\n"
        "def unknown(x): return None\ndef breaks(x): return {}[x]\n"
    )
    (tmp_path / "no_sizes_of_trials.py").write_text("def one(x) return 5\n")
    sizes = {}
    for name in ("both", "one", "unknown"):
        sweep = sweep_in(tmp_path, model_size=f"sizes_of_trials:{name}")
        spec = trials.build_job(sweep, "s-0", {"x": 0.5}, 0)
        sizes[name] = spec.parameters, spec.flops
    assert sizes == {"both": (5e5, 1e9), "one": (5.0, None), "unknown": (None, None)}
    errors = {
        "sizes_of_trials:none": "AttributeError",
        "sizes_of_trials:nobody": "AttributeError",
        "sizes_of_trials:breaks": "KeyError: 0.0",
        "no_sizes_of_trials:one": "SyntaxError",
    }
    for name, error in errors.items():
        with pytest.raises(SweepError, match=f"{name} does not say a model's size: {error}"):
            trials.check(sweep_in(tmp_path, model_size=name))


def test_what_cannot_be_a_job_is_found_at_once(tmp_path):
    with pytest.raises(SweepError, match="cannot be jobs: There is no script"):
        trials.check(sweep_in(tmp_path, script=str(tmp_path / "none.py")))
    with pytest.raises(SweepError, match='"0:2" asks for 0 nodes'):
        trials.check(sweep_in(tmp_path, nodes="0:2"))


@pytest.mark.parametrize(
    ("args", "folder"),
    [
        ([], "trial-3"),
        (["--seed", "{trial}"], "trial-3"),
        (["--seed={trial}"], "trial-3"),
        (["--output_dir", "out"], "trial-3"),
        (["--output_dir", "{trial}"], None),
        (["--out={trial}"], None),
        (["out-{trial}"], None),
        (["--snapshot", "{trial}"], None),
    ],
)
def test_a_trial_has_an_output_folder_of_its_own(tmp_path, args, folder):
    spec = trials.build_job(sweep_in(tmp_path, args=args), "s-3", {"x": 0.5}, 3)
    assert spec.env["MALLETRAIN_TRIAL"] == "3"
    assert spec.env.get("MALLETRAIN_TRIAL_FOLDER") == folder


@pytest.mark.parametrize(
    ("args", "script", "patterns"),
    [
        ([], "pass", []),
        (["--output_dir", "out-{trial}"], "pass", []),
        (["--output_dir", "out-{x}"], "pass", []),
        (["--output_dir", "out"], "pass", [r"All trials have.*/out\. .*\(trial-0, trial-1, …\)"]),
        ([], "TrainingArguments('out')", [r"All trials have the output folder .*/out\."]),
        (["r-{trial}"], "Guard(a, 'out')", [r"Warning: all trials have the output.*/out, and"]),
        ([], "Snapshot('s.pt', m=m)", [r"Warning: all trials save to the snapshot .*/s\.pt"]),
    ],
)
def test_trials_that_share_a_place_are_told_at_once(tmp_path, args, script, patterns):
    sweep = sweep_in(tmp_path, args=args)
    (tmp_path / "train.py").write_text(script)
    note, *sentences = trials.check(sweep)
    assert note.startswith("The smallest loss is the best, because the sweep names no direction.")
    assert len(sentences) == len(patterns)
    assert all(
        re.search(each, sentence) for each, sentence in zip(patterns, sentences, strict=True)
    )


@pytest.mark.parametrize(
    ("args", "choices", "added", "warned"),
    [
        ([], [True, False], "'--amp', type=bool", True),
        ([], ["True", "False"], "'--amp', type=bool", True),
        ([], [0, 1], "'--amp', type=bool, default=True", True),
        (["--mixed={amp}"], [True, False], "'-m', '--mixed', type=bool", True),
        (["--mixed", "{amp}"], [True, False], "'--amp', type=bool", False),
        (["--mixed", "{amp}-{x}"], ["a", "", "b"], "'--mixed', type=bool", True),
        ([], ["", "1"], "'--amp', type=bool", False),
        (["--mixed={amp}"], ["1", "", "2"], "'--mixed', type=bool", False),
        ([], [True], "'--amp', type=bool", False),
        ([], [True, False], "'--amp', type=yes", False),
        ([], [True, False], "'--amp'", False),
    ],
)
def test_options_that_are_true_in_all_trials_are_told(tmp_path, args, choices, added, warned):
    """wandb issue 1700 and others: bool("false") is true."""
    sentences = told_of_bool(tmp_path, f"parser.add_argument({added})", args, choices)
    assert len(sentences) == warned
    assert all("train.py reads --" in sentence for sentence in sentences)


@pytest.mark.parametrize(
    ("line", "warned"),
    [
        ("from argparse import ArgumentParser", True),
        ("def run(): answer = bool(1)", True),
        ("from helpers import bool as is_set", True),
        ("from helpers import str2bool as bool", False),
        ("from helpers import bool", False),
        ("bool = str2bool", False),
        ("def bool(text): return text == 'true'", False),
        ("parser.register('type', bool, str2bool)", False),
        ("import jsonargparse", False),
        ("from jsonargparse import ArgumentParser", False),
        ("from lightning.pytorch.cli import LightningCLI", False),
        ("from lightning.pytorch import cli", False),
    ],
)
def test_nothing_is_told_where_bool_may_read_texts(tmp_path, line, warned):
    script = f"{line}\nparser.add_argument('--amp', type=bool)"
    assert len(told_of_bool(tmp_path, script)) == warned


@pytest.mark.parametrize("choices", [[False, True], [0, 1], ["False", "True"], ["0", "1"]])
def test_the_advice_is_right_for_the_values_of_the_sweep(tmp_path, choices):
    [sentence] = told_of_bool(tmp_path, "parser.add_argument('--amp', type=bool)", [], choices)
    advice = re.search(r"type=(lambda .*)\.$", sentence)[1]
    assert [eval(advice)(written(value)) for value in choices] == [False, True]


def told_of_bool(folder, script, args=(), choices=(True, False)):
    """The warnings for a script, and a parameter ``amp`` with these values."""
    sweep = sweep_in(folder)
    job = sweep.job.model_copy(update={"args": list(args)})
    space = {**sweep.space, "amp": list(choices)}
    sweep = sweep.model_copy(update={"job": job, "space": space})
    (folder / "train.py").write_text(script)
    return [sentence for sentence in trials.check(sweep) if "type=bool" in sentence]


def test_a_direction_that_is_named_needs_no_note(tmp_path):
    sweep = sweep_in(tmp_path)
    named = sweep.sweep.model_copy(update={"direction": "minimize"})
    assert trials.check(sweep.model_copy(update={"sweep": named})) == []


def saved(folder, job, daemon=".d1"):
    place = folder / "malletrain-snapshots" / f"{job}-train-0123abcd{daemon}"
    place.mkdir(parents=True)
    (place / "snapshot.pt").write_text(job)
    return place


def written_by(path, job, daemon="d1"):
    owner = {"job": job, "script": "train.py", "arguments": "x", "daemon": daemon}
    snapshot_file.write(str(path), {"malletrain_snapshot": 1, "objects": {}, "owner": owner}, 0)


def test_the_best_snapshot_stays_and_the_losers_go(tmp_path):
    world = World(sweep_in(tmp_path, args=["--snapshot", "runs/{trial}.pt"]))
    (tmp_path / "runs").mkdir()
    world.turn()
    for number, job in enumerate(world.jobs.jobs):
        saved(tmp_path, job)
        for name in (f"{number}.pt", f"{number}.pt.prev", f"{number}1.pt"):
            written_by(tmp_path / "runs" / name, job)
        snapshot_file.mark_open_epoch(str(tmp_path / "runs" / f"{number}.pt"), "x")
    ledger = world.engine.ledger
    assert trials.delete_losers(ledger, world.now) == []  # they go on
    world.play()
    best = ledger.best()[0].number
    assert sorted(trials.delete_losers(ledger, world.now)) == sorted({0, 1, 2, 3} - {best})
    folders = {p.name for p in (tmp_path / "malletrain-snapshots").iterdir()}
    assert folders == {f"j{best + 1}-train-0123abcd.d1"}
    there = set(os.listdir(tmp_path / "runs"))
    best_files = {f"{best}.pt", f"{best}.pt.prev", f"{best}.pt.open-epoch"}
    assert there == best_files | {f"{n}1.pt" for n in range(4)}
    assert trials.best_snapshot(ledger) == tmp_path / "malletrain-snapshots" / folders.pop() / (
        "snapshot.pt"
    )


@pytest.mark.parametrize(
    ("value", "direction", "note"),
    [
        ("best", "maximize", "Its value is that of step 1, and the snapshot is of its last steps,"),
        ("best", "minimize", ""),  # the last step is the best
        ("last", "maximize", ""),
    ],
)
def test_a_snapshot_of_another_step_than_the_value_is_told(tmp_path, value, direction, note):
    sweep = sweep_in(tmp_path)
    update = {"value": value, "direction": direction}
    world = World(sweep.model_copy(update={"sweep": sweep.sweep.model_copy(update=update)}))
    assert trials.snapshot_note(world.engine.ledger) == "", "none has ended"
    world.play()
    sentence = trials.snapshot_note(world.engine.ledger)
    assert sentence.startswith(note)
    assert bool(sentence) == bool(note)


def test_what_is_anothers_is_neither_deleted_nor_the_best(tmp_path):
    """Ids of jobs begin at j1 with every daemon, and two sweeps may name one path."""
    world = World(sweep_in(tmp_path, args=["--snapshot", "runs/{trial}.pt"]))
    (tmp_path / "runs").mkdir()
    world.turn()
    strangers = [saved(tmp_path, job, end) for job in world.jobs.jobs for end in ("", ".d2")]
    disguised = saved(tmp_path, "j1")
    written_by(disguised / "snapshot.pt", "j7")
    for number, whose in enumerate((("j1", "d2"), ("j9", "d1"), ("j3", ""), None)):
        path = tmp_path / "runs" / f"{number}.pt"
        if whose is None:
            path.write_text("weights of another program")
        else:
            written_by(path, *whose)
        (tmp_path / "runs" / f"{number}.pt.yaml").write_text("notes")
    world.play()
    ledger = world.engine.ledger
    assert trials.delete_losers(ledger, world.now) == []
    assert trials.best_snapshot(ledger) is None
    assert all((place / "snapshot.pt").exists() for place in (*strangers, disguised))
    assert len(os.listdir(tmp_path / "runs")) == 8


def test_what_a_dying_job_saves_once_more_is_deleted_too(tmp_path):
    world = World(sweep_in(tmp_path))
    world.turn()
    world.play()
    ledger = Ledger.open(world.storage, "s")
    loser = ({0, 1, 2, 3} - {ledger.best()[0].number}).pop()
    trials.delete_losers(ledger, world.now)
    late = saved(tmp_path, f"j{loser + 1}")
    assert trials.delete_losers(ledger, world.now) == [loser]
    assert not late.exists()
    ended = max(t.datetime_complete.timestamp() for t in ledger.trials())
    trials.delete_losers(ledger, ended + trials.MAX_LATE_SAVE_S + 1)
    assert len(ledger.gone) == 3
