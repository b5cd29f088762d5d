"""The generator: flow without divergence, terrain of the asked relief, the same from the same
seed.
"""

from __future__ import annotations

import numpy as np
import pytest
from windsr import synthetic


def divergence(qy, qx, spacing):
    """∂qy/∂y + ∂qx/∂x of periodic fields, by Fourier transform: exact for every wave below half the
    sampling rate, where a derivative is not defined.
    """
    rows, columns = qy.shape
    ky = 2j * np.pi * np.fft.fftfreq(rows, spacing)[:, None]
    kx = 2j * np.pi * np.fft.rfftfreq(columns, spacing)[None]
    if rows % 2 == columns % 2 == 0:
        ky[rows // 2], kx[:, -1] = 0.0, 0.0
    return np.fft.irfft2(ky * np.fft.rfft2(qy) + kx * np.fft.rfft2(qx), s=qy.shape)


@pytest.mark.parametrize("size", [32, 45])
def test_the_flux_has_no_divergence(size):
    rng = np.random.default_rng(1)
    height = synthetic.terrain(rng, size, 2000.0, 300.0)
    qy, qx = synthetic.flow(rng, height, 2000.0, 8.0, 0.7, 1.0)
    scale = np.hypot(qy, qx).mean() / 2000.0
    assert np.abs(divergence(qy, qx, 2000.0)).max() < 1e-10 * scale
    # And seen by an independent rule: through the sides of large boxes as much flows in as out, but
    # for what the rule itself misses.
    centred = (
        np.roll(qy, -1, 0) - np.roll(qy, 1, 0) + np.roll(qx, -1, 1) - np.roll(qx, 1, 1)
    ) / 4000.0
    before = synthetic.depth(height) * 8.0
    assert abs(centred.mean()) < 1e-10 * scale
    assert np.hypot(qy, qx).mean() == pytest.approx(before.mean(), rel=0.4)


def test_the_correction_is_the_least_and_leaves_what_is_free_of_divergence():
    rng = np.random.default_rng(2)
    qy, qx = rng.standard_normal((2, 24, 24))
    my, mx = synthetic.mass_consistent(qy, qx, 1.0)
    again = synthetic.mass_consistent(my, mx, 1.0)
    np.testing.assert_allclose(again, (my, mx), atol=1e-12)
    # The change is a gradient, and a gradient is at right angles to every flow without divergence:
    # that makes it the least.
    other = synthetic.mass_consistent(*rng.standard_normal((2, 24, 24)), 1.0)
    assert abs(((qy - my) * other[0] + (qx - mx) * other[1]).sum()) < 1e-9


def test_fields_follow_from_the_seed_and_look_like_wind():
    one, same, other = (synthetic.generate(days=2, hours=2, size=32, seed=s) for s in (3, 3, 4))
    np.testing.assert_array_equal(one.wind, same.wind)
    assert not np.array_equal(one.wind, other.wind)
    assert len(np.unique(one.days)) == 2
    assert 1 < one.wind.mean() < 20
    assert one.terrain.min() == 0
    assert np.mean(one.terrain == 0) == pytest.approx(synthetic.SEA_SHARE, abs=0.03)


def test_without_relief_the_wind_is_nearly_even():
    flat = synthetic.generate(days=1, hours=1, size=32, relief=0.0)
    hilly = synthetic.generate(days=1, hours=1, size=32, relief=400.0)
    assert flat.wind.std() < hilly.wind.std()
