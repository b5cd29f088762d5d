"""How far observations reach, the mask and the composite: tables and properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from windsr import WindsrError
from windsr.assimilate import (
    MAX_RADIUS,
    Thresholds,
    WindObservation,
    assimilate,
    composite,
    conditioned,
    impact_radius,
    read_observations,
    soft_mask,
    spread_innovations,
)
from windsr.fields import SPEED_UNITS

from tests.draws import cases

FLAT = np.zeros((21, 21))
observations = st.lists(
    st.builds(WindObservation, st.integers(0, 20), st.integers(0, 20), st.floats(0, 50)),
    min_size=1,
    max_size=6,
)
radii = st.floats(0, 8)


def cliff(at: int) -> np.ndarray:
    """Terrain of 0 m with 1,000 m from column ``at`` on."""
    return np.where(np.arange(21) >= at, 1000.0, 0.0)[None].repeat(21, axis=0)


@pytest.mark.parametrize(
    ("terrain", "wind", "expected"),
    [
        (FLAT, FLAT, 6),
        (cliff(11), FLAT, 1),  # at the foot: even the disk of 1 pixel holds the cliff
        (cliff(12), FLAT, 2),  # that of 1 is even, so it is 2, whatever that one holds
        (cliff(13), FLAT, 3),
        (cliff(15), FLAT, 5),
        (cliff(17), FLAT, 6),
        (FLAT, cliff(14) / 100, 4),  # a front in the wind stops it just so
    ],
)
def test_the_radius_ends_one_pixel_beyond_the_last_even_disk(terrain, wind, expected):
    """Algorithm 1 as published: d grows while the disk of d is even, and is what it then is."""
    assert impact_radius(terrain, wind, 10, 10, Thresholds(30.0, 0.5)) == expected


@pytest.mark.parametrize(
    ("largest", "terrain", "expected"),
    [(3, FLAT, 3), (9, FLAT, 9), (9, cliff(17), 7), (None, cliff(17), 7), (None, FLAT, 30)],
)
def test_the_cap_of_the_radius_is_a_parameter(largest, terrain, expected):
    """Without one an even field's radius is its diagonal, 21·√2."""
    assert impact_radius(terrain, FLAT, 10, 10, Thresholds(30.0, 0.5, largest)) == expected


def test_at_the_rim_of_the_field_only_what_is_inside_counts():
    assert impact_radius(cliff(8), FLAT, 0, 0, Thresholds(30.0, 0.5)) == 6


@given(st.integers(0, 2**32 - 1), st.floats(0, 300), st.floats(0, 300))
@settings(max_examples=cases(40), deadline=None)
def test_larger_thresholds_never_make_the_radius_smaller(seed, one, other):
    rng = np.random.default_rng(seed)
    terrain, wind = (
        100 * rng.standard_normal((21, 21)).cumsum(axis=0),
        rng.standard_normal((21, 21)).cumsum(axis=1),
    )
    low, high = sorted((one, other))
    small = impact_radius(terrain, wind, 10, 10, Thresholds(low, low / 50))
    large = impact_radius(terrain, wind, 10, 10, Thresholds(high, high / 50))
    assert 1 <= small <= large <= MAX_RADIUS


@given(observations, radii)
@settings(max_examples=cases(60), deadline=None)
def test_the_mask_is_one_at_stations_falls_off_and_ends_at_the_radius(observations, radius):
    mask, _ = soft_mask((21, 21), observations, [radius] * len(observations))
    rows, columns = np.indices((21, 21))
    nearest = np.min([np.hypot(rows - o.row, columns - o.column) for o in observations], axis=0)
    assert mask.min() >= 0
    assert mask.max() <= 1
    assert all(mask[o.row, o.column] == 1 for o in observations)
    assert (mask[nearest > radius] == 0).all()
    inside = (nearest <= radius) & (nearest > 0)
    if radius:
        np.testing.assert_allclose(
            mask[inside], np.exp(-2 * (nearest[inside] / radius) ** 2), rtol=1e-5
        )


