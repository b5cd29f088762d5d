"""The part of ``malletrain check`` for the effects of minimum charges and lease lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from malletrain.config.model import Config


def accounting(config: Config) -> Iterator[tuple[bool | None, str]]:
    """Reports the minimum charge, the minimum length and the power of nodes."""
    from malletrain.config.units import show_duration
    from malletrain.core.gaps import least_horizon_s
    from malletrain.daemon.site.settings import controller_settings

    settings = controller_settings(config)
    min_gap_s, charge_s = least_horizon_s(settings), settings.min_charge_s
    expected_s = config.gaps.expected_length
    batch = config.scheduler.kind != "local"
    where = f"[scheduler.{config.scheduler.kind}]"
    if settings.due_s:
        why = "costs that much anyway" if charge_s >= settings.min_lease_s else "the site wants"
        due = show_duration(settings.due_s)
        yield (
            True,
            f"Gaps expected to last less than {show_duration(min_gap_s)} are not leased; a lease "
            f"is kept for {due}, which {why}, while its user has work for it.",
        )
        if batch and expected_s < settings.due_s:
            yield (
                None,
                f"A gap is expected to last {show_duration(expected_s)} until the site's own were "
                f"seen (expected_length in [gaps]), so at first no gap younger than some minutes "
                "may be leased.",
            )
    else:
        yield True, "Leases are given back as soon as no job needs them (no min_charge)."
    limit_s = getattr(config.scheduler.table, "time_limit", None)
    if limit_s is not None and limit_s < settings.due_s:
        yield (
            False,
            f"Leases last {show_duration(limit_s)} at most (time_limit in {where}), less than "
            f"min_charge in [accounting] or min_lease in {where} want; make time_limit longer.",
        )
    watts = config.accounting.watts_by_class
    if watts:
        classes = {"default", *config.gaps.classes}
        unknown = sorted(watts.keys() - classes)
        if unknown:
            yield (
                False,
                f"watts in [accounting] names {', '.join(unknown)}, which is no class of nodes; "
                f"classes are {', '.join(sorted(classes))} (classes in [gaps]).",
            )
        elif missing := sorted(set(config.gaps.classes) - watts.keys()):
            yield None, f"watts in [accounting] says nothing of {', '.join(missing)}; kWh lack it."
        else:
            yield True, "Usage and metrics report kWh by node class."
