"""The configuration of telling owners of their jobs outside of the command line.

Decides which keys exist and what a valid value is. What is sent is decided in
:mod:`malletrain.daemon.notices`.
"""

from __future__ import annotations

from malletrain.config.base import Section, key


class NotifySection(Section):
    """How owners are told of their jobs (`malletrain submit --notify`)."""

    sendmail: str = key(
        "/usr/sbin/sendmail",
        description="The program that takes mail with `-t -i`. Where it is not there, --notify "
        "with a mail address is refused.",
    )
    webhooks: bool = key(
        False,
        description="Let every user name web hooks, which the daemon's host then calls. Without it "
        "only the daemon's own user may, who may have commands run there, too.",
    )
