"""The state of a run as a list of tensors and a small skeleton, so that it can be sent, compared
and restored.

Decides what belongs to the state (every object with ``state_dict``, plain dicts, the random number
generators, the counters of the run) and whether the models of two processes have the same tensors.
Sends nothing (:mod:`malletrain.elastic.transfer`).

Decides also for which tensors a joiner allocates and touches memory while the other ranks still
train (:class:`Rooms`). When a script calls ``elastic.Run``, its model exists, and the state of its
optimizer does not: that comes with the first step, or from a peer. If a process first touches the
memory while it receives the state, all ranks wait for its page faults. Nothing depends on it: a
tensor without prepared memory is allocated when it arrives.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from malletrain.elastic import peer_pickles
from malletrain.elastic.module_modes import modes_of, set_modes
from malletrain.elastic.peer_pickles import exchanged
from malletrain.elastic.same_on_all import RATE_KEYS
from malletrain.training import parameter_order, rng
from malletrain.training.dict_tensors import DictTensors
from malletrain.training.module_attributes import ModuleAttributes, ModuleNumbers
from malletrain.training.objects import (
    check_object,
    load_state,
    names_by_optimizer,
    state_of,
    unwrapped,
)
from malletrain.training.snapshot_file import SnapshotError
from malletrain.training.unsaved_objects import UnsavedAverages

MIN_BYTES = 1 << 16
"""Minimum size of a tensor for which memory is prepared."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

Kind = tuple[tuple[int, ...], torch.dtype, bool]
"""Shape, dtype, and whether the tensor is on a GPU."""


def describe_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """Return, as JSON, the kinds of the tensors for which a joiner needs memory: those of the
    optimizers here. The list is empty until the optimizers have made their first step. Can be
    called from any thread; copies nothing.
    """
    tensors = []
    try:
        for optimizer in optimizers:
            for state in list(optimizer.state.values()):
                for value in list(state.values()):
                    if isinstance(value, torch.Tensor) and value.nbytes >= MIN_BYTES:
                        dtype = str(value.dtype).removeprefix("torch.")
                        tensors.append([list(value.shape), dtype, value.is_cuda])
    except (AttributeError, RuntimeError):  # the state changes meanwhile, or has another structure
        return "[]"
    return json.dumps(tensors)


def keep_freed() -> bool:
    """Make the C library keep freed memory for later allocations. Gradients and buckets are
    allocated again after every change of the group. If their pages had gone back to the kernel, all
    ranks would wait for page faults. Allocations of more than 32 MB are returned to the kernel
    anyway (mallopt(3), glibc).

    Returns:
        Whether the setting was made. It is not if the environment configures the allocator.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, 32 << 20)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))


class Rooms:
    """The prepared memory of one process. ``device``: device for what a peer has on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[Kind, list[torch.Tensor]] = defaultdict(list)

    def make(self, data: str) -> None:
        """Allocate memory for the tensors in ``data``, a result of :func:`describe_tensors`. A
        further call adds only what is missing.

        Raises:
            ValueError: ``data`` is not a result of :func:`describe_tensors`.
            MemoryError, RuntimeError: there is too little memory.
        """
        counts: dict[Kind, int] = defaultdict(int)
        for shape, dtype, cuda in json.loads(data):
            counts[tuple(shape), getattr(torch, dtype), cuda] += 1
        for kind, count in counts.items():
            shape, dtype, cuda = kind
            device = self._device if cuda else torch.device("cpu")
            while len(self._free[kind]) < count:
                self._free[kind].append(torch.empty(shape, dtype=dtype, device=device).fill_(0))

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, cuda: bool) -> torch.Tensor | None:
        """Return a prepared tensor; None if there is none.

        Args:
            shape: shape of the tensor.
            dtype: its dtype.
            cuda: whether the peer has it on a GPU.
        """
        free = self._free.get((shape, dtype, cuda))
        return free.pop() if free else None

    def clear(self) -> None:
        """Free the memory that was not used."""
        self._free.clear()


class StateError(RuntimeError):
    """The state of an object cannot be read, sent or restored. The message names the object."""


