"""A function as a job: its folder, its specification and its result.

Decides where the function's folder is and what its result is. :mod:`malletrain.training.functions`
runs on the nodes; :mod:`malletrain.api.functions` waits for the end.
"""

from __future__ import annotations

import errno
import inspect
import os
import pickle
import re
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from malletrain.api.options import FunctionOptions, SubmitOptions, size_limits, spec_of
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
"""Folder of functions, relative to the working directory."""
MAX_VISIBILITY_DELAY_S = 15.0
"""Maximum time until a shared file system shows a result that was written on a node, seconds."""


def function_spec(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    named: dict[str, Any],
    options: FunctionOptions,
) -> JobSpec:
    """Return the job that calls ``function``. Writes the pickled function into a new folder below
    the job's working directory.

    Args:
        function: the function.
        args: its positional arguments.
        named: its keyword arguments.
        options: options of the job.

    Raises:
        TypeError: the function does not take these arguments, or they cannot be pickled.
        SpecError: an option is invalid.
    """
    check_arguments(function, args, named)
    job_options: dict[str, Any] = dict(options)
    tries = job_options.pop("tries", None)
    if tries is not None and (type(tries) is not int or tries < 1):
        raise SpecError(
            f"tries is {tries!r}; accepted is 1 or more: in how many rounds of its job the "
            "function may be called. Without it, in each.",
            "tries",
        )
    low, high = size_limits(job_options)
    if tries is not None and low != high:
        raise SpecError(
            f"tries={tries} goes with a fixed number of nodes, not with {low}:{high}: whenever its "
            "nodes change the function is called from the beginning.",
            "tries",
        )
    if tries is not None:
        job_options.setdefault("profile", False)
    name = name_of(function, options.get("name"))
    workdir = Path(os.path.abspath(os.path.expanduser(options.get("workdir", "."))))
    folder = new_folder(workdir, name)
    script = pack(folder, "call", function, args, named, tries or 0)
    spec = spec_of(script, (), {**job_options, "name": name})
    return with_snapshots_bound(msgspec.structs.replace(spec, workdir=str(workdir)))


def name_of(function: Callable[..., Any], name: str | None) -> str:
    """Return the name of a function's job."""
    text = str(name or getattr(function, "__name__", "") or type(function).__name__)
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip("-._+")[:64] or "function"


def new_folder(workdir: Path, name: str) -> Path:
    """Return the path of a new folder for a function below a working directory."""
    return workdir / FOLDER / f"{name}-{uuid.uuid4().hex[:12]}"


def check_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]
) -> None:
    """Check that the function takes these arguments.

    Args:
        function: the function.
        args: its positional arguments.
        named: its keyword arguments.

    Raises:
        TypeError: it does not, or would take an option of jobs as a ``**`` argument.
    """
    name = getattr(function, "__name__", repr(function))
    option_names = {*FunctionOptions.__annotations__, *SubmitOptions.__annotations__}
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin has no signature to check
        return
    takes_keywords = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    options = [word for word in named if word in option_names and word not in signature.parameters]
    if options:
        word = options[0]
        raise TypeError(
            f"{word}= is an option of jobs and would become an argument of {name}"
            f"{' by its **' if takes_keywords else ', which has none of that name'}. Give "
            "options of the "
            f'job as options={{"{word}": …}}, or to executor(); an argument of that name in a '
            "functools.partial."
        )
    try:
        signature.bind(*args, **named)
    except TypeError as error:
        raise TypeError(f"{name} cannot be called so: {error}.") from None


def result_of(detail: JobDetail) -> Any:
    """Return the result of the function of a job that has ended.

    Raises:
        FunctionLost: there is no result; the sentence says why.
        ClientError: the job does not run a function, or its files cannot be read.
        BaseException: what the function raised.
    """
    job = detail.job
    folder = Path(str(detail.spec.get("script", ""))).parent
    until = time.monotonic() + MAX_VISIBILITY_DELAY_S
    while True:
        is_late = time.monotonic() >= until
        try:
            _check_folder(folder, detail)
            result = outcome(folder, job.id, job.state == "completed")
        except OSError as error:
            if is_late or not is_stale(error):
                raise ClientError(
                    f"The result of job {job.id} ({job.name}) cannot be read: "
                    f"{error.filename or folder}: {error.strerror or error}."
                ) from error
        except (pickle.UnpicklingError, EOFError, KeyError, TypeError) as error:
            raise FunctionLost(
                f"The result of job {job.id} ({job.name}) in {folder} is damaged "
                f"({type(error).__name__}: {error}). Submit the function again."
            ) from error
        else:
            if is_late or result is not None or job.state != "completed":
                break
        time.sleep(0.2)
    if result is None or job.state == "cancelled":
        why = job.reason or detail.failure.strip() or "nothing more is known"
        raise FunctionLost(f"Job {job.id} ({job.name}) was {job.state} without a result: {why}")
    return result.result()


def is_stale(error: OSError) -> bool:
    """Return whether a file on NFS was replaced while it was read, so that the next attempt reads
    the new one.
    """
    return error.errno == errno.ESTALE


def _check_folder(folder: Path, detail: JobDetail) -> None:
    """Check that ``folder`` is that of a function of this user.

    Raises:
        FunctionLost: it is no longer there.
        ClientError: it is not the folder of a function, or it is another user's.
        OSError: it cannot be read.
    """
    job = detail.job
    try:
        os.stat(folder / FUNCTION)
    except (FileNotFoundError, NotADirectoryError):
        if folder.parts[-len(FOLDER.parts) - 1 : -1] == FOLDER.parts and not folder.exists():
            raise FunctionLost(
                f"The folder {folder} of the function of job {job.id} ({job.name}) is not there: "
                "it was deleted, and the result with it, or this machine does not see it."
            ) from None
        raise ClientError(
            f"Job {job.id} ({job.name}) is a script's and not a function's, so it has no result; "
            "read its logs or its files."
        ) from None
    if os.stat(folder).st_uid != os.getuid():  # unpickling runs code
        raise ClientError(
            f"The result of job {job.id} is {job.owner}'s, in {folder}; reading it would run code "
            "of its owner as you."
        )
