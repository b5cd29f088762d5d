"""The condition of a scavenger's connection to its main scheduler, from the calls and the ledger.
Decides only the sentences.
"""

from __future__ import annotations

from scavenger.batch.calls import CallLog
from scavenger.batch.lease_ledger import LeaseLedger
from scavenger.batch.look import ConfiguredSite
from scavenger.batch.pace import RequestBudget
from scavenger.interface import Contact


def contact(calls: CallLog, ledger: LeaseLedger, budget: RequestBudget, now: float) -> Contact:
    """Return the condition of the connection. ``now``: on the ledger's clock."""
    return Contact(
        calls.counts(),
        calls.backoff_s(),
        ledger.backing_off_s(now),
        calls.busy,
        budget.poll_after_s,
    )


def too_busy(title: str, calls: CallLog) -> str:
    """Return why the scheduler must not be asked now; empty if it may be. ``title``: its name."""
    if calls.backoff_s() <= 0:
        return ""
    return f"{title} has too much to do just now: {calls.busy}"


def too_old(title: str, site: ConfiguredSite, oldest: tuple[int, int]) -> str:
    """Return the sentence that this release is too old."""
    required = ".".join(str(part) for part in oldest)
    return (
        f"{title} {site.display_name} is older than {required}, the oldest that MalleTrain "
        f"supports; update {title}."
    )
