"""``llmserve batch`` and ``llmserve status`` on the head node: check the input, submit the job,
show its progress. Both commands end; no process stays on the head node.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmserve.batch_input import BatchInput
from llmserve.batch_store import BatchFolder, BatchFolderError, Manifest
from llmserve.job_options import OTHER_PYTHON
from llmserve.model_tokenizer import tokenizer_of
from malletrain import Client
from malletrain.cli.for_argparse import SubmitOptions

FRESH_S = 15.0
"""Age from which a status means that no process dispatches, seconds."""
FOLLOW_S = 1.0
NOT_SUBMITTED = "not submitted"
"""Shown instead of the final state of a job that the daemon does not know."""
BAR = 30
"""Characters of the bar."""
MEMBER_SCRIPT = """\"\"\"The process of a node of this batch.\"\"\"

import sys

from llmserve.cli import main

sys.exit(main(["batch-member", *sys.argv[1:]]))
"""


@dataclass(frozen=True)
class BatchSubmission:
    """A batch to submit."""

    requests: Path
    output: Path
    model: str
    """Path or name of the model with which the engine is started."""
    name: str
    """Name of the model in the requests."""
    tokenizer: str
    nodes: str
    """``MIN:MAX``."""
    job_name: str
    """Name of the job; empty: derived from the output."""
    job: SubmitOptions = field(default_factory=SubmitOptions)
    """Further options of the job, as keywords of ``malletrain.Client.submit``."""


def submit_batch(options: BatchSubmission, member_words: Sequence[str]) -> str:
    """Check a batch and submit its job. Return a sentence.

    Args:
        options: the options of the batch.
        member_words: arguments of each process.

    Raises:
        BatchInputError: lines of the input are wrong.
        BatchFolderError: the output belongs to another batch, or a job already works on it.
        malletrain.cli.for_argparse.SpecError: an option of the job is wrong.
        ValueError: there is no tokenizer, or no input.
        OSError: a file cannot be read or written.
        RuntimeError: the daemon cannot be reached, or refuses the job.
    """
    tokenizer = tokenizer_of(options.tokenizer)
    if not options.requests.is_file():
        raise ValueError(f"There is no file {options.requests}; name the file with the requests.")
    requests = BatchInput(options.requests)
    try:
        requests.check((options.name,), tokenizer)
    finally:
        requests.close()
    folder = BatchFolder(options.output)
    if options.output.exists() and folder.manifest() is None:
        raise BatchFolderError(f"{options.output} already exists; name another output.")
    with Client() as client:
        is_resumed = folder.create(
            Manifest(
                input=str(options.requests),
                digest=requests.digest,
                model=options.model,
                name=options.name,
                requests=len(requests),
                created=int(time.time()),
            )
        )
        if folder.is_done:
            return f"{options.output} is complete."
        manifest = folder.manifest()
        assert manifest is not None
        if manifest.job and not _has_ended(client, manifest.job):
            raise BatchFolderError(
                f"Job {manifest.job} already works on {options.output}. For its progress run: "
                f"llmserve status {options.output}"
            )
        script = folder.path / "member.py"
        script.write_text(MEMBER_SCRIPT)
        job = client.submit(script, member_words, **_job_options(options))
    folder.set_job(job.id)
    resumed = " Earlier answers are kept." if is_resumed else ""
    return (
        f"job {job.id}: {len(requests)} requests.{resumed} For its progress run: "
        f"llmserve status {options.output}"
    )


def _job_options(options: BatchSubmission) -> SubmitOptions:
    """Return the options of the job; a batch sets some itself."""
    env = dict(options.job.get("env", {}))
    paths = os.environ.get("PYTHONPATH")
    if paths and not any(options.job.get(name) for name in OTHER_PYTHON):
        env.setdefault("PYTHONPATH", paths)  # the job runs this Python, which needs these packages
    return {
        **options.job,
        "service": True,
        "value": "auto",
        "start_cost": "auto",
        "nodes": options.nodes,
        "name": options.job_name or f"batch-{options.output.stem}",
        "env": env,
    }


def _has_ended(client: Client, job: str) -> bool:
    try:
        return client.job(job).view.ended is not None
    except RuntimeError:
        return True  # the daemon has deleted it


def _end_of(job: str) -> str:
    """Return the state in which a job ended; empty if it has not, or the daemon does not answer."""
    if not job:
        return ""
    try:
        with Client() as client:
            view = client.job(job).view
            return view.state if view.ended is not None else ""
    except RuntimeError:
        return ""


def show_status(output: Path, *, follow: bool) -> int:
    """Print the progress of a batch. Return an exit code.

    Args:
        output: path of the output of the batch.
        follow: print it again until the output is complete, or the job has ended before.

    Raises:
        BatchFolderError: there is no batch.
    """
    folder = BatchFolder(output)
    is_terminal = sys.stdout.isatty()
    shown = ""
    while True:
        manifest = folder.manifest()
        if manifest is None:
            raise BatchFolderError(f"{folder.path} has no batch.")
        state = "" if folder.is_done else _end_of(manifest.job) if manifest.job else NOT_SUBMITTED
        is_done = folder.is_done  # it may have become complete meanwhile
        lines = status_lines(
            manifest, folder.status(), is_done=is_done, now=time.time(), ended=state
        )
        if not follow:
            print("\n".join(lines))
            return 1 if state and not is_done else 0
        if lines[0] != shown:
            shown = lines[0]
            width = shutil.get_terminal_size().columns
            print(
                f"\r{shown[:width]:<{width}}" if is_terminal else shown,
                end="" if is_terminal else "\n",
            )
            sys.stdout.flush()
        if is_done:
            print("" if is_terminal else f"{output} is complete.")
            return 0
        if state:
            print("\n".join(["", *lines[1:]]), file=sys.stderr)
            return 1
        time.sleep(FOLLOW_S)


def status_lines(
    manifest: Manifest,
    status: Mapping[str, Any],
    *,
    is_done: bool,
    now: float,
    ended: str = "",
) -> list[str]:
    """Return the progress of a batch as lines of text.

    Args:
        manifest: the manifest of the batch.
        status: the newest status that its dispatcher wrote; empty: there is none.
        is_done: whether the output is complete.
        now: seconds since the epoch.
        ended: state in which the job ended; empty: it has not.
    """
    answered, failed = int(status.get("answered", 0)), int(status.get("failed", 0))
    part = (answered + failed) / max(1, manifest.requests)
    bar = "█" * int(part * BAR) + "░" * (BAR - int(part * BAR))
    state = "complete" if is_done else f"{int(status.get('running', 0))} running"
    errors = f", {failed} failed" if failed else ""
    lines = [f"{bar} {part:4.0%}  {answered} of {manifest.requests} answered{errors}, {state}"]
    if is_done:
        return lines
    job = manifest.job or "(none)"
    if ended == NOT_SUBMITTED:
        lines.append(
            "It has no job. If it is not being submitted now, give the same command again."
        )
        return lines
    if ended:
        lines.append(
            f"Job {job} has ended ({ended}) before the batch was complete. For the reason run: "
            f"malletrain show {job}. Answers are kept: to continue, run the same command again."
        )
    if not status:
        return lines if ended else [*lines, f"Job {job} has no node yet."]
    age = now - float(status.get("at", 0.0))
    seconds = max(1e-6, float(status.get("seconds", 0.0)))
    rate = float(status.get("generated_tokens", 0)) / seconds
    lines.append(
        f"job {job}, dispatcher {status.get('dispatcher')}, epoch {status.get('epoch')}, "
        f"{rate:,.0f} tokens/s"
    )
    is_fresh = age <= FRESH_S and not ended
    if not is_fresh and not ended:
        lines.append(
            f"No node has dispatched for {age:.0f} s. To see whether the job has nodes run: "
            f"malletrain show {job}"
        )
    for replica in status.get("replicas", ()):
        if not is_fresh and not replica.get("sentence"):
            continue  # in an old status only the errors are of interest
        loaded = replica.get("load_s")
        load = "" if loaded is None else f", loaded in {loaded:.1f} s"
        lines.append(
            f"  {replica['name']}: {replica['state']}, {replica['running']} of "
            f"{replica['slots']} slots{load}"
        )
        if replica.get("sentence"):
            lines += [f"    {line}" for line in str(replica["sentence"]).splitlines()]
    return lines
