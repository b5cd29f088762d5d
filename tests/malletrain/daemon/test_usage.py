"""What the leases were used for, with known answers."""

from calendar import timegm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malletrain.daemon.api.usage import (
    JobHistory,
    Key,
    LeasedSpan,
    NodePower,
    Usage,
    by_month,
    kwh_of,
    spans_of,
    usage,
)
from malletrain.store.records import RescaleRow

NOVEMBER = float(timegm((2026, 11, 1, 0, 0, 0)))
DECEMBER = float(timegm((2026, 12, 1, 0, 0, 0)))
T = NOVEMBER + 36_000.0
END = T + 1_000_000.0


def row(generation, kind, to_nodes, first_sample, cost_s):
    return RescaleRow("j1", generation, kind, 0, to_nodes, T, T + first_sample, cost_s)


HISTORY = JobHistory(
    "ann",
    (
        row(1, "start", 2, 20.0, 20.0),  # trains on 2 from 20 to 100
        row(2, "up", 4, 110.0, 10.0),  # on 4 from 110 to 200
        row(3, "loss", 3, 230.0, 30.0),  # on 3 from 230 to its suspension
        row(4, "start", 1, 540.0, 40.0),  # on 1 from 540 to its end
    ),
    (T + 330.0, T + 1000.0),
    ((T, "a100"),),
    samples=1000.0,
)


def test_spans_of_a_job_that_starts_grows_loses_a_node_and_is_suspended():
    assert [(kind, nodes, a - T, b - T) for kind, nodes, a, b in spans_of(HISTORY)] == [
        ("starting", 2, 0, 20),
        ("trained", 2, 20, 100),
        ("rescaling", 4, 100, 110),
        ("trained", 4, 110, 200),
        ("lost", 3, 200, 230),
        ("trained", 3, 230, 330),
        ("starting", 1, 500, 540),
        ("trained", 1, 540, 1000),
    ]


def test_sums_and_energy():
    leases = [LeasedSpan("ann", "a100", T, T + 1000) for _ in range(4)]
    usages = usage(leases, [HISTORY], 0.0, END)
    key = Key("2026-11", "ann", "a100")
    trained = 2 * 80 + 4 * 90 + 3 * 100 + 460
    assert usages == {
        key: Usage(leased=4000, trained=trained, starting=80, rescaling=40, lost=90, samples=1000)
    }
    busy = trained + 80 + 40 + 90
    joules = busy * 1600 + (4000 - busy) * 300
    assert kwh_of(usages, {"a100": NodePower(300, 1600)}) == {key: pytest.approx(joules / 3.6e6)}
    assert kwh_of(usages, {"other": NodePower(1, 2)}) == {}


def test_one_kwh_is_a_kilowatt_for_an_hour():
    assert Usage(leased=3600.0, trained=3600.0).kwh(NodePower(0, 1000)) == 1.0
    assert Usage(leased=7200.0).kwh(NodePower(500, 1000)) == 1.0


def test_only_what_is_between_the_two_times_counts():
    leases = [LeasedSpan("ann", "a100", T, T + 1000)]
    total = usage(leases, [HISTORY], T + 60, T + 105)[Key("2026-11", "ann", "a100")]
    assert (total.leased, total.trained, total.rescaling) == (45, 2 * 40, 4 * 5)
    assert total.samples == pytest.approx(1000 * 80 / 1280)
    assert usage(leases, [HISTORY], T + 5000, END) == {}


def test_months_users_classes_and_accounts_are_kept_apart():
    leases = [
        LeasedSpan("ann", "a100", DECEMBER - 100, DECEMBER + 50),
        LeasedSpan("bob", "default", DECEMBER - 100, DECEMBER - 50),
        LeasedSpan("bob", "default", DECEMBER - 100, DECEMBER - 70, "lab"),
    ]
    usages = usage(leases, (), 0.0, DECEMBER + 1000)
    assert {key: each.leased for key, each in usages.items()} == {
        ("2026-11", "ann", "a100", ""): 100,
        ("2026-12", "ann", "a100", ""): 50,
        ("2026-11", "bob", "default", ""): 50,
        ("2026-11", "bob", "default", "lab"): 30,
    }


def test_nodes_of_a_job_that_never_reports_are_silent_and_not_without_a_job():
    """A function, or a script that calls no malletrain.report."""
    silent = JobHistory(
        "ann",
        (),
        (T + 400.0, T + 1000.0),
        ((T, "a100"), (T + 500.0, "a100")),
        moves=((T, 2), (T + 100.0, 3), (T + 500.0, 1)),
    )
    assert [(kind, nodes, a - T, b - T) for kind, nodes, a, b in spans_of(silent)] == [
        ("silent", 2, 0, 100),
        ("silent", 3, 100, 400),
        ("silent", 1, 500, 1000),
    ]
    leases = [LeasedSpan("ann", "a100", T, T + 1000) for _ in range(3)]
    (total,) = usage(leases, [silent], 0.0, END).values()
    assert (total.leased, total.silent, total.busy) == (3000, 1600, 1600)


def test_a_job_that_moves_to_another_class_counts_there():
    moved = JobHistory(
        "ann",
        (row(1, "start", 1, 10.0, 10.0), row(2, "same", 1, 110.0, 10.0)),
        (T + 200.0,),
        ((T, "a100"), (T + 90.0, "h100")),
    )
    usages = usage((), [moved], 0.0, END)
    assert {key.node_class: (each.trained, each.starting) for key, each in usages.items()} == {
        "a100": (90, 10),
        "h100": (90, 0),
    }
    assert usages[Key("2026-11", "ann", "h100")].rescaling == 10


@given(
    st.floats(0, 4e9),
    st.floats(0, 1e8),
)
def test_months_add_up_to_the_whole(begin, length):
    parts = list(by_month(begin, begin + length))
    assert sum(seconds for _, seconds in parts) == pytest.approx(length, abs=1e-3)
    assert len({month for month, _ in parts}) == len(parts)
