"""Detects learning rates that a script computes from a counter of its loop, such as ``epoch + i /
len(loader)`` with the ``i`` of ``enumerate()``. If a run resumes in the middle of an epoch, that
counter starts again at 0, and the rate goes back.

Decides whether the first update after a restore uses such a rate. Does not check the rates of a
scheduler that is part of the snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from malletrain.training import report
from malletrain.training.objects import has_schedulers, unwrapped
from malletrain.training.snapshot_file import SnapshotError

SCRIPT_RATE = "malletrain_script_lr"
"""Entry of a parameter group during an update whose learning rate the library has scaled: the rate
that the script has set.
"""
_MIN_JUMP_RATIO = 3
"""Minimum ratio of a rate's move in the opposite direction to its last move, above which the rate
counts as gone back.
"""


class LoopRates:
    """The learning rates of a script's optimizers, recorded at each update.

    Args:
        objects: the script's objects, by name.
        epochs: the sampler among them, or None.
    """

    def __init__(self, objects: Mapping[str, Any], epochs: Any) -> None:
        self._epochs = epochs
        self._rates: dict[str, dict[str, list[float]]] = {}
        """Rates by optimizer: ``first`` at the first update of the epoch, ``last`` at the last
        update, ``before`` at the update before it. ``turned`` is present if the rates have gone
        back within an epoch without a restore, as with warm restarts; then a jump proves nothing.
        """
        self._expected: dict[str, dict[str, list[float]]] = {}
        if epochs is None or not hasattr(epochs, "position") or has_schedulers(objects):
            return
        for name, value in objects.items():
            optimizer = unwrapped(value)
            while optimizer is not None and not hasattr(optimizer, "_optimizer_step_pre_hooks"):
                # Accelerate's optimizer wraps another
                optimizer = getattr(optimizer, "optimizer", None)
            if optimizer is not None:
                self._watch(name, optimizer)

    def _watch(self, name: str, optimizer: Any) -> None:
        def before_update(optimizer: Any, *_: Any) -> None:
            current = [g.get(SCRIPT_RATE, g.get("lr")) for g in optimizer.param_groups]
            # a rate may be a tensor, for example on a GPU
            if not all(isinstance(rate, int | float) for rate in current):
                return
            expected = self._expected.pop(name, None)
            if expected:
                _check(name, expected, current)
            rates = self._rates.setdefault(
                name, {"first": current, "last": current, "before": current}
            )
            if self._epochs.position == 0:
                rates["first"] = current
            elif not expected and _goes_back(rates, current):
                rates["turned"] = current
            rates["before"], rates["last"] = rates["last"], current

        optimizer.register_step_pre_hook(before_update)

    def state(self) -> dict[str, dict[str, list[float]]]:
        """Return the state for :meth:`restore`."""
        return {name: dict(rates) for name, rates in self._rates.items()}

    def restore(self, saved: Mapping[str, dict[str, list[float]]]) -> None:
        """Use the rates of a snapshot, and check the next update against them."""
        self._rates = {name: dict(rates) for name, rates in saved.items()}
        if self._epochs is None or not getattr(self._epochs, "position", 0):
            return
        self._expected = {name: rates for name, rates in self._rates.items() if _moves(rates)}
        if self._expected:
            report.tell(
                "This run goes on in the middle of an epoch, and its script sets the learning rate "
                "at each step. A counter of the loop, such as that of enumerate(), begins anew "
                "here: compute the rate from sampler.epoch and sampler.position.",
                once="loop rates",
            )


def _moves(rates: Mapping[str, list[float]]) -> bool:
    return rates["last"] != rates["before"]


def _check(name: str, saved: Mapping[str, list[float]], current: list[float]) -> None:
    """Raise SnapshotError if the rate has gone back."""
    if "turned" not in saved and _goes_back(saved, current):
        raise SnapshotError(
            f"The learning rate of {name!r} has gone back: the last update before the restart was "
            f"made at {saved['last'][0]:g}, and the next one would be at {current[0]:g}. The "
            "script computes it from a counter of its loop, such as that of enumerate(), which "
            "begins anew where a run goes on in the middle of an epoch. Compute it from "
            "sampler.epoch + sampler.position / sampler.num_samples, from a number of steps in a "
            "dict that Snapshot is given, or use a scheduler."
        )


def _goes_back(rates: Mapping[str, list[float]], current: list[float]) -> bool:
    """Return whether a rate moves back by more than :data:`_MIN_JUMP_RATIO` times its last move, or
    is again the rate of the epoch's first update.
    """
    if not all(len(rates[name]) == len(current) for name in ("first", "last", "before")):
        return False  # a parameter group was added meanwhile
    turns = any(
        (rate - last) * (last - before) < 0
        and abs(rate - last) > _MIN_JUMP_RATIO * abs(last - before)
        for rate, last, before in zip(current, rates["last"], rates["before"], strict=True)
    )
    return turns or rates["last"] != current == rates["first"]
