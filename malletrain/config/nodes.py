"""The configuration of what leased nodes have besides processors: their networks.

Decides which keys exist and what a valid value is; :mod:`malletrain.core.fabric` applies them.
"""

from __future__ import annotations

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from malletrain.config.base import Section, Words, key
from malletrain.core.fabric import NetworkNameError, checked


class NodesSection(Section):
    """What leased nodes have."""

    interface: str = key(
        "",
        description='The network of a job: rendezvous, gloo and NCCL. An interface ("ib0"), a '
        'network ("10.1.0.0/16"), or "auto": the fastest that all members of a round share. '
        "Empty: that on which a node reaches the daemon; NCCL then chooses by itself.",
    )
    interface_of: Words = key(
        [],
        description='The same for single node classes, such as ["a100=ib0", "cpu=auto"].',
    )

    @field_validator("interface")
    @classmethod
    def _interface(cls, value: str) -> str:
        return _checked(value)

    @field_validator("interface_of")
    @classmethod
    def _by_class(cls, value: Words) -> Words:
        for text in value:
            name, equals, wanted = text.partition("=")
            if not name or not equals:
                raise PydanticCustomError(
                    "interface", '"{text}" is not of the form CLASS=INTERFACE', {"text": text}
                )
            _checked(wanted)
        return value

    def wanted(self, node_class: str) -> str:
        """The network for nodes of a class."""
        of = dict(text.split("=", 1) for text in self.interface_of)
        return of.get(node_class, self.interface)


def _checked(wanted: str) -> str:
    try:
        return checked(wanted)
    except NetworkNameError as error:
        raise PydanticCustomError("interface", "{sentence}", {"sentence": str(error)}) from None
