"""Keeps the prices of the site's kinds of slots, and tells the controller about changes.

A price that the site does not configure is the part of a host that a slot is, which polls tell. The
parts are stored, so that a daemon that starts charges its jobs as before, without waiting for its
first poll.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from malletrain.core.events import PricesChanged
from malletrain.daemon.engine.state import SiteState
from malletrain.daemon.engine.transactions import Transactions
from malletrain.daemon.site.settings import slot_prices, unpriced_slots


class SlotPrices:
    """The prices of slots of one daemon.

    Args:
        state: the daemon's state.
        transactions: saves what has changed.
    """

    def __init__(self, state: SiteState, transactions: Transactions) -> None:
        self._state = state
        self._transactions = transactions
        text = state.store.slot_parts()
        self._parts = msgspec.json.decode(text, type=dict[str, float]) if text else {}
        """Kind → part of a host that one slot of it has, according to the polls so far."""
        self._unknown: frozenset[str] = frozenset()
        """Kinds with an unknown price, as last reported to the controller."""
        self._polled = False
        """Whether a poll has reported these parts."""

    def restore(self) -> None:
        """Tell the controller the prices that are known. Call it before jobs and nodes are
        restored.
        """
        self._apply()

    def update(self, parts: Mapping[str, float]) -> None:
        """Store the parts that a poll tells, and tell the controller the prices if they change.

        Args:
            parts: kind → the part of a host that a slot is. A kind that is missing, because its
                hosts are down, keeps its part. One that no poll has named has no slots, and the
                price of a whole node until it has.
        """
        self._polled = True
        all_parts = {**self._parts, **parts}
        if all_parts != self._parts:
            self._parts = all_parts
            with self._transactions.begin():
                self._state.store.put_slot_parts(msgspec.json.encode(all_parts).decode())
        self._apply()

    def _apply(self) -> None:
        config = self._state.config
        prices = slot_prices(config, self._parts)
        unknown = frozenset() if self._polled else unpriced_slots(config, self._parts)
        if (prices, unknown) == (self._state.prices, self._unknown):
            return
        self._state.prices, self._unknown = prices, unknown
        with self._transactions.begin():
            self._state.events.append(PricesChanged(prices, unknown))
