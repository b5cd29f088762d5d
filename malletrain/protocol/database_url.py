"""Hides the password in the URL of a database, also in one that cannot be parsed or is part of a
text. Pure.

SQLAlchemy hides only the password before the host. libpq takes one among the parameters, too
("Parameter Key Words": password, sslpassword), and a password with an unescaped ``@`` or ``/`` ends
where nobody expects it.
"""

from __future__ import annotations

import re

HIDDEN = "***"
_USER = r"(?s)^([^:/?#]*://[^:/@?\[]*:)(?!\d*(?:[/?]|$))"
"""A user and a colon; a port after a host is no password."""
_PASSWORDS = tuple(re.compile(_USER + end) for end in (r"[^?]*(@)", r".*(@)", r".*()$"))
"""A password ends at the last ``@`` before the parameters, else at the last one, else nowhere."""
_PARAMETER = re.compile(r"(?i)((?:^|[?&])[^?&=]*(?:password|secret|token)[^?&=]*=)[^&]*")


_URL = re.compile(r"""[A-Za-z][\w+.-]*://[^\s"'\]]*""")


def without_passwords(text: str) -> str:
    """Return a text with ``***`` in the place of each password of a URL in it. A URL without ``@``
    and parameters has none that could be told from an address.
    """
    return _URL.sub(
        lambda match: (
            without_password(match[0]) if "@" in match[0] or "=" in match[0] else match[0]
        ),
        text,
    )


def without_password(url: str) -> str:
    """Return the URL with ``***`` in the place of each password."""
    if "://" not in url:
        return re.sub(r"(?s)^.*@", f"{HIDDEN}@", url)
    for pattern in _PASSWORDS:
        shown, count = pattern.subn(rf"\g<1>{HIDDEN}\g<2>", url)
        if count:
            url = shown
            break
    return _PARAMETER.sub(rf"\g<1>{HIDDEN}", url)
