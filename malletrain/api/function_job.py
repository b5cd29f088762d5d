"""A function as a job: its folder and its specification before, its result afterwards.

Decides where the function's folder is and what came of it. What runs on the nodes is
:mod:`malletrain.training.functions`; who waits for the end is :mod:`malletrain.api.functions`.
"""

from __future__ import annotations

import inspect
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from malletrain.api.options import FunctionOptions, SubmitOptions, limits_of, spec_of
from malletrain.client import ClientError
from malletrain.protocol.messages import JobSpec
from malletrain.protocol.views import JobDetail
from malletrain.submission.error import SpecError
from malletrain.submission.resuming import with_snapshots_bound
from malletrain.training.functions import (
    FUNCTION,
    FunctionLost,
    outcome,
    pack,
)

FOLDER = Path(".malletrain") / "functions"
"""Below the working directory."""
SEEN_WITHIN_S = 15.0
"""How long a shared file system may take to show a result that was written on a node."""


def function_spec(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    named: dict[str, Any],
    options: FunctionOptions,
) -> JobSpec:
    """The job that calls ``function``; the function is packed into a folder of its own below the
    job's working directory.

    Raises:
        TypeError: the function does not take these arguments, or they cannot be sent; the sentence
            says so.
        SpecError: it cannot be a job.
    """
    check_arguments(function, args, named)
    own: dict[str, Any] = dict(options)
    tries = own.pop("tries", None)
    if tries is not None and (type(tries) is not int or tries < 1):
        raise SpecError(
            f"tries is {tries!r}; accepted is 1 or more: in how many rounds of its job the "
            "function may be called. Without it, in each.",
            "tries",
        )
    low, high = limits_of(own.get("nodes", 1))
    if tries is not None and low != high:
        raise SpecError(
            f"tries={tries} goes with a fixed number of nodes, not with {low}:{high}: whenever its "
            "nodes change the function is called from the beginning.",
            "tries",
        )
    if tries is not None:
        own.setdefault("profile", False)
    text = str(options.get("name") or getattr(function, "__name__", "") or type(function).__name__)
    name = re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip("-._+")[:64] or "function"
    workdir = Path(os.path.abspath(os.path.expanduser(options.get("workdir", "."))))
    folder = workdir / FOLDER / f"{name}-{uuid.uuid4().hex[:12]}"
    script = pack(folder, "call", function, args, named, tries or 0)
    spec = spec_of(script, (), {**own, "name": name})
    return with_snapshots_bound(msgspec.structs.replace(spec, workdir=str(workdir)))


def check_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]
) -> None:
    """Look whether the function takes these arguments.

    Raises:
        TypeError: it does not, or swallows by ``**`` what is an option of jobs.
    """
    name = getattr(function, "__name__", repr(function))
    option_names = {*FunctionOptions.__annotations__, *SubmitOptions.__annotations__}
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of one that is not written in Python nothing is known
        return
    swallows = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    options = [word for word in named if word in option_names and word not in signature.parameters]
    if options:
        word = options[0]
        raise TypeError(
            f"{word}= is an option of jobs and would become an argument of {name}"
            f"{' by its **' if swallows else ', which has none of that name'}. Give options of the "
            f'job as options={{"{word}": …}}, or to executor(); an argument of that name in a '
            "functools.partial."
        )
    try:
        signature.bind(*args, **named)
    except TypeError as error:
        raise TypeError(f"{name} cannot be called so: {error}.") from None


def result_of(detail: JobDetail) -> Any:
    """What the function of a job that has ended returned.

    Raises:
        FunctionLost: it has none; the sentence says why.
        ClientError: the job is no function's.
        BaseException: what the function raised.
    """
    folder = Path(str(detail.spec.get("script", ""))).parent
    if not (folder / FUNCTION).is_file():
        raise ClientError(
            f"Job {detail.job.id} ({detail.job.name}) is a script's and not a function's, so it "
            "has no result; read its logs or its files."
        )
    if os.stat(folder).st_uid != os.getuid():  # reading a pickle runs what is in it
        raise ClientError(
            f"The result of job {detail.job.id} is {detail.job.owner}'s, in {folder}; reading it "
            "would run code of its owner as you."
        )
    job = detail.job
    made = outcome(folder, job.id, job.state == "completed")
    until = time.monotonic() + SEEN_WITHIN_S
    while made is None and job.state == "completed" and time.monotonic() < until:
        time.sleep(0.2)
        made = outcome(folder, job.id, job.state == "completed")
    if made is None or job.state == "cancelled":
        why = job.reason or detail.failure.strip() or "nothing more is known"
        raise FunctionLost(f"Job {job.id} ({job.name}) was {job.state} without a result: {why}")
    return made.result()
