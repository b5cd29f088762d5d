"""Whole fields: each day left out once, whole coarse cells, surroundings that count."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from windsr import WindsrError, synthetic, whole
from windsr.methods import Draw, make
from windsr.patches import scales_of
from windsr.presets import PRESETS

from tests.jobscripts.windsr import scripts

TINY = PRESETS["tiny"]


def test_sizes_that_the_factor_does_not_divide_are_cut():
    odd = synthetic.generate(days=1, hours=1, size=43)
    own = whole.cut(odd, 4)
    assert own.wind.shape == (1, 40, 40)
    assert (len(own.y), len(own.x)) == (40, 40)
    assert whole.coarse(own, 4).shape == (1, 1, 10, 10)
    np.testing.assert_array_equal(own.wind, odd.wind[:, :40, :40])
    with pytest.raises(WindsrError, match="no coarse cell of 64 × 64"):
        whole.cut(odd, 64)


@pytest.mark.parametrize("name", ["bicubic", "srcnn", "unet", "esrgan", "windsr"])
@pytest.mark.parametrize("shape", [(20, 36), (16, 16)])
def test_a_method_makes_fields_of_any_whole_size(name, shape):
    rows, columns = shape
    torch.manual_seed(0)
    # Three levels on 2 × 2 folded pixels want multiples of 8, which 20 and 36 are not.
    deep = dataclasses.replace(TINY, channels=(8, 8, 8), attention=(False,) * 3)
    method = make(name, deep, scales_of(scripts.small(), deep), True)
    low = 5 + torch.rand((2, 1, rows // 4, columns // 4))
    made = whole.make_whole(method, low, np.zeros(shape, np.float32), Draw(2, 2))
    assert made.shape == (2, 2 if name == "windsr" else 1, *shape)
    means = made.reshape(2, -1, rows // 4, 4, columns // 4, 4).mean(axis=(3, 5))
    np.testing.assert_allclose(means, low.expand(-1, means.shape[1], -1, -1), rtol=1e-4)


def test_a_whole_field_is_nearer_to_the_truth_than_its_patches_made_alone():
    fields = whole.cut(scripts.small(), 4)
    method = make("bicubic", TINY, scales_of(fields, TINY), False)
    low = whole.coarse(fields, 4)
    in_one = whole.make_whole(method, low, fields.terrain, Draw())[:, 0]
    apart = np.zeros_like(in_one)
    for row in range(0, 40, 20):
        for column in range(0, 40, 20):
            part = low[..., row // 4 : row // 4 + 5, column // 4 : column // 4 + 5]
            made = whole.make_whole(method, part, np.zeros((20, 20), np.float32), Draw())
            apart[:, row : row + 20, column : column + 20] = made[:, 0]
    errors = [((f - fields.wind) ** 2).mean() for f in (in_one, apart)]
    assert errors[0] < 0.97 * errors[1]


def test_a_coarse_field_that_does_not_fit_is_refused():
    method = make("bicubic", TINY, scales_of(scripts.small(), TINY), False)
    with pytest.raises(WindsrError, match="5 × 5 do not fit a terrain of 16 × 20"):
        method.predict(torch.ones(1, 1, 5, 5), torch.zeros(1, 1, 16, 20), [0], Draw())
