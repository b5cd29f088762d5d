"""Learning rates that a script computes from a counter of its loop, as ``epoch + i / len(loader)``
with the ``i`` of ``enumerate()``. Where a run goes on in the middle of an epoch that counter begins
anew, and the rate goes back.

Decides whether the first update after a restore is made at such a rate. Rates of a scheduler that
is part of the snapshot are not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from malletrain.training import report
from malletrain.training.objects import schedules, unwrapped
from malletrain.training.snapshot_file import SnapshotError

_JUMP = 3
"""A rate that turns back by more than so many times its last move goes back to an earlier one."""


class LoopRates:
    """The rates of the optimizers among a script's objects, update by update.

    Args:
        objects: by name.
        epochs: the sampler among them, if any.
    """

    def __init__(self, objects: Mapping[str, Any], epochs: Any) -> None:
        self._epochs = epochs
        self._rates: dict[str, dict[str, list[float]]] = {}
        """Of each optimizer: at the first update of the epoch, at the last one and before it; and
        ``turned``, where the script itself has let them go back within an epoch, as warm restarts
        do: nothing can be told from a jump then.
        """
        self._expected: dict[str, dict[str, list[float]]] = {}
        if epochs is None or not hasattr(epochs, "position") or schedules(objects):
            return
        for name, value in objects.items():
            optimizer = unwrapped(value)
            while optimizer is not None and not hasattr(optimizer, "_optimizer_step_pre_hooks"):
                optimizer = getattr(optimizer, "optimizer", None)  # Accelerate's is around another
            if optimizer is not None:
                self._watch(name, optimizer)

    def _watch(self, name: str, optimizer: Any) -> None:
        def before_update(optimizer: Any, *_: Any) -> None:
            now = [group.get("lr") for group in optimizer.param_groups]
            if not all(isinstance(rate, int | float) for rate in now):  # a tensor of a GPU's, say
                return
            expected = self._expected.pop(name, None)
            if expected:
                _check(name, expected, now)
            rates = self._rates.setdefault(name, {"first": now, "last": now, "before": now})
            if self._epochs.position == 0:
                rates["first"] = now
            elif not expected and _goes_back(rates, now):
                rates["turned"] = now
            rates["before"], rates["last"] = rates["last"], now

        optimizer.register_step_pre_hook(before_update)

    def state(self) -> dict[str, dict[str, list[float]]]:
        """What :meth:`restore` takes."""
        return {name: dict(rates) for name, rates in self._rates.items()}

    def restore(self, saved: Mapping[str, dict[str, list[float]]]) -> None:
        """The run goes on from a snapshot with these rates: look at the next update."""
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


def _check(name: str, saved: Mapping[str, list[float]], now: list[float]) -> None:
    """Raises SnapshotError where the rate has gone back."""
    if "turned" not in saved and _goes_back(saved, now):
        raise SnapshotError(
            f"The learning rate of {name!r} has gone back: the last update before the restart was "
            f"made at {saved['last'][0]:g}, and the next one would be at {now[0]:g}. The script "
            "computes it from a counter of its loop, such as that of enumerate(), which begins "
            "anew where a run goes on in the middle of an epoch. Compute it from "
            "sampler.epoch + sampler.position / sampler.num_samples, from a number of steps in a "
            "dict that Snapshot is given, or use a scheduler."
        )


def _goes_back(rates: Mapping[str, list[float]], now: list[float]) -> bool:
    """Whether a rate turns back by more than it has moved of late, or is that of the epoch's first
    update again.
    """
    if not all(len(rates[name]) == len(now) for name in ("first", "last", "before")):
        return False  # a parameter group has come meanwhile
    turns = any(
        (rate - last) * (last - before) < 0 and abs(rate - last) > _JUMP * abs(last - before)
        for rate, last, before in zip(now, rates["last"], rates["before"], strict=True)
    )
    return turns or rates["last"] != now == rates["first"]
