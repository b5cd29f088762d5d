"""Loads the state of an optimizer that gets further parameter groups during training, as in
fine-tuning that unfreezes layers step by step.

If the optimizer has all saved groups, the state is loaded at once. Otherwise the state of its
present groups is loaded at once, and the full state right before its next update. Until then the
script must add the other groups with ``add_param_group()``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from malletrain.training.snapshot_file import SnapshotError


def load(optimizer: Any, state: Mapping[str, Any], source: str) -> None:
    """Load ``state`` into ``optimizer``.

    Args:
        optimizer: a ``torch.optim.Optimizer``.
        state: a result of its ``state_dict()``, with at least as many groups.
        source: description of the state, for messages.

    Raises:
        SnapshotError: at the optimizer's next update, if groups are still missing.
        ValueError: the state does not fit for another reason (raised by torch).
    """
    saved = state["param_groups"]
    groups = optimizer.param_groups
    if len(groups) >= len(saved) or _sizes(groups) != _sizes(saved[: len(groups)]):
        optimizer.load_state_dict(state)
        return
    first = saved[: len(groups)]
    numbers = {number for group in first for number in group["params"]}
    entries = {key: entry for key, entry in state["state"].items() if key in numbers}
    optimizer.load_state_dict({**state, "state": entries, "param_groups": first})

    def complete(optimizer: Any, *_: Any) -> None:
        handle.remove()
        groups = optimizer.param_groups
        if _sizes(groups) != _sizes(saved):
            raise SnapshotError(
                f"{source} is of {len(saved)} parameter groups with {_sizes(saved)} tensors, and "
                f"the script's {type(optimizer).__name__} has {_sizes(groups)}. A script that adds "
                "groups while it trains must add them again after a restart, before the first "
                "step: write `if epoch >= 2 and len(optimizer.param_groups) == 1:`, not "
                "`if epoch == 2:`."
            )
        optimizer.load_state_dict(state)

    handle = optimizer.register_step_pre_hook(complete)


def _sizes(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]
