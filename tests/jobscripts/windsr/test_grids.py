"""Block means, interpolation, regridding and tiles."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from windsr import WindsrError
from windsr.grids import (
    EARTH_RADIUS_M,
    bicubic,
    blend_weight,
    block_mean,
    interpolate,
    local_metres,
    regrid,
    restore_block_means,
    tiles,
    widen,
)

from tests.draws import cases


def test_block_means_and_back_keep_a_slope():
    slope = torch.arange(32.0).repeat(32, 1)[None, None]
    low = block_mean(slope, 4)
    assert low[0, 0, 0].tolist() == [1.5 + 4 * k for k in range(8)]
    back = bicubic(low, 4)[..., 8:24]
    torch.testing.assert_close(
        back, slope[..., 8:24], atol=0.2, rtol=0
    )  # Keys' kernel with a = -0.75 is not exact for slopes
    torch.testing.assert_close(back.mean(), slope[..., 8:24].mean())


@given(st.integers(16, 60), st.integers(16, 60), st.sampled_from([0, 4, 8]))
@settings(max_examples=cases(50), deadline=None)
def test_tiles_cover_whole_coarse_cells_and_stay_inside(rows, columns, overlap):
    covered = np.zeros((rows, columns), int)
    for tile in tiles(rows, columns, 16, 4, overlap):
        assert tile.row % 4 == tile.column % 4 == 0
        assert covered[tile.slices].shape == (16, 16)
        covered[tile.slices] += 1
    assert (covered[: rows // 4 * 4, : columns // 4 * 4] > 0).all()


@pytest.mark.parametrize(
    ("shape", "overlap", "words"),
    [((15, 40), 0, "16 × 16 at least"), ((40, 40), 16, "overlap"), ((40, 40), 3, "multiple of 4")],
)
def test_tiles_that_do_not_fit_are_refused(shape, overlap, words):
    with pytest.raises(WindsrError, match=words):
        tiles(*shape, 16, 4, overlap)


def test_weights_are_positive_and_equal_without_overlap():
    assert (blend_weight(8, 0) == 1).all()
    assert (blend_weight(8, 4) > 0).all()
    assert blend_weight(8, 4)[4, 4] > blend_weight(8, 4)[0, 0]


def test_a_halo_counts_for_nothing_but_at_the_rim_of_the_field():
    inner = blend_weight(8, 6, 2)
    assert (inner[:2] == 0).all()
    assert (inner[2:6, 2:6] > 0).all()
    top_left = blend_weight(8, 6, 2, (True, False, True, False))
    assert (top_left[:6, :6] > 0).all()
    assert (top_left[6:] == 0).all()


@given(st.integers(1, 5), st.integers(1, 5), st.sampled_from([2, 4, 8]), st.integers(0, 999))
@settings(max_examples=cases(40), deadline=None)
def test_block_means_are_restored_exactly_and_no_wind_is_negative(rows, columns, factor, seed):
    rng = np.random.default_rng(seed)
    low = torch.from_numpy(np.maximum(rng.normal(1, 2, (2, 1, rows, columns)), 0))
    fine = torch.from_numpy(rng.normal(1, 4, (2, 1, rows * factor, columns * factor)))
    made = restore_block_means(fine, low, factor)
    torch.testing.assert_close(block_mean(made, factor), low, atol=1e-9, rtol=1e-9)
    assert made.min() >= 0
    torch.testing.assert_close(restore_block_means(made, low, factor), made, atol=1e-9, rtol=1e-9)


def test_restoring_brings_a_smooth_field_nearer_to_the_truth_without_edges():
    at = torch.linspace(0, 6, 64, dtype=torch.float64)
    truth = (8 + 3 * torch.sin(at)[:, None] * torch.cos(at)[None])[None, None]
    low = block_mean(truth, 8)
    plain, made = interpolate(low, 8, False), interpolate(low, 8, True)
    blocks = plain + widen(low - block_mean(plain, 8), 8)
    error = [float(((f - truth) ** 2).mean()) for f in (made, blocks, plain)]
    assert error[0] < error[1] < error[2]


def test_regridding_is_exact_for_a_plane_and_cuts_the_rim():
    rng = np.random.default_rng(0)
    angle = 0.2
    grid = np.stack(np.meshgrid(np.arange(20.0), np.arange(20.0), indexing="ij")).reshape(2, -1)
    y, x = (
        np.cos(angle) * grid[0] - np.sin(angle) * grid[1],
        np.sin(angle) * grid[0] + np.cos(angle) * grid[1],
    )
    planes = np.stack([2 * y + 3 * x, np.ones_like(y), rng.standard_normal(y.shape)])
    rows, columns, values = regrid(y, x, planes, 0.8)
    assert np.isfinite(values).all()
    assert len(rows) >= 10
    np.testing.assert_allclose(values[0], 2 * rows[:, None] + 3 * columns[None], atol=1e-4)
    with pytest.raises(WindsrError, match="smaller --spacing"):
        regrid(y, x, planes, 100.0)


def test_degrees_become_metres():
    y, x = local_metres(np.array([55.0, 56.0]), np.array([359.5, 0.5]), "it")
    assert np.diff(y)[0] == pytest.approx(111_195, rel=1e-3)
    assert np.diff(x)[0] == pytest.approx(111_195 * np.cos(np.radians(55.5)), rel=1e-3)


def great_circle_m(lat, lon):
    """Distances between all points, by the angle between their directions."""
    north, east = np.radians(lat).ravel(), np.radians(lon).ravel()
    places = np.stack([np.cos(north) * np.cos(east), np.cos(north) * np.sin(east), np.sin(north)])
    chords = np.linalg.norm(places[:, :, None] - places[:, None, :], axis=0)
    return 2 * EARTH_RADIUS_M * np.arcsin(np.clip(chords / 2, 0.0, 1.0))


@pytest.mark.parametrize(
    ("lat", "lon", "error"),
    [
        (np.linspace(49, 61, 7), np.linspace(-11, 2, 7), 0.01),
        (np.linspace(70, 90, 5), np.linspace(0, 330, 12), 0.035),
        (np.linspace(-89, -75, 5), np.linspace(-180, 150, 12), 0.02),
        (np.linspace(-20, -10, 5), np.linspace(175, 185, 5), 0.01),
        (np.linspace(-5, 5, 5), np.linspace(-5, 5, 5) % 360, 0.01),
    ],
)
def test_distances_on_the_plane_are_those_on_the_sphere(lat, lon, error):
    lat, lon = np.meshgrid(lat, lon, indexing="ij")
    y, x = (each.ravel() for each in local_metres(lat, lon, "it"))
    plane = np.hypot(y[:, None] - y, x[:, None] - x)
    sphere = great_circle_m(lat, lon)
    np.testing.assert_allclose(plane, sphere, rtol=error, atol=1.0)


def test_north_is_up_and_east_is_right_in_the_middle():
    y, x = local_metres(np.array([[50, 50], [51, 51.0]]), np.array([[7, 8], [7, 8.0]]), "it")
    assert (np.diff(y, axis=0) > 111_000).all()
    assert (np.diff(x, axis=1) > 69_000).all()


@pytest.mark.parametrize(
    ("lat", "lon", "words"),
    [
        ([-90.0, 0, 90], [0.0, 120, 240], "too far apart for one plane: .* wrong"),
        ([20.0, 50, 80], [-60.0, 0, 60], r"wrong by up to \d+ % \(possible: 10 %\). Cut"),
        ([50.0, np.nan], [7.0, 8], "it: latitudes or longitudes are missing"),
        ([50.0, 170], [7.0, 8], "it has latitudes of up to 170 degrees; are"),
    ],
)
def test_places_that_do_not_lie_on_one_plane_are_refused(lat, lon, words):
    with pytest.raises(WindsrError, match=words):
        local_metres(np.array(lat), np.array(lon), "it")


def test_a_grid_around_the_pole_keeps_its_shape():
    """A polar stereographic grid, on which wind rises by 1 m/s in 100 km to one side."""
    side = 25e3 * np.arange(-12, 13)
    across, along = np.meshgrid(side, side)
    lat = 90 - 2 * np.degrees(np.arctan(np.hypot(along, across) / 2 / EARTH_RADIUS_M))
    lon = np.degrees(np.arctan2(across, -along))
    y, x = local_metres(lat, lon, "it")
    wind = 20 + across / 100e3
    _, _, made = regrid(y.ravel(), x.ravel(), wind.reshape(1, -1), 25e3)
    rise = np.hypot(*np.gradient(made[0], 25e3))
    np.testing.assert_allclose(rise, 1 / 100e3, rtol=0.01)
