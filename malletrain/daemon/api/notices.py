"""Notifies owners about their jobs by mail, web hook or command.

Decides which owner is notified of which event. The position in the audit log up to which owners are
notified is stored before a notification is sent, so a daemon that dies in between sends none twice.
Code of a user runs only as that user, so commands are only for jobs of the daemon's own user.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import urllib.request
from email.message import EmailMessage
from http.client import HTTPException, InvalidURL
from typing import Any

import structlog

from malletrain.config.sections import NotifySection
from malletrain.daemon.engine.parties import Accounts
from malletrain.daemon.engine.state import SiteState
from malletrain.daemon.engine.transactions import Transactions
from malletrain.daemon.jobs.repository import decode_spec
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
"""Standings of a deadline or budget of which the owner is notified."""
WORDS: dict[str, str] = {
    EventKind.JOB_STARTED: "has started",
    EventKind.JOB_COMPLETED: "is completed",
    EventKind.JOB_CANCELLED: "was cancelled",
    EventKind.JOB_FAILED: "failed",
    EventKind.GOAL_STANDING: "will hardly be done as its owner wants it",
}
MAX_INTERVAL_S = 5.0
"""Maximum time between two checks of the audit log, seconds. New events end the wait."""
MIN_INTERVAL_S = 0.2
"""Minimum time between two checks, seconds. Each check reads and writes, and thousands of nodes may
join in a few seconds.
"""
DELIVERY_TIMEOUT_S = 30.0
"""Time-out of a mail program, a web hook or a command, seconds."""
PAGE = 500
"""Number of events that are read together."""
MAX_NOTIFICATIONS = 10
"""Maximum number of notifications of one job."""

log = structlog.get_logger(__name__)


def refused(spec: JobSpec, user: str, accounts: Accounts, settings: NotifySection) -> str:
    """Return why the daemon refuses the notifications of a job, as a sentence; empty if it does
    not.

    Args:
        spec: specification of the job.
        user: owner of the job.
        accounts: the users of the daemon.
        settings: section [notify] of the configuration.
    """
    is_daemon_user = not accounts.of(user)
    if len(spec.notify) > MAX_NOTIFICATIONS:
        return f"A job notifies {MAX_NOTIFICATIONS} addresses at most."
    for notification in spec.notify:
        if notification.kind not in ("mail", "webhook", "command") or set(notification.on) - set(
            OCCASION.values()
        ):
            return (
                f"A notification by '{notification.kind}' of {', '.join(notification.on)} is not "
                "known."
            )
        if any(ord(character) < 32 for character in notification.to) or len(notification.to) > 2000:
            return "The address to notify has a control character, or too many characters."
        if notification.kind == "command" and not is_daemon_user:
            return (
                "Commands of --notify run as the daemon's own user, whose job this is not; give a "
                "mail address."
            )
        if notification.kind == "webhook" and not (is_daemon_user or settings.webhooks):
            return (
                "This daemon calls no web hooks of its users ([notify] webhooks); give a mail "
                "address."
            )
        if notification.kind == "webhook" and not notification.to.startswith(
            ("http://", "https://")
        ):
            return f"'{notification.to}' is no address of a web hook."
        if notification.kind == "mail" and not os.access(settings.sendmail, os.X_OK):
            return (
                f"The daemon's host has no program {settings.sendmail} ([notify] sendmail), so it "
                "can send no mail."
            )
    return ""


class Notices:
    """Notifies owners of events of their jobs."""

    def __init__(
        self, state: SiteState, transactions: Transactions, settings: NotifySection
    ) -> None:
        self._state = state
        self._transactions = transactions
        self.settings = settings
        self._deliveries: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Send notifications until cancelled."""
        store = self._state.store
        seq = store.last_notified()
        if seq is None:  # a database of an earlier version: do not notify of its events
            newest = store.last_events(1)
            seq = newest[-1].seq if newest else 0
            store.set_last_notified(seq)
        while True:
            newest = store.last_events(1)
            page = store.events_since(seq, PAGE, kinds=OCCASION)
            for event in page:
                if (row := store.get_job(event.job)) is not None:
                    self._notify(event, row)
            last_read = (page if len(page) == PAGE else newest)[-1:]
            if last_read and last_read[0].seq > seq:
                seq = last_read[0].seq
                store.set_last_notified(seq)
            else:
                await self._state.audit.news(MAX_INTERVAL_S)
                await asyncio.sleep(MIN_INTERVAL_S)

    def _notify(self, event: EventRow, row: JobRow) -> None:
        spec = decode_spec(row.spec)
        occasion = OCCASION[event.kind]
        selected = [notification for notification in spec.notify if occasion in notification.on]
        if not selected:
            return
        if occasion == "at-risk" and event.data.get("standing") not in AT_RISK:
            return
        if occasion == "start":
            first = self._state.store.job_events(row.id, [EventKind.JOB_STARTED])[0]
            if first.seq != event.seq:  # it had no nodes for a while
                return
        for notification in selected:
            task = asyncio.get_running_loop().create_task(self._deliver(notification, event, row))
            self._deliveries.add(task)
            task.add_done_callback(self._deliveries.discard)

    async def _deliver(self, notification: Notification, event: EventRow, row: JobRow) -> None:
        facts = facts_of(event, row)
        try:
            await asyncio.to_thread(deliver, notification, facts, self.settings.sendmail)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            log.warning("not notified", job=row.id, to=notification.to, reason=str(error))
            with self._transactions.begin():
                self._state.audit.record(
                    EventKind.JOB_NOTICE,
                    f"{notification.to} could not be notified that the job {WORDS[event.kind]}: "
                    f"{error}",
                    job=row.id,
                )


def facts_of(event: EventRow, row: JobRow) -> dict[str, Any]:
    """Return the contents of a notification."""
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
        # JSON has no NaN or infinity
        "metrics": {k: v if math.isfinite(v) else None for k, v in row.metrics.items()},
        "time": event.time,
    }


def deliver(notification: Notification, facts: dict[str, Any], sendmail: str) -> None:
    """Send one notification.

    Args:
        notification: address, and how to reach it.
        facts: contents of the notification.
        sendmail: path of the mail program.

    Raises:
        OSError: the notification could not be sent; so do ValueError and SubprocessError.
    """
    if notification.kind == "webhook":
        request = urllib.request.Request(
            notification.to,
            json.dumps(facts).encode(),
            {"Content-Type": "application/json", "User-Agent": "malletrain"},
            method="POST",
        )
        try:
            with urllib.request.urlopen(request, timeout=DELIVERY_TIMEOUT_S) as answer:
                answer.read(1)
        except OSError:  # some of these are HTTPExceptions, too
            raise
        except InvalidURL as error:
            raise ValueError(str(error)) from error
        except HTTPException as error:
            raise OSError(f"its answer is not HTTP ({type(error).__name__})") from error
        return
    if notification.kind == "mail":
        mail = EmailMessage()
        mail["To"] = notification.to
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
    _run(["/bin/sh", "-c", notification.to], json.dumps(facts).encode(), environment)


def _run(argv: list[str], text: bytes, variables: dict[str, str]) -> None:
    process = subprocess.run(
        argv,
        input=text,
        env={**os.environ, **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        timeout=DELIVERY_TIMEOUT_S,
        start_new_session=True,
        check=False,
    )
    if process.returncode:
        words = process.stderr.decode(errors="replace").strip()[-300:]
        raise OSError(f"{argv[0]} ended with {process.returncode}{f': {words}' if words else ''}")
