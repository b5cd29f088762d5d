"""The address and the keys of a daemon, and the authentication of a client.

Decides which daemon is used: that of a given state directory, else the user's own, else the site's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from malletrain.client.errors import UNAUTHENTICATED, ClientError, Unreachable
from malletrain.identity.keys import CLIENT, own_key, read_key, user_name
from malletrain.identity.state_directory import (
    INFO,
    SITE_HINT,
    StateDirError,
    announced,
    default_state_dir,
    read_daemon_info,
    start_hint,
)
from malletrain.identity.users import Munge, UsersError, login_payload
from malletrain.protocol import env


@dataclass(frozen=True)
class Address:
    """One daemon, as this user reaches it."""

    endpoint: str
    """ZeroMQ address, such as ``tcp://127.0.0.1:4711``."""
    server_key: bytes
    """Public CURVE key of the daemon (Z85)."""
    public_key: bytes
    """Public CURVE key of this client (Z85)."""
    secret_key: bytes = field(repr=False)
    """Secret CURVE key of this client (Z85)."""
    hint: str = ""
    """A sentence on how to start the daemon, with a blank before it."""

    def credential(self, munge: bool) -> tuple[str, str]:
        """Return the MUNGE credential for a daemon that does not know this client's key, and the
        reason if there is none.

        Args:
            munge: whether the daemon accepts MUNGE credentials.
        """
        if not (munge and Munge.there()):
            return "", ""
        try:
            payload = login_payload(
                self.server_key.decode("ascii"), self.public_key.decode("ascii")
            )
            return Munge(os.environ.get(env.MUNGE_SOCKET, "")).credential(payload), ""
        except UsersError as error:
            return "", str(error)

    def unknown_key(self, why: str, ignored_line: bool = False) -> ClientError:
        """Return the error for a key that the daemon does not know, with advice on what to do.

        Args:
            why: why MUNGE could not authenticate this client; empty if it was not asked.
            ignored_line: whether the daemon's list of users has the key in an ignored line.
        """
        reason = f" MUNGE could not tell it who you are: {why}" if why else ""
        problem = "'malletrain check' tells its operators what is wrong with it"
        advice = (
            f"Its list of users has your key in a line that it ignores; {problem}. The line should "
            "be"
            if ignored_line
            else f"Give its operators this line for their list of users (if it is there already, "
            f"{problem})"
        )
        return ClientError(
            f"The daemon at {self.endpoint} does not know your key.{reason} {advice}: "
            f"{user_name()} {self.public_key.decode('ascii')}",
            UNAUTHENTICATED,
        )


def find(state_dir: Path | None = None) -> Address:
    """Return the address of the daemon that runs in ``state_dir``; if None, of this user's own
    daemon, else of the site's.

    Raises:
        Unreachable: there is no such daemon.
    """
    try:
        site = None if state_dir else announced()
        if site is not None:
            hint = SITE_HINT
            info, pair = read_daemon_info(site, hint, site=True), own_key()
        else:
            hint, directory = start_hint(), state_dir or default_state_dir()
            info, pair = (
                read_daemon_info(directory / INFO, hint),
                read_key(directory / "keys" / CLIENT),
            )
    except StateDirError as error:
        raise Unreachable(str(error)) from None
    return Address(
        info.endpoint,
        info.server_key.encode("ascii"),
        pair.public.encode("ascii"),
        pair.secret.encode("ascii"),
        f" {hint}" if hint else "",
    )