@given(observations, radii, st.integers(0, 99))
@settings(max_examples=cases(60), deadline=None)
def test_the_composite_lies_between_model_and_observations_and_keeps_far_places(
    observations, radius, seed
):
    model = np.random.default_rng(seed).uniform(0, 30, (2, 21, 21))
    made, mask, used = assimilate(model, FLAT, observations, radius)
    low = np.minimum(model, min(o.value for o in observations))
    high = np.maximum(model, max(o.value for o in observations))
    assert (made >= low - 1e-3).all()
    assert (made <= high + 1e-3).all()
    np.testing.assert_array_equal(made[:, mask == 0], model[:, mask == 0])
    assert used == [radius] * len(observations)


def test_each_station_keeps_its_own_value_beside_another():
    two = [WindObservation(10, 10, 4.0), WindObservation(10, 12, 8.0)]
    made, _, _ = assimilate(np.full((21, 21), 1.0), FLAT, two, 6)
    assert made[10, 10] == pytest.approx(4.0, abs=1e-4)
    assert made[10, 12] == pytest.approx(8.0, abs=1e-4)
    assert made[10, 11] == pytest.approx(
        soft_mask((21, 21), two, [6, 6])[0][10, 11] * 6 + (1 - np.exp(-2 / 36)), abs=1e-4
    )


def test_innovations_keep_the_detail_that_pasting_flattens():
    detail = np.random.default_rng(0).uniform(-1, 1, (21, 21))
    truth, model = 8 + detail, 6 + detail  # the model is too calm by 2 m/s everywhere
    station = [WindObservation(10, 10, float(truth[10, 10]))]
    spread, mask, _ = spread_innovations(model, FLAT, station, 6)
    pasted, same, _ = assimilate(model, FLAT, station, 6)
    np.testing.assert_array_equal(mask, same)
    np.testing.assert_allclose(spread, model + 2 * mask, atol=1e-5)
    assert spread[10, 10] == pytest.approx(pasted[10, 10], abs=1e-5)
    near = mask > 0.6
    rough = [np.std((made - 8 - 2 * (mask - 1))[near]) for made in (spread, pasted)]
    assert rough[0] == pytest.approx(np.std(detail[near]), rel=1e-3)
    assert rough[1] < 0.5 * rough[0]


def test_innovations_never_make_a_wind_negative_and_are_each_members_own():
    model = np.stack([np.full((21, 21), 1.0), np.full((21, 21), 5.0)])
    model[0, 10, 10] = 9.0
    made, _, _ = spread_innovations(model, FLAT, [WindObservation(10, 10, 1.0)], 4)
    assert made.min() == 0.0
    assert made[:, 10, 10].tolist() == [1.0, 1.0]
    assert made[1, 10, 12] == pytest.approx(5 - 4 * np.exp(-0.5), abs=1e-4)


def test_the_condition_is_the_composite_of_each_field():
    plain = np.stack([np.full((21, 21), 4.0), np.full((21, 21), 6.0)])
    made, masks, used = conditioned(plain, FLAT, {1: [WindObservation(3, 3, 9.0)]}, 2)
    np.testing.assert_array_equal(made[0], plain[0])
    np.testing.assert_allclose(made[1], plain[1] + masks[1] * 3, atol=1e-5)
    assert masks[0].max() == 0
    assert used == [2.0]


def test_no_observation_leaves_the_model():
    made, mask, used = assimilate(np.full((21, 21), 3.0), FLAT, [])
    assert (made == 3.0).all()
    assert not mask.any()
    assert used == []


def test_the_formula():
    np.testing.assert_allclose(
        composite(np.array([[2.0]]), np.array([[0.25]]), np.array([[6.0]])), [[3.0]]
    )


@pytest.mark.parametrize(
    ("observation", "radius", "words"),
    [
        (WindObservation(21, 0, 1.0), 2, "outside of 21 × 21"),
        (WindObservation(0, 0, -1.0), 2, "cannot be"),
        (WindObservation(0, 0, float("nan")), 2, "cannot be"),
        (WindObservation(0, 0, 1.0), -2, "radius of -2"),
    ],
)
def test_what_cannot_be_is_refused(observation, radius, words):
    with pytest.raises(WindsrError, match=words):
        soft_mask((21, 21), [observation], [radius])


