"""Determines the user, the application and the interaction of a request from its headers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from llmserve.gateway.configuration import GatewayConfiguration
from llmserve.gateway.keys import KeyFile, UserKeyError
from llmserve.openai_messages import ApiRefusal

log = logging.getLogger(__name__)

APPLICATION, INTERACTION = "x-application", "x-interaction-id"
LAST = "x-interaction-last"
MAX_HEADER = 200
"""Maximum number of characters of a name in a header."""


@dataclass(frozen=True)
class Caller:
    """The sender of a request."""

    user: str
    key: str
    """Id of the key."""
    application: str = ""
    """Application that is declared and that the user may use; empty: none."""
    interaction: str = ""
    ends_interaction: bool = False


class Access:
    """Checks keys.

    Args:
        configuration: the operator's configuration.
        keys: the file with the keys of users.
    """

    def __init__(self, configuration: GatewayConfiguration, keys: KeyFile) -> None:
        self._configuration, self._keys = configuration, keys

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Return who sends a request with these headers (names in lower case).

        Raises:
            ApiRefusal: the key is missing, unknown or revoked, or keys cannot be read.
        """
        kind, _, text = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not text:
            sentence = "The request has no key; send the header 'Authorization: Bearer KEY'."
            raise ApiRefusal(401, sentence, "missing_api_key")
        try:
            key = self._keys.check(text.strip())
        except UserKeyError as error:
            log.error("%s", error)
            sentence = "The gateway cannot read its keys; tell its operator."
            raise ApiRefusal(503, sentence, "keys_unreadable") from None
        if key is None or key.user not in self._configuration.users:
            sentence = "This key is not valid or was revoked; ask the operator for another one."
            raise ApiRefusal(401, sentence, "invalid_api_key")
        application = key.application or headers.get(APPLICATION, "")
        section = self._configuration.applications.get(application)
        if section is None or (section.users is not None and key.user not in section.users):
            application = ""
        interaction = headers.get(INTERACTION, "")
        if len(interaction) > MAX_HEADER:
            sentence = f"{INTERACTION} has more than {MAX_HEADER} characters; shorten it."
            raise ApiRefusal(400, sentence, "invalid_interaction")
        is_last = headers.get(LAST, "").lower() in ("1", "true", "yes")
        return Caller(key.user, key.id, application, interaction, is_last)

    def is_revoked(self, key: str) -> bool:
        """Whether a key that was valid is no longer valid. If the file of the keys cannot be read,
        no key counts as revoked.
        """
        try:
            return not self._keys.is_valid(key)
        except UserKeyError:
            return False

    def is_shut_out(self, user: str) -> bool:
        """Whether the operator has revoked all keys of a user, or removed the user from the
        configuration. If the file of the keys cannot be read, no key counts as revoked.
        """
        if user not in self._configuration.users:
            return True
        try:
            return self._keys.has_revoked_all(user)
        except UserKeyError:
            return False
