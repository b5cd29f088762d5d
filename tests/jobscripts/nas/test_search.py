"""What is tried next, on a landscape whose best cell is known."""

from __future__ import annotations

import nas.train
import numpy as np
import optuna
import pytest
from nas.codes import decode, draw
from nas.search import SPACE, EvolvingCells, RandomCells

import malletrain
from malletrain.sim.nas import Op
from malletrain.sweep import trials
from malletrain.sweep.spec import load_sweep
from tests.bare import ROOT

NAS = ROOT / "jobscripts" / "nas"


def quality(trial) -> float:
    """How many 3x3 convolutions lie on paths, and how few edges it takes."""
    cell = decode(trial.params["edges"], trial.params["ops"]).pruned()
    return cell.ops.count(Op.CONV3X3) - 0.01 * len(cell.edges)


def searched(sampler, trials=150, direction="maximize"):
    study = optuna.create_study(direction=direction, sampler=sampler)
    sign = 1 if direction == "maximize" else -1
    for n in range(trials):
        trial = study.ask(SPACE)
        if n % 5 == 4:  # given up early
            trial.report(-100.0 * sign, 1)
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            study.tell(trial, sign * quality(trial))
    return [sign * t.value for t in study.trials if t.state.name == "COMPLETE"]


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
def test_evolution_finds_better_cells_than_chance(direction):
    chance = searched(RandomCells(seed=1), direction=direction)
    grown = searched(EvolvingCells(seed=1), direction=direction)
    assert max(grown) > 4.9  # five of them, on few edges
    late = sum(grown[-30:]) / 30
    assert late > sum(chance) / len(chance) + 1.0


def test_the_same_seed_tries_the_same():
    assert searched(EvolvingCells(seed=3), 40) == searched(EvolvingCells(seed=3), 40)


@pytest.mark.parametrize(("file", "kind"), [("random", RandomCells), ("evolution", EvolvingCells)])
def test_the_sweep_files_name_them(file, kind):
    from malletrain.sweep.search import sampler_of

    sweep = load_sweep(NAS / f"{file}.toml")
    assert isinstance(sampler_of(sweep), kind)
    bounds = {name: (p.low, p.high) for name, p in sweep.parameters.items()}
    assert bounds == {name: (d.low, d.high) for name, d in SPACE.items()}


def test_no_cell_is_tried_twice_while_others_still_train():
    study = optuna.create_study(sampler=EvolvingCells(seed=5, population=2, tournament=2))
    for _ in range(2):
        study.tell(study.ask(SPACE), 1.0)
    candidates = [study.ask(SPACE) for _ in range(60)]  # all of them children of one cell
    cells = {(t.params["edges"], t.params["ops"]) for t in candidates}
    assert len(cells) == 60
    few = optuna.create_study(sampler=EvolvingCells(seed=5, population=2, tournament=2))
    for n in range(100):
        few.tell(few.ask(SPACE), float(n))
    assert len({(t.params["edges"], t.params["ops"]) for t in few.trials}) == 100


@pytest.mark.parametrize("file", ["random", "evolution"])
def test_a_trials_size_is_known_before_it_trains_and_is_what_it_says_itself(file, monkeypatch):
    """The preset of the size is that of the training."""
    sweep = load_sweep(NAS / f"{file}.toml")
    trials.check(sweep)  # with values that are no cell
    sizes = []
    monkeypatch.setattr(malletrain, "describe", lambda *size: sizes.append(size))
    monkeypatch.setattr(nas.train, "subsets", lambda *_: 1 / 0)  # nothing is trained
    monkeypatch.delenv("RANK", raising=False)  # another test's trainer may have left it
    rng = np.random.default_rng(7)
    for _ in range(5):
        edges, ops = draw(rng)
        job = trials.build_job(sweep, "s-0", {"edges": edges, "ops": ops}, 0)
        with pytest.raises(ZeroDivisionError):
            nas.train.train(nas.train.arguments(job.args))
        assert (job.parameters, job.flops) == sizes[-1]
    assert len(set(sizes)) > 1
