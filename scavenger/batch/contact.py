"""How a scavenger and its main scheduler get on, from the calls and the ledger: what is told of it.
Decides the sentences only.
"""

from __future__ import annotations

from scavenger.batch.calls import CallLog
from scavenger.batch.lease_ledger import LeaseLedger
from scavenger.batch.look import ConfiguredSite
from scavenger.batch.pace import RequestBudget
from scavenger.interface import Contact


def contact(calls: CallLog, ledger: LeaseLedger, budget: RequestBudget, now: float) -> Contact:
    """What is told of it. ``now``: on the ledger's clock."""
    return Contact(
        calls.counts(),
        calls.backoff_s(),
        ledger.backing_off_s(now),
        calls.busy,
        budget.poll_after_s,
    )


def too_busy(title: str, calls: CallLog) -> str:
    """Why the scheduler is to be left alone; empty when it may be asked. ``title``: its name."""
    if calls.backoff_s() <= 0:
        return ""
    return f"{title} has too much to do just now: {calls.busy}"


def too_old(title: str, site: ConfiguredSite, oldest: tuple[int, int]) -> str:
    """That this release will not do."""
    least = ".".join(str(part) for part in oldest)
    return (
        f"{title} {site.called} is older than {least}, the oldest that MalleTrain supports; update "
        f"{title}."
    )
