"""The configuration of notices to job owners outside of the command line.

Decides which keys exist and what a valid value is. :mod:`malletrain.daemon.api.notices` decides
what is sent.
"""

from __future__ import annotations

from malletrain.config.base import Section, key


class NotifySection(Section):
    """How owners are notified of their jobs (`malletrain submit --notify`)."""

    sendmail: str = key(
        "/usr/sbin/sendmail",
        description="The program that takes mail with `-t -i`. If it does not exist, --notify "
        "with a mail address is refused.",
    )
    webhooks: bool = key(
        False,
        description="Let every user name web hooks, which the daemon's host then calls. If "
        "false, only the daemon's own user may, who can also have commands run on "
        "that host.",
    )
