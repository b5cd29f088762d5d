"""The user's state as one list of tensors and one small skeleton, so that it can be sent, compared
and put back.

Decides what belongs to the state (every object with ``state_dict``, plain dicts, the random number
generators, the counters of the run) and whether two processes have the same kind of model. It sends
nothing (:mod:`malletrain.elastic.transfer`).
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from malletrain.elastic.rooms import Rooms
from malletrain.elastic.switches import set_switches, switches_of
from malletrain.training import rng
from malletrain.training.module_numbers import ModuleNumbers
from malletrain.training.objects import check_object, load_state, state_of, unwrapped
from malletrain.training.snapshot_file import SnapshotError


class StateError(RuntimeError):
    """State that cannot be taken, sent or put back; the message says whose."""


@dataclass(frozen=True)
class Slot:
    """Where a tensor was in the skeleton."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    cuda: bool


def _take_out(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        plain = value.detach()
        tensors.append(plain)
        return Slot(len(tensors) - 1, tuple(plain.shape), plain.dtype, plain.is_cuda)
    if isinstance(value, dict):
        return {key: _take_out(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_take_out(item, tensors) for item in value]
    if type(value) is tuple:
        return tuple(_take_out(item, tensors) for item in value)
    return value


def _put_in(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, Slot):
        return tensors[value.index]
    if isinstance(value, dict):
        return {key: _put_in(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_put_in(item, tensors) for item in value]
    if type(value) is tuple:
        return tuple(_put_in(item, tensors) for item in value)
    return value


def _slots(value: Any) -> Iterator[Slot]:
    if isinstance(value, Slot):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _slots(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _slots(item)


class Holder:
    """The objects of one run. ``device``: where tensors of a peer's GPU go here."""

    def __init__(self, objects: dict[str, Any], device: torch.device) -> None:
        for name, value in objects.items():
            check_object("elastic.Run", name, value)
        self.objects = objects
        self.device = device
        self._numbers = ModuleNumbers(objects)
        self.rooms = Rooms(device)

    def modules(self) -> dict[str, torch.nn.Module]:
        """The modules among the objects, without their wrappings."""
        return {
            name: m
            for name, value in self.objects.items()
            if isinstance(m := unwrapped(value), torch.nn.Module)
        }

    def _states(self) -> dict[str, Any]:
        states: dict[str, Any] = {}
        for name, value in self.objects.items():
            target = unwrapped(value)
            try:
                states[name] = state_of(target)
            except Exception as error:
                raise StateError(
                    f"The state of {name!r} ({type(target).__name__}) cannot be taken: {error}"
                ) from error
        return states

    def signature(self) -> str:
        """The same for two processes whose models have the same tensors."""
        described = [
            f"{name}.{key} {tuple(t.shape)} {t.dtype}"
            for name, module in self.modules().items()
            for key, t in module.state_dict().items()
            if isinstance(t, torch.Tensor)
        ]
        described += [
            f"{name}: {type(unwrapped(value)).__name__}" for name, value in self.objects.items()
        ]
        return hashlib.sha256("\n".join(described).encode()).hexdigest()

    def pack(self, counters: dict[str, Any]) -> tuple[bytes, list[torch.Tensor]]:
        """(skeleton, tensors); the tensors are the live ones, nothing is copied. Raises
        StateError.
        """
        tensors: list[torch.Tensor] = []
        skeleton = {"objects": {}, "rng": _take_out(rng.state(), tensors), "counters": counters}
        skeleton["switches"] = {name: switches_of(m) for name, m in self.modules().items()}
        skeleton["numbers"] = self._numbers.changed()
        for name, state in self._states().items():
            skeleton["objects"][name] = _take_out(state, tensors)
            try:
                pickle.dumps(skeleton["objects"][name])
            except Exception as error:
                raise StateError(
                    f"The state of {name!r} cannot be sent to another process: {error}"
                ) from error
        return pickle.dumps(skeleton), tensors

    def destinations(self, packed: bytes, in_place: bool = True) -> tuple[Any, list[torch.Tensor]]:
        """(skeleton, tensors to receive into): ``in_place`` the modules' own where they fit, so
        that a large model is never there twice.
        """
        skeleton = pickle.loads(packed)
        tensor_of_slot: dict[int, torch.Tensor] = {}
        for name, module in self.modules().items() if in_place else ():
            own = module.state_dict()
            theirs = skeleton["objects"].get(name, {})
            for key, slot in theirs.items():
                mine = own.get(key)
                if isinstance(slot, Slot) and isinstance(mine, torch.Tensor) and _fits(mine, slot):
                    tensor_of_slot[slot.index] = mine.detach()
        slots = sorted(_slots(skeleton), key=lambda slot: slot.index)
        return skeleton, [
            tensor_of_slot[s.index] if s.index in tensor_of_slot else self._room(s) for s in slots
        ]

    def _room(self, slot: Slot) -> torch.Tensor:
        if (ready := self.rooms.take(slot.shape, slot.dtype, slot.cuda)) is not None:
            return ready
        device = self.device if slot.cuda else torch.device("cpu")
        return torch.empty(slot.shape, dtype=slot.dtype, device=device)

    def put_back(self, skeleton: Any, tensors: list[torch.Tensor]) -> dict[str, Any]:
        """Have the objects hold what was received; returns the counters. Raises StateError."""
        for name, value in self.objects.items():
            if name not in skeleton["objects"]:
                raise StateError(
                    f"The peers hold nothing called {name!r}; all workers must run the same script."
                )
            target, state = unwrapped(value), _put_in(skeleton["objects"][name], tensors)
            try:
                load_state(target, state, f"The peers' state of {name!r}")
            except Exception as error:
                reason = " ".join(str(error).split())
                raise StateError(
                    f"The peers' state of {name!r} does not fit the {type(target).__name__} "
                    f"here: {reason}"
                ) from error
        for name, module in self.modules().items():
            set_switches(module, skeleton["switches"][name])
        self._numbers.put_back(skeleton["numbers"])
        rng.load(_put_in(skeleton["rng"], tensors))
        counters: dict[str, Any] = skeleton["counters"]
        return counters

    def digest(self) -> str:
        """A hash over every number of the state except the random generators: equal on ranks that
        are in step.
        """
        sha = hashlib.sha256()
        tensors: list[torch.Tensor] = []
        skeleton = _take_out(self._states(), tensors)
        sha.update(repr(skeleton).encode())
        for tensor in tensors:
            sha.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()


def _fits(mine: torch.Tensor, slot: Slot) -> bool:
    return (
        tuple(mine.shape) == slot.shape
        and mine.dtype == slot.dtype
        and mine.is_cuda == slot.cuda
        and mine.is_contiguous()
    )


__all__ = ["Holder", "SnapshotError", "StateError"]
