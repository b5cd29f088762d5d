"""Notifies owners about their jobs by mail, web hook or command.

Decides who is notified of what, once each. The position in the audit log up to which owners are
notified is stored before a notification is sent, so a daemon that dies in between sends none twice.
Code of a user runs only as that user: commands are only for jobs of the daemon's own user.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import urllib.request
from email.message import EmailMessage
from typing import Any

import structlog

from malletrain.config.notify import NotifySection
from malletrain.daemon.accounts import Accounts
from malletrain.daemon.core import Core
from malletrain.daemon.job_repository import decode_spec
from malletrain.protocol import env
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.messages import JobSpec, Notification
from malletrain.store.records import EventRow, JobRow

OCCASION: dict[str, str] = {
    EventKind.JOB_STARTED: "start",
    EventKind.JOB_COMPLETED: "end",
    EventKind.JOB_CANCELLED: "end",
    EventKind.JOB_FAILED: "failure",
    EventKind.GOAL_STANDING: "at-risk",
}
AT_RISK = ("at_risk", "infeasible", "missed")
"""Of the standings of a deadline or budget those that an owner is told of."""
WORDS: dict[str, str] = {
    EventKind.JOB_STARTED: "has started",
    EventKind.JOB_COMPLETED: "is completed",
    EventKind.JOB_CANCELLED: "was cancelled",
    EventKind.JOB_FAILED: "failed",
    EventKind.GOAL_STANDING: "will hardly be done as its owner wants it",
}
LOOK_S = 5.0
"""How long to wait for news at most; what matters is that events wake it."""
REST_S = 0.2
"""What comes within it is looked for at once: each look reads and writes, and thousands of nodes
may join in a few seconds.
"""
PATIENCE_S = 30.0
"""How long a mail program, a web hook or a command may take."""
PAGE = 500
MOST = 10
"""Notifications of one job."""

log = structlog.get_logger(__name__)


def refused(spec: JobSpec, user: str, accounts: Accounts, settings: NotifySection) -> str:
    """Why the daemon would not tell whom ``spec`` names, as a sentence; empty: it would."""
    own = not accounts.of(user)
    if len(spec.notify) > MOST:
        return f"A job tells {MOST} addresses at most."
    for one in spec.notify:
        if one.kind not in ("mail", "webhook", "command") or set(one.on) - set(OCCASION.values()):
            return f"A notification by '{one.kind}' of {', '.join(one.on)} is not known."
        if any(ord(character) < 32 for character in one.to) or len(one.to) > 2000:
            return "Whom to notify has a character that is none, or too many of them."
        if one.kind == "command" and not own:
            return (
                "Commands of --notify run as the daemon's own user, whose job this is not; give a "
                "mail address."
            )
        if one.kind == "webhook" and not (own or settings.webhooks):
            return (
                "This daemon calls no web hooks of its users ([notify] webhooks); give a mail "
                "address."
            )
        if one.kind == "webhook" and not one.to.startswith(("http://", "https://")):
            return f"'{one.to}' is no address of a web hook."
        if one.kind == "mail" and not os.access(settings.sendmail, os.X_OK):
            return (
                f"The daemon's host has no program {settings.sendmail} ([notify] sendmail), so it "
                "can send no mail."
            )
    return ""


class Notices:
    """Tells owners what happened to their jobs."""

    def __init__(self, core: Core, settings: NotifySection) -> None:
        self._core = core
        self.settings = settings
        self._telling: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until it is cancelled."""
        store = self._core.store
        seq = store.last_notified()
        if seq is None:  # a database of before: the past is past
            newest = store.last_events(1)
            seq = newest[-1].seq if newest else 0
            store.set_last_notified(seq)
        while True:
            newest = store.last_events(1)
            page = store.events_since(seq, PAGE, kinds=OCCASION)
            for event in page:
                if (row := store.get_job(event.job)) is not None:
                    self._tell(event, row)
            looked = (page if len(page) == PAGE else newest)[-1:]
            if looked and looked[0].seq > seq:
                seq = looked[0].seq
                store.set_last_notified(seq)
            else:
                await self._core.audit.news(LOOK_S)
                await asyncio.sleep(REST_S)

    def _tell(self, event: EventRow, row: JobRow) -> None:
        spec = decode_spec(row.spec)
        occasion = OCCASION[event.kind]
        meant = [one for one in spec.notify if occasion in one.on]
        if not meant:
            return
        if occasion == "at-risk" and event.data.get("standing") not in AT_RISK:
            return
        if occasion == "start":
            first = self._core.store.job_events(row.id, [EventKind.JOB_STARTED])[0]
            if first.seq != event.seq:  # it had no nodes for a while
                return
        for one in meant:
            task = asyncio.get_running_loop().create_task(self._deliver(one, event, row))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _deliver(self, one: Notification, event: EventRow, row: JobRow) -> None:
        facts = facts_of(event, row)
        try:
            await asyncio.to_thread(deliver, one, facts, self.settings.sendmail)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            log.warning("not notified", job=row.id, to=one.to, reason=str(error))
            with self._core.transaction():
                self._core.audit.record(
                    EventKind.JOB_NOTICE,
                    f"{one.to} could not be told that the job {WORDS[event.kind]}: {error}",
                    job=row.id,
                )


def facts_of(event: EventRow, row: JobRow) -> dict[str, Any]:
    """What is told of an event."""
    words = WORDS[event.kind]
    why = str(event.data.get("sentence", ""))
    if event.data.get("standing") == "missed":
        words = "was not done as its owner wanted it"
    return {
        "text": f"Job {row.id} ({row.name}) of {row.owner} {words}. {why}".strip(),
        "event": OCCASION[event.kind],
        "job": row.id,
        "name": row.name,
        "owner": row.owner,
        "state": row.state,
        "reason": row.reason,
        "samples": row.samples,
        # JSON has no number for what is none
        "metrics": {k: v if math.isfinite(v) else None for k, v in row.metrics.items()},
        "time": event.time,
    }


def deliver(one: Notification, facts: dict[str, Any], sendmail: str) -> None:
    """Tell one address.

    Raises:
        OSError: it could not be told; so do ValueError and SubprocessError.
    """
    if one.kind == "webhook":
        request = urllib.request.Request(
            one.to,
            json.dumps(facts).encode(),
            {"Content-Type": "application/json", "User-Agent": "malletrain"},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            answer.read(1)
        return
    if one.kind == "mail":
        mail = EmailMessage()
        mail["To"] = one.to
        mail["Subject"] = f"malletrain: {facts['text'].partition('.')[0]}"[:200]
        mail["Auto-Submitted"] = "auto-generated"
        mail.set_content(facts["text"] + "\n")
        _run([sendmail, "-t", "-i"], mail.as_bytes(), {})
        return
    environment = {
        f"{env.JOB}_{key.upper()}": str(facts[key])
        for key in ("event", "name", "owner", "state", "reason")
    }
    environment[env.JOB] = facts["job"]
    _run(["/bin/sh", "-c", one.to], json.dumps(facts).encode(), environment)


def _run(argv: list[str], text: bytes, variables: dict[str, str]) -> None:
    done = subprocess.run(
        argv,
        input=text,
        env={**os.environ, **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        timeout=PATIENCE_S,
        start_new_session=True,
        check=False,
    )
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip()[-300:]
        raise OSError(f"{argv[0]} ended with {done.returncode}{f': {words}' if words else ''}")
