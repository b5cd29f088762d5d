"""What the daemon writes for an agent, also for one of another version."""

from __future__ import annotations

import msgspec
import pytest

from malletrain.protocol.site_rules import HealthPlan, SharingRules, read, written


class StrictPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The health plan as early agents read it."""

    check: tuple[str, ...] = ()
    interval_s: float = 600.0
    timeout_s: float = 60.0
    gpus: bool = True


class NewerPlan(HealthPlan, frozen=True):
    """The health plan of a later version."""

    clock_error_s: float = 60.0


@pytest.mark.parametrize(
    "rules",
    [
        HealthPlan(("a b", "'", "$x"), 1.5, 2.5, False),
        HealthPlan(),
        SharingRules(5, "idle", bound_cpus=False),
    ],
    ids=repr,
)
def test_what_the_daemon_writes_an_agent_reads(rules):
    assert read(written(rules), type(rules)) == rules


def test_an_earlier_agent_does_not_see_a_new_field_at_its_default():
    from_configuration = float("60")
    text = written(NewerPlan(("nhc",), clock_error_s=from_configuration))
    assert msgspec.json.decode(text, type=StrictPlan) == StrictPlan(("nhc",))


def test_an_agent_ignores_what_it_does_not_know_and_refuses_what_does_not_fit():
    assert read(written(NewerPlan(("nhc",), clock_error_s=5.0)), HealthPlan) == HealthPlan(("nhc",))
    with pytest.raises(ValueError, match=r"Expected `float`.*interval_s"):
        read('{"interval_s": "often"}', HealthPlan)
