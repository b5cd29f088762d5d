"""The error of the gateway's parts."""

from __future__ import annotations


class GatewayError(Exception):
    """Something that the operator can mend; the message is a sentence."""
