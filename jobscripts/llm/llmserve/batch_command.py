"""``llmserve batch`` and ``llmserve status`` on the head node: check the input, submit the job,
show how far it is. Nothing stays running here.
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
"""Seconds after which a status is old: nobody dispatches."""
FOLLOW_S = 1.0
BAR = 30
"""Characters of the bar."""
MEMBER = """\"\"\"The process of a node of this batch.\"\"\"

import sys

from llmserve.cli import main

sys.exit(main(["batch-member", *sys.argv[1:]]))
"""


@dataclass(frozen=True)
class BatchSubmission:
    """A batch as it is submitted."""

    requests: Path
    output: Path
    model: str
    """Path or name of the model, as the engine is started with it."""
    name: str
    """Name of the model, as the requests call it."""
    tokenizer: str
    nodes: str
    """``MIN:MAX``."""
    job_name: str
    """Empty: after the output."""
    job: SubmitOptions = field(default_factory=SubmitOptions)
    """Further options of the job, as of ``malletrain.Client.submit``."""


def submit_batch(options: BatchSubmission, member_words: Sequence[str]) -> str:
    """Check a batch and submit its job. Returns a sentence.

    Args:
        options: of the batch.
        member_words: arguments of each process.

    Raises:
        BatchInputError: lines of the input are wrong.
        BatchFolderError: the output is another's, or a job works on it.
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
        raise BatchFolderError(f"{options.output} is there already; name another output.")
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
                f"Job {manifest.job} works on {options.output} already. See how far it is: "
                f"llmserve status {options.output}"
            )
        script = folder.path / "member.py"
        script.write_text(MEMBER)
        job = client.submit(script, member_words, **_job_options(options))
    folder.set_job(job.id)
    begun = len(requests)
    resumed = " Answers that are there are kept." if is_resumed else ""
    return (
        f"job {job.id}: {begun} requests.{resumed} See how far it is: "
        f"llmserve status {options.output}"
    )


def _job_options(options: BatchSubmission) -> SubmitOptions:
    """The options of the job; a batch sets some itself."""
    env = dict(options.job.get("env", {}))
    paths = os.environ.get("PYTHONPATH")
    if paths and not any(options.job.get(name) for name in OTHER_PYTHON):
        env.setdefault("PYTHONPATH", paths)  # the Python is this one, and finds what it finds here
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
        return True  # the daemon does not know it any more


def _end_of(job: str) -> str:
    """The state in which a job ended; empty if it has not, or the daemon does not answer."""
    if not job:
        return ""
    try:
        with Client() as client:
            view = client.job(job).view
            return view.state if view.ended is not None else ""
    except RuntimeError:
        return ""


def show_status(output: Path, *, follow: bool) -> int:
    """Print how far a batch is. Returns an exit code.

    Args:
        output: of the batch.
        follow: print it again until the output is there, or its job has ended without.

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
        state = "" if folder.is_done else _end_of(manifest.job)
        is_done = folder.is_done  # perhaps since then
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
    """Returns how far a batch is, for people.

    Args:
        manifest: of the batch.
        status: the newest one that its dispatcher wrote; empty: none.
        is_done: whether the output is there.
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
    job = manifest.job
    if not job and not status:
        return [*lines, "It has no job: the submission failed. Give the same command again."]
    if ended:
        lines.append(
            f"Job {job} has ended ({ended}) before the batch was complete. See why: malletrain "
            f"show {job}. Answers are kept: give the same command again."
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
            f"No node has dispatched for {age:.0f} s. See whether the job has nodes: malletrain "
            f"show {job}"
        )
    for replica in status.get("replicas", ()):
        if not is_fresh and not replica.get("sentence"):
            continue  # only what went wrong there still matters
        loaded = replica.get("load_s")
        load = "" if loaded is None else f", loaded in {loaded:.1f} s"
        lines.append(
            f"  {replica['name']}: {replica['state']}, {replica['running']} of "
            f"{replica['slots']} slots{load}"
        )
        if replica.get("sentence"):
            lines += [f"    {line}" for line in str(replica["sentence"]).splitlines()]
    return lines
