"""How data are dealt to clients, and the model of the example."""

from __future__ import annotations

import numpy as np
import pytest
from fedcase.options import TrainingOptions
from fedcase.task import Perceptron, dirichlet_parts, load_task
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(1, 30), st.sampled_from([0.05, 0.3, 100.0]), st.integers(0, 5))
def test_each_sample_belongs_to_one_client_and_each_client_has_some(clients, alpha, seed):
    labels = np.arange(200) % 7
    parts = dirichlet_parts(labels, clients, alpha, seed)
    assert len(parts) == clients
    assert min(len(part) for part in parts) >= 1
    assert sorted(np.concatenate(parts).tolist()) == list(range(200))
    again = dirichlet_parts(labels, clients, alpha, seed)
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))


def test_a_small_concentration_gives_few_labels():
    labels = np.arange(10_000) % 10

    def largest(alpha):
        parts = dirichlet_parts(labels, 20, alpha, 0)
        return np.mean([np.bincount(labels[p], minlength=10).max() / len(p) for p in parts])

    assert largest(1000.0) == pytest.approx(0.1, abs=0.03)
    assert largest(0.05) > 0.5


def test_too_many_clients_are_refused():
    with pytest.raises(ValueError, match="3 samples are too few for 4 clients"):
        dirichlet_parts([0, 1, 0], 4, 0.3, 0)


def test_the_step_of_the_perceptron_is_the_gradient():
    model = Perceptron(5, 4, 3, rate=1.0, batch=8)
    random = np.random.default_rng(1)
    arrays = {name: array.astype(float) for name, array in model.initial(0).items()}
    x, y = random.normal(size=(6, 5)), random.integers(0, 3, 6)
    weights = random.uniform(0.5, 2.0, 6)
    after = model.epoch(arrays, x, y, weights)
    for name, array in arrays.items():
        for place in [(0,) * array.ndim, (1,) * array.ndim]:
            changed = {n: a.copy() for n, a in arrays.items()}
            step = 1e-6
            changed[name][place] += step
            loss = [weights @ model.losses(a, x, y)[0] / 6 for a in (arrays, changed)]
            gradient = (loss[1] - loss[0]) / step
            assert arrays[name][place] - after[name][place] == pytest.approx(gradient, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("no_such_module:Task", "{}"),
        ("fedcase.task:NoSuchTask", "{}"),
        ("fedcase.task", "{}"),
        ("tests.jobscripts.federated.tasks:Counting", '{"no_such_option": 1}'),
        ("tests.jobscripts.federated.tasks:Counting", "{"),
        ("fedcase.task:FashionMnist", '{"folder": "/no/such/folder"}'),
    ],
)
def test_a_task_that_cannot_be_made_is_a_sentence(name, options):
    with pytest.raises(ValueError, match=r"cannot be made: .*A task is MODULE:FACTORY"):
        load_task(name, options)


def test_options_are_read_as_they_were_written(tmp_path):
    options = TrainingOptions("a:b", rounds=3, folder="/f")
    options.write(tmp_path / "o.json")
    assert TrainingOptions.read(tmp_path / "o.json") == options
    assert TrainingOptions(**options.for_clients()).folder == ""
    (tmp_path / "o.json").write_text('{"colour": 1}')
    with pytest.raises(ValueError, match=r"The options in .*o.json cannot be read"):
        TrainingOptions.read(tmp_path / "o.json")