@exchanged
@dataclass(frozen=True)
class Slot:
    """The place of a tensor in the skeleton."""

    index: int
    """Index of the tensor in the list."""
    shape: tuple[int, ...]
    """Its shape."""
    dtype: torch.dtype
    """Its dtype."""
    cuda: bool
    """Whether it is on a GPU."""


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


def _counts_of(target: Any) -> dict[str, int | float]:
    """Return the attributes of an object that are plain numbers."""
    own = getattr(target, "__dict__", None)
    items = list(own.items()) if type(own) is dict else []
    return {key: value for key, value in items if type(value) in (int, float)}


class InitialCounts:
    """The numbers that objects of the script's own classes had when the run began.

    ``load_state_dict()`` of some classes adds the saved number to the one that the object has: that
    of Megatron-LM's ``OptimizerParamScheduler``, for example, makes as many steps as the saved one
    had made. In a new process the result is right. In one that has trained, the number has to be
    that of a new process first.

    Args:
        objects: the script's objects, by name. Those of torch and MalleTrain replace what they
            have, and are not looked at.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._counts: dict[str, dict[str, int | float]] = {}
        for name, value in objects.items():
            target = unwrapped(value)
            library = type(target).__module__.partition(".")[0] in ("torch", "malletrain")
            if not (isinstance(target, dict | torch.nn.Module) or library):
                self._counts[name] = _counts_of(target)

    def load(self, name: str, target: Any, state: Any, load: Callable[[], None]) -> None:
        """Load a state. If that added saved numbers to those of the object, load it again with
        these numbers as they were when the run began.

        Args:
            name: name of the object.
            target: the object, without wrappers.
            state: the state.
            load: loads the state into ``target``.

        Raises:
            Exception: the object's own error.
        """
        initial = self._counts.get(name, {})
        saved = state if isinstance(state, dict) else {}
        before = {
            key: count
            for key, count in _counts_of(target).items()
            if key in initial and count not in (0, initial[key])
        }
        load()
        after = _counts_of(target)
        added = [
            key
            for key, count in before.items()
            if type(number := saved.get(key)) in (int, float)
            and number
            and after.get(key) == count + number
        ]
        if added:
            vars(target).update({key: initial[key] for key in added})
            load()


class Holder:
    """The objects of one run. ``device``: device for tensors that a peer has on a GPU."""

    def __init__(self, objects: dict[str, Any], device: torch.device) -> None:
        for name, value in objects.items():
            check_object("elastic.Run", name, value)
        self.objects = objects
        self.device = device
        self._initial = InitialCounts(objects)
        self._numbers = ModuleNumbers(objects)
        self.dict_tensors = DictTensors(objects)
        self._attributes = ModuleAttributes("elastic.Run", objects)
        self._averages = UnsavedAverages("elastic.Run", objects)
        self.rooms = Rooms(device)

    def modules(self) -> dict[str, torch.nn.Module]:
        """Return the modules among the objects, without their wrappers."""
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
        """Return a hash that is equal in two processes if their models have the same tensors."""
        lines = [
            f"{name}.{key} {tuple(t.shape)} {t.dtype}"
            for name, module in self.modules().items()
            for key, t in module.state_dict().items()
            if isinstance(t, torch.Tensor)
        ]
        lines += [
            f"{name}: {type(unwrapped(value)).__name__}" for name, value in self.objects.items()
        ]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def pack(
        self, counters: dict[str, Any], for_peer: bool = True, by_name: bool = False
    ) -> tuple[bytes, list[torch.Tensor]]:
        """Return (skeleton, tensors). The tensors are those of the objects, not copies. Raises
        StateError.

        Args:
            counters: the counters of the run.
            for_peer: whether another process restores the state. It needs the names of the
                optimizers' parameters, and the user is told what the state does not have.
            by_name: whether that process knows names of exchanged classes, see
                :func:`malletrain.elastic.peer_pickles.dumps`.
        """
        if for_peer:
            self._attributes.tell_changed()
            self._averages.tell_unsaved()
        tensors: list[torch.Tensor] = []
        skeleton = {"objects": {}, "rng": _take_out(rng.state(), tensors), "counters": counters}
        skeleton["modes"] = {name: modes_of(m) for name, m in self.modules().items()}
        skeleton["numbers"] = self._numbers.changed()
        skeleton["dict_tensors"] = self.dict_tensors.record()
        skeleton["parameter_names"] = names_by_optimizer(self.objects) if for_peer else {}
        for name, state in self._states().items():
            skeleton["objects"][name] = _take_out(state, tensors)
            try:
                pickle.dumps(skeleton["objects"][name])
            except Exception as error:
                raise StateError(
                    f"The state of {name!r} cannot be sent to another process: {error}"
                ) from error
        return peer_pickles.dumps(skeleton, by_name), tensors

    def destinations(self, packed: bytes, in_place: bool = True) -> tuple[Any, list[torch.Tensor]]:
        """Return (skeleton, tensors to receive into). With ``in_place`` these are the modules' own
        tensors if they have the right shape and dtype, so that a large model is not in memory
        twice.
        """
        skeleton = pickle.loads(packed)
        tensor_of_slot: dict[int, torch.Tensor] = {}
        for name, module in self.modules().items() if in_place else ():
            local_state = module.state_dict()
            slot_of_key = skeleton["objects"].get(name, {})
            for key, slot in slot_of_key.items():
                local = local_state.get(key)
                if (
                    isinstance(slot, Slot)
                    and isinstance(local, torch.Tensor)
                    and _fits(local, slot)
                ):
                    tensor_of_slot[slot.index] = local.detach()
        slots = sorted(_slots(skeleton), key=lambda slot: slot.index)
        return skeleton, [
            tensor_of_slot[s.index] if s.index in tensor_of_slot else self._allocate(s)
            for s in slots
        ]

    def _allocate(self, slot: Slot) -> torch.Tensor:
        if (ready := self.rooms.take(slot.shape, slot.dtype, slot.cuda)) is not None:
            return ready
        device = self.device if slot.cuda else torch.device("cpu")
        return torch.empty(slot.shape, dtype=slot.dtype, device=device)

    def restore(self, skeleton: Any, tensors: list[torch.Tensor]) -> dict[str, Any]:
        """Load the received state into the objects. Return the counters. Raises StateError."""
        names = skeleton.get("parameter_names", {})
        for name, value in self.objects.items():
            if name not in skeleton["objects"]:
                raise StateError(
                    f"The peers hold nothing called {name!r}; all workers must run the same script."
                )
            target, packed = unwrapped(value), skeleton["objects"][name]
            load = partial(self._load, name, target, packed, tensors, names.get(name))
            try:
                self._initial.load(name, target, packed, load)
            except Exception as error:
                reason = " ".join(str(error).split())
                raise StateError(
                    f"The peers' state of {name!r} does not fit the {type(target).__name__} "
                    f"here: {reason}"
                ) from error
        for name, module in self.modules().items():
            set_modes(module, skeleton["modes"][name])
        self._numbers.restore(skeleton["numbers"])
        self.dict_tensors.restore(skeleton.get("dict_tensors", {}))
        rng.load(_put_in(skeleton["rng"], tensors))
        counters: dict[str, Any] = skeleton["counters"]
        return counters

    def _load(
        self,
        name: str,
        target: Any,
        packed: Any,
        tensors: list[torch.Tensor],
        saved_names: parameter_order.NamesByGroup | None,
    ) -> None:
        source, state = f"The peers' state of {name!r}", _put_in(packed, tensors)
        load_state(target, state, source, self.objects, saved_names, RATE_KEYS)

    def digest(self) -> str:
        """Return a hash over the whole state except the random number generators. It is equal on
        ranks with equal state.
        """
        sha = hashlib.sha256()
        tensors: list[torch.Tensor] = []
        states = self._states()
        for name, names in names_by_optimizer(self.objects).items():
            states[name] = parameter_order.by_name(states[name], names)
        skeleton = _take_out(states, tensors)
        sha.update(repr(skeleton).encode())
        for tensor in tensors:
            sha.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()


def _fits(tensor: torch.Tensor, slot: Slot) -> bool:
    return (
        tuple(tensor.shape) == slot.shape
        and tensor.dtype == slot.dtype
        and tensor.is_cuda == slot.cuda
        and tensor.is_contiguous()
    )


__all__ = ["Holder", "SnapshotError", "StateError"]
