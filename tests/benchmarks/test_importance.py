"""The benchmark of ImportanceSampler: its virtual cache and its comparison have known answers, and
its contenders learn.
"""

import math

import pytest
import torch

from benchmarks.importance import (
    CONTENDERS,
    CORRECTED,
    UNIFORM,
    Curve,
    Images,
    ReadingModel,
    VirtualCache,
    compare,
    lowest_best,
    table,
    time_to,
    train,
    with_wrong_labels,
)

READING = ReadingModel(step_s=0.02, read_s=0.01, readers=2)


def test_a_step_takes_what_reading_takes_if_that_is_longer():
    cache = VirtualCache(10, 0.4, READING)
    cache.step(torch.tensor([0, 1]))  # two reads of 10 ms by two processes
    assert cache.seconds == pytest.approx(0.02)
    cache.step(torch.tensor([0, 1, 1, 0]))  # all there
    assert (cache.seconds, cache.reads) == (pytest.approx(0.04), 2)
    cache.step(torch.tensor([2, 3, 4, 5, 6, 7, 7]))  # six reads; two of them are kept
    assert (cache.seconds, cache.reads) == (pytest.approx(0.07), 8)
    cache.step(torch.tensor([2, 3, 4, 5]))
    assert cache.reads == 10


def curve(contender, accuracy, times=(1.0, 2.0, 3.0)):
    return Curve(contender, 0, [1, 2, 3], list(accuracy), {"1": list(times)}, 0.9, 0.0)


def test_the_target_is_one_that_all_uniform_runs_reach():
    uniform = [curve(UNIFORM, (0.5, 0.8, 0.7)), curve(UNIFORM, (0.6, 0.7, 0.9))]
    faster = [curve(CORRECTED, (0.8, 0.1, 0.1)), curve(CORRECTED, (0.1, 0.2, 0.3))]
    assert lowest_best(uniform) == 0.8
    assert time_to(uniform[1], "1", 0.8) == 3.0
    assert time_to(faster[1], "1", 0.8) == math.inf
    result = compare({UNIFORM: uniform, CORRECTED: faster}, [1.0])
    assert [row["ratios"] for row in result["rows"]] == [[1.0, 1.0], [0.5, math.inf]]
    assert "80.00%" in table(result)
    assert CORRECTED in table(result)


def stripes(count):
    """Images of ten classes that are easy to tell."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, 10, (count,), generator=generator)
    return torch.nn.functional.one_hot(labels, 20).float() * 2 - 1, labels


def easy(train_count, test_count):
    wrong = torch.zeros(train_count, dtype=torch.bool)
    return Images(*stripes(train_count), *stripes(test_count), wrong)


def test_a_part_of_the_labels_is_wrong():
    images = easy(200, 50)
    wrong = with_wrong_labels(images, 0.25)
    assert (wrong.train_labels != images.train_labels).sum() == wrong.wrong.sum() == 50
    result = train(CORRECTED, wrong, 0, 4, 20, 10, [1.0], READING)
    assert 0.25 < result.wrong < 0.5, "their losses are high"
    assert torch.equal(wrong.test_labels, images.test_labels)


@pytest.mark.parametrize("contender", CONTENDERS)
def test_each_contender_learns(contender):
    images = easy(600, 200)
    result = train(contender, images, 0, 4, 20, 10, [0.5, 1.0], READING)
    assert max(result.accuracy) > 0.9
    assert result.steps == list(range(10, 121, 10))
    assert result.coverage == 1.0 if contender == UNIFORM else 0.5 < result.coverage < 1.0
    assert all(a <= b for a, b in zip(result.time_s["1"], result.time_s["0.5"], strict=True))
