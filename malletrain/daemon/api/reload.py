"""Reloads the configuration while the daemon runs.

Decides which keys take effect at once. The others take effect at a restart, during which jobs
continue. An invalid file changes nothing. Both are reported.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import structlog

from malletrain.config.model import Config, changes, load_config, with_changes
from malletrain.core.events import Tick
from malletrain.daemon.api.notices import Notices
from malletrain.daemon.engine.state import SiteState
from malletrain.daemon.engine.transactions import Transactions
from malletrain.daemon.jobs.admission import RequestRefused
from malletrain.daemon.jobs.repository import Retention
from malletrain.daemon.site import logs
from malletrain.daemon.site.backends import gap_rules
from malletrain.protocol.event_kinds import EventKind
from scavenger.batch.scavenger import BatchScavenger
from scavenger.interface import Scavenger

log = structlog.get_logger(__name__)

AT_ONCE = frozenset(
    {
        *("daemon.log_level", "daemon.log_format", "daemon.operators"),
        *("gaps.partitions", "gaps.features", "gaps.nodes", "gaps.exclude"),
        *("gaps.reserve", "gaps.hours", "gaps.max_at_once", "gaps.idle_for", "gaps.hold"),
        *("jobs.max_running", "jobs.max_tries", "jobs.retry_window"),
        *("jobs.warmup_timeout", "jobs.no_progress_warning", "jobs.keep_logs"),
        *("accounting.watts", "accounting.keep"),
        *("notify.sendmail", "notify.webhooks"),
    }
)
"""Keys that take effect when they are reloaded."""

NEXT_JOBS = frozenset(
    {
        *("allocation.objective", "quotas.user_jobs", "quotas.account_jobs"),
        *("containers.runtime", "containers.image", "containers.binds", "containers.options"),
    }
)
"""Keys that take effect for jobs that are submitted after the reload."""


class Reload:
    """Reloads the configuration of one daemon. ``path``: file with which it was started; None if it
    was started without one.
    """

    def __init__(
        self,
        path: Path | None,
        state: SiteState,
        transactions: Transactions,
        scavenger: Scavenger,
        notices: Notices,
        retention: Retention,
        log_file: logs.RotatedLog | None = None,
    ) -> None:
        self._path = path
        self._state = state
        self._transactions = transactions
        self._scavenger = scavenger
        self._notices = notices
        self._retention = retention
        self._log_file = log_file

    def read(self) -> Config:
        """Read the configuration file. May take long.

        Raises:
            ConfigError: the file is invalid; the message has all errors.
            RequestRefused: there is no file.
        """
        if self._path is None:
            raise RequestRefused("The daemon was started without a configuration file.")
        return load_config(self._path)

    def apply(self, config: Config, by: str) -> dict[str, list[str]]:
        """Apply the changes that need no restart.

        Args:
            config: the new configuration.
            by: who reloads it, for the audit log.

        Returns:
            ``applied``, ``next_jobs`` and ``restart`` → a line for each key that takes effect at
            once, for the next jobs, and at a restart.

        """
        differences = changes(self._state.config, config)
        reloaded_keys = differences.keys() & (AT_ONCE | NEXT_JOBS)
        if reloaded_keys:
            self._take_over(with_changes(self._state.config, config, reloaded_keys))
        effects = {
            "applied": _lines(differences, differences.keys() & AT_ONCE),
            "next_jobs": _lines(differences, differences.keys() & NEXT_JOBS),
            "restart": _lines(differences, differences.keys() - reloaded_keys),
        }
        with self._transactions.begin() as now:
            if "jobs.max_running" in reloaded_keys:
                self._state.controller.state.plan_soon(now)
                self._transactions.feed(Tick())
            self._state.audit.record(
                EventKind.CONFIGURATION_RELOADED,
                f"{sentence(effects)} By {by}.",
                by=by,
                changes=effects,
            )
        return effects

    def failed(self, why: str, by: str) -> None:
        """Log that the file is invalid."""
        log.warning("configuration not reloaded", reason=why, by=by)

    def _take_over(self, config: Config) -> None:
        state = self._state
        state.config = config
        logs.configure(config.daemon.log_level, config.daemon.log_format, self._log_file)
        state.accounts.appoint(config.daemon.operators)
        controller = state.controller
        controller.settings = replace(
            controller.settings,
            max_tries=config.jobs.max_tries,
            retry_window_s=config.jobs.retry_window,
        )
        controller.queue.allow(config.jobs.max_running)
        state.rounds.configure(config)
        state.parties.limit(config.quotas)
        self._notices.settings = config.notify
        self._retention.keep_s = config.accounting.keep
        self._retention.keep_logs_s = config.jobs.keep_logs
        if isinstance(self._scavenger, BatchScavenger):
            self._scavenger.settings = replace(
                self._scavenger.settings,
                rules=gap_rules(config),
                idle_for_s=config.gaps.idle_for,
                hold_s=config.gaps.hold,
            )


def sentence(effects: Mapping[str, list[str]]) -> str:
    """Return the effects of a reload as a sentence."""
    words = (("applied", "applied"), ("next_jobs", "for the next jobs"), ("restart", "to restart"))
    counts = [f"{len(effects[name])} {word}" for name, word in words if effects[name]]
    if not counts:
        return "The configuration has not changed."
    return f"The configuration was read again: {', '.join(counts)}."


def _lines(differences: Mapping[str, str], names: Collection[str]) -> list[str]:
    return [f"{name}: {differences[name]}" for name in sorted(names)]
