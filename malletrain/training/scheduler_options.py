"""Options of torch's schedulers that a snapshot of another job replaces. A job that is requeued
with other arguments continues with the old ``T_max``, which is part of the scheduler's state.

Decides which options differ, and tells the user. It compares numbers, strings, and lists, arrays
and dicts of them. Other values, and values whose comparison fails, count as equal. There is no
message

* about a snapshot of the same job with the same arguments: there only the training itself, or the
  number of ranks, can have changed an option;
* with a sampler with a batch per rank: rates and numbers of steps may follow the number of ranks;
* about rates, if the number of ranks differs: the script may compute them from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from numbers import Number
from typing import Any

from malletrain.training import owner, report
from malletrain.training.objects import all_epochs_of, state_of, unwrapped
from malletrain.training.ranks import rank_and_world

_RATES = {"base_lrs", "max_lrs", "eta_min"}
"""Options that are learning rates."""
_OPTIONS = {
    *("T_max", "T_0", "T_mult", "total_steps", "total_iters", "step_size", "gamma", "milestones"),
    *("_milestones", "start_factor", "end_factor", "factor", "power", "total_size", "step_ratio"),
    *("patience", "cooldown", "threshold"),
}
"""Other attributes of torch's schedulers that the script sets and that a state includes."""
_FOLLOWING = {
    *("ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "ExponentialLR"),
    *("LinearLR", "MultiStepLR", "OneCycleLR", "PolynomialLR", "StepLR"),
}
"""torch's schedulers whose ``step(epoch)`` sets the rate of any epoch. Others take a metric or
nothing, or compute the rate from the one before.
"""
_MAX_ITEMS = 1000
"""Maximum number of items of a value that is compared."""
_MAX_TEXT = 60
"""Maximum length of a value in the message, characters."""


def tell_other_options(objects: Mapping[str, Any], payload: Mapping[str, Any], name: str) -> None:
    """Tell the user which options of schedulers a snapshot is about to replace. Raises nothing.

    Args:
        objects: the script's objects, by name; others than torch's schedulers are ignored.
        payload: the snapshot.
        name: path of the snapshot.
    """
    rank, world_size = rank_and_world()
    previous_run = owner.owner_of(payload)
    if rank != 0 or previous_run is None or previous_run.is_same(owner.this_run()):
        return
    if any(getattr(e, "script_batch_size", 0) is None for e in all_epochs_of(objects)):
        return
    options = _OPTIONS | _RATES if payload.get("world_size") == world_size else _OPTIONS
    for object_name, value in objects.items():
        try:
            state = payload["objects"][object_name]
            differences = list(_differences_of(unwrapped(value), state, options))
        except Exception:  # of the script's object: a message must not stop the training
            continue
        if differences:
            text = ", ".join(f"{key} = {old} (script: {new})" for key, new, old in differences)
            report.tell(
                f"The scheduler {object_name!r} continues with the options of snapshot {name}, "
                f"which differ from those of this script: {text}. {_advice(unwrapped(value))}",
                once=f"options of {object_name} in {name}",
            )


def _advice(scheduler: Any) -> str:
    kind = type(scheduler)
    if kind.__name__ not in _FOLLOWING or kind.__module__ != "torch.optim.lr_scheduler":
        return "The scheduler keeps the snapshot's values."
    return (
        "To follow the script's: own = scheduler.state_dict() before restore(), and after it "
        'scheduler.load_state_dict({**own, "last_epoch": scheduler.last_epoch}) and '
        "scheduler.step(scheduler.last_epoch). To set the options alone is not enough."
    )


def _differences_of(target: Any, state: Any, options: set[str]) -> Iterator[tuple[str, str, str]]:
    from torch.optim.lr_scheduler import LRScheduler

    if isinstance(target, LRScheduler):
        yield from _differences(state_of(target), state, options)


def _differences(new: Any, old: Any, options: set[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (option, text of the new value, text of the old value) for each of ``options`` that
    differs between two states of a scheduler and of its inner ones.
    """
    if isinstance(new, dict) and isinstance(old, dict):
        for key in (key for key in new if key in old):
            if key not in options:
                yield from _differences(new[key], old[key], options)
            elif (texts := _texts_if_different(key, new[key], old[key])) is not None:
                yield (key, *texts)
    elif isinstance(new, list | tuple) and isinstance(old, list | tuple):
        for new_item, old_item in islice(zip(new, old, strict=False), _MAX_ITEMS):
            yield from _differences(new_item, old_item, options)


def _texts_if_different(option: str, new: Any, old: Any) -> tuple[str, str] | None:
    """Return both values for the message; None if they are equal or cannot be compared."""
    try:
        new, old = _plain_value(new), _plain_value(old)
        if option in _RATES and isinstance(new, list) and len(new) != len(old):
            return None  # the script adds parameter groups during the training
        return None if new == old else (_text_of(new), _text_of(old))
    except Exception:  # of the script's values
        return None


def _plain_value(value: Any) -> Any:
    """Return ``value`` as numbers, strings, lists and dicts. Raises TypeError for other values."""
    if value is None or isinstance(value, str | Number):
        return "nan" if value != value else value
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    else:  # a tensor, or an array of numpy
        count = value.numel() if hasattr(value, "numel") else value.size
        if count > _MAX_ITEMS or value.dtype == object:
            raise TypeError("it cannot be compared")
        return _plain_value(value.tolist())
    if len(items) > _MAX_ITEMS:
        raise TypeError("it cannot be compared")
    plain_items = {key: _plain_value(item) for key, item in items}
    return plain_items if isinstance(value, Mapping) else list(plain_items.values())


def _text_of(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
