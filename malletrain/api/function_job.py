"""A function as a job: its folder and its specification before, its result afterwards.

Decides where the function's folder is and what came of it. What runs on the nodes is
:mod:`malletrain.training.functions`; who waits for the end is :mod:`malletrain.api.functions`.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from malletrain.api.options import SubmitOptions, spec_of
from malletrain.client import ClientError
from malletrain.protocol.messages import JobSpec
from malletrain.protocol.views import JobDetail
from malletrain.submission.resuming import with_snapshots_bound
from malletrain.training.functions import FUNCTION, FunctionLost, outcome, pack

FOLDER = Path(".malletrain") / "functions"
"""Below the working directory."""
SEEN_WITHIN_S = 15.0
"""How long a shared file system may take to show a result that was written on a node."""


def function_spec(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    named: dict[str, Any],
    options: SubmitOptions,
) -> JobSpec:
    """The job that calls ``function``; the function is packed into a folder of its own below the
    job's working directory.
    """
    text = str(options.get("name") or getattr(function, "__name__", "") or type(function).__name__)
    name = re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip("-._+")[:64] or "function"
    workdir = Path(os.path.abspath(os.path.expanduser(options.get("workdir", "."))))
    folder = workdir / FOLDER / f"{name}-{uuid.uuid4().hex[:12]}"
    script = pack(folder, "call", function, args, named)
    spec = spec_of(script, (), {**options, "name": name})
    return with_snapshots_bound(msgspec.structs.replace(spec, workdir=str(workdir)))


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
    made = outcome(folder)
    until = time.monotonic() + SEEN_WITHIN_S
    while made is None and job.state == "completed" and time.monotonic() < until:
        time.sleep(0.2)
        made = outcome(folder)
    if made is None or job.state == "cancelled":
        why = job.reason or detail.failure.strip() or "nothing more is known"
        raise FunctionLost(f"Job {job.id} ({job.name}) was {job.state} without a result: {why}")
    return made.result()
