"""Boundaries that are one: between them a process neither notices anything nor tells anybody.

A change of nodes at one of two such boundaries is the change at the other one: no process can tell
them apart. A watched process (:class:`Watch`) sees each call of a Python function and of a function
of C between two of its points. Quiet are those that compute with the process's own objects:
operators of torch, optimizers, schedulers, containers. Any other one may read a flag, take part in
a collective or write a file, so what is not listed here ends the quiet.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

QUIET = "quiet.json"
"""File with the numbers of the points before which all was quiet since the last point."""

_MODULES = frozenset(
    (
        *("abc", "collections", "collections.abc", "contextlib", "copy", "enum", "functools"),
        *("json", "json.encoder", "math", "numbers", "re", "types", "typing", "warnings"),
        *("weakref", "_weakrefset"),
        *("torch.__future__", "torch._compile", "torch._jit_internal", "torch._ops"),
        *("torch._tensor", "torch._utils", "torch.accelerator", "torch.amp.grad_scaler"),
        *("torch.autograd.grad_mode", "torch.autograd.profiler", "torch.compiler"),
        *("torch.functional", "torch.jit", "torch.nn.functional", "torch.nn.parameter"),
        *("torch.overrides", "torch.profiler._cupti_monitor", "torch.utils._contextlib"),
        *("torch.utils._foreach_utils", "torch.utils._pytree", "torch.utils.hooks"),
        *("torch._dynamo.eval_frame", "torch._dynamo.decorators", "torch._dynamo.utils"),
        *("accelerate.optimizer", "transformers.trainer_callback"),
        *("lightning.pytorch.core.optimizer", "lightning.pytorch.profilers.profiler"),
        *("lightning.pytorch.profilers.base", "lightning.pytorch.plugins.precision.precision"),
        *("tests.zoo.quiet", "tests.zoo.trace"),
        # These use the script's own objects alone. The functions that they call are seen, too.
        *("malletrain.elastic.same_on_all", "malletrain.elastic.state"),
        *("malletrain.elastic.trained_objects", "malletrain.elastic.training"),
        *("malletrain.training.epoch_plan", "malletrain.training.objects"),
        *("malletrain.training.sampler", "malletrain.training.schedulers"),
        "malletrain.training.unsaved_objects",
    )
)
_FOLDERS = ("torch.optim.", "torch.nn.modules.", "torch.nn.utils.", "tests.zoo.scripts.")
_FUNCTIONS = {
    "malletrain.elastic.step": (
        *("_before_update", "_after_update", "_check_gradients", "checked_update", "weight"),
    ),
    "malletrain.elastic.run": ("loss_weight",),
    "malletrain.elastic.membership": ("group",),
    # Whether a peer is lost: the process at the boundary is the one that is lost, if any.
    "malletrain.elastic.group": ("several", "broken"),
    "malletrain.training.torch_private": ("versions", "in_place_changes", "<listcomp>"),
    "transformers.trainer": ("_get_learning_rate",),
    "os": ("__getitem__", "__contains__", "get", "encode", "decode"),
}
"""Functions, by module, of modules with others that are not quiet."""
_OF_C = frozenset(
    (
        *("builtins", "collections", "itertools", "math", "types", "typing"),
        *("_abc", "_collections", "_contextvars", "_functools", "_json", "_operator", "_struct"),
        *("_weakref", "torch", "torch._C", "torch._C._VariableFunctions", "torch._C._functorch"),
        *("torch._C._dynamo.eval_frame", "torch._C._nn", "torch._ops.profiler", "torch._tensor"),
        "torch.nn.parameter",
    )
)
"""Modules of functions of C, or of the objects whose methods they are."""
_LOUD = frozenset(("open", "print", "input", "exec", "eval", "__import__", "run_backward"))
"""Names of functions of these modules that are not quiet."""
_RECORDERS = ("tests.zoo.quiet", "tests.zoo.trace")
"""Modules that write for the driver, which no script reads."""


def is_quiet(event: str, frame: FrameType, function: Any) -> bool:
    """Whether a call, as :func:`sys.setprofile` tells of it, computes with own objects alone."""
    module = str(frame.f_globals.get("__name__"))
    if event == "call":
        functions = _FUNCTIONS.get(module, ())
        whole = module in _MODULES or module.startswith(_FOLDERS)
        return whole or frame.f_code.co_name in functions
    if event != "c_call" or module in _RECORDERS:
        return True
    return _module_of(function) in _OF_C and getattr(function, "__name__", "") not in _LOUD


def _module_of(function: Any) -> str:
    """Return the module of a function of C, or of the class whose method it is."""
    if own := getattr(function, "__module__", None):
        return str(own)
    owner = getattr(function, "__self__", None)
    if owner is None:
        kind = getattr(function, "__objclass__", None)
    else:
        kind = owner if isinstance(owner, type) else type(owner)
    return str(getattr(kind, "__module__", ""))


class Watch:
    """What a trace calls at each point of a watched process.

    Args:
        folder: where it writes :data:`QUIET`.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / QUIET
        self._thread = threading.get_ident()
        self._is_quiet = False
        self._numbers: list[int] = []

    def __call__(self, number: int) -> None:
        """Note whether all was quiet since the point before ``number``."""
        if threading.get_ident() != self._thread:
            self._is_quiet = False  # a point of another thread is a boundary of its own
            return
        sys.setprofile(None)
        if self._is_quiet:
            self._numbers.append(number)
        self._path.write_text(json.dumps(self._numbers))
        self._is_quiet = True
        sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, function: Any) -> None:
        if not is_quiet(event, frame, function):
            self._is_quiet = False
            sys.setprofile(None)


def groups(names: list[str], quiet: frozenset[int]) -> list[list[int]]:
    """Numbers of boundaries, those that are one together.

    Args:
        names: of all boundaries.
        quiet: those that are one with the boundary before.
    """
    together: list[list[int]] = []
    for number in range(len(names)):
        if together and number in quiet:
            together[-1].append(number)
        else:
            together.append([number])
    return together