TIMES = np.array(["2017-06-02T15:00", "2017-06-03T15:00"], dtype="datetime64[s]")
AXIS = np.arange(4) * 2000.0


def test_observations_are_read_by_time_and_place(tmp_path):
    table = tmp_path / "o.csv"
    table.write_text(
        "time,y,x,wind_speed\n2017-06-03T15:00:00,2100,5900,7.5\n2017-06-02T15:00,0,0,1\n"
    )
    assert read_observations(table, TIMES, AXIS, AXIS) == {
        1: [WindObservation(1, 3, 7.5)],
        0: [WindObservation(0, 0, 1.0)],
    }


def test_observations_say_their_units(tmp_path, caplog):
    table = tmp_path / "o.csv"
    rows = ["time,y,x,wind_speed,units", "2017-06-03T15:00,0,0,36,km/h"]
    rows += ["2017-06-03T15:00,0,2000,20,KT ", "2017-06-03T15:00,0,4000,3,"]
    table.write_text("\n".join(rows))
    values = [each.value for each in read_observations(table, TIMES, AXIS, AXIS)[1]]
    assert values == pytest.approx([10.0, 20 * 1852 / 3600, 3.0])
    assert not caplog.records
    table.write_text("\n".join([rows[0], *2 * ["2017-06-03T15:00,0,0,3,mps"]]))
    assert [each.value for each in read_observations(table, TIMES, AXIS, AXIS)[1]] == [3.0, 3.0]
    assert [record.getMessage() for record in caplog.records] == [
        f"note: {table}: the units 'mps' are not known and taken for m/s; known are "
        f"{', '.join(SPEED_UNITS)}."
    ]


@pytest.mark.parametrize(
    ("places", "noted"),
    [(["52.1,4.3"], True), (["0,0", "2000,-50"], False), (["0,0"], False), (["-33,151"], True)],
)
def test_observations_in_degrees_are_noted(tmp_path, caplog, places, noted):
    table = tmp_path / "o.csv"
    rows = [f"2017-06-03T15:00,{place},3" for place in places]
    table.write_text("\n".join(["time,y,x,wind_speed", *rows]))
    axis = AXIS - 4000.0
    if places[-1].startswith("2000"):
        read_observations(table, TIMES, axis, axis)
    else:
        assert len(read_observations(table, TIMES, axis, axis)[1]) == len(places)
    assert [("look like latitudes" in r.getMessage()) for r in caplog.records] == [True] * noted


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("time,y,x\n2017-06-03T15:00,0,0\n", "line 2: columns time, y, x, wind_speed are needed"),
        ("time,y,x,wind_speed\n2017-06-03T15:00,0,0,fast\n", "line 2"),
        ("time,y,x,wind_speed\n2018-06-03T15:00,0,0,1\n", "there is no field at 2018"),
        ("time,y,x,wind_speed\n2017-06-03T15:00,0,9000,1\n", "outside of the grid"),
    ],
)
def test_a_bad_line_is_named(tmp_path, text, words):
    table = tmp_path / "o.csv"
    table.write_text(text)
    with pytest.raises(WindsrError, match=words):
        read_observations(table, TIMES, AXIS, AXIS)


@pytest.mark.parametrize("place", [("nan", "0"), ("0", "nan")])
def test_an_observation_at_no_number_is_refused(tmp_path, place):
    table = tmp_path / "observations.csv"
    y, x = place
    table.write_text(f"time,y,x,wind_speed\n2020-01-01T00:00:00,{y},{x},5\n")
    times = np.array(["2020-01-01T00:00:00"], "datetime64[s]")
    with pytest.raises(WindsrError, match="outside of the grid"):
        read_observations(table, times, np.arange(3.0), np.arange(3.0))
