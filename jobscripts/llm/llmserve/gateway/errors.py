"""The error of the gateway's parts."""

from __future__ import annotations


class GatewayError(Exception):
    """An error that the operator can correct; the message is a sentence."""
