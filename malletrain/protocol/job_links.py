"""The links of a job: pages of its own, such as a TensorBoard, that its owner names. Decides which
are valid. Pure.

Browsers of other users show them, so only addresses of web pages are valid, without a password.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

MAX_LINKS = 8
"""Maximum number of links of a job."""
MAX_NAME_LENGTH = 40
"""Maximum number of characters of a link's name."""
MAX_URL_LENGTH = 300
"""Maximum number of characters of a link's address."""
_URL = re.compile(r"[!-~]+")


def links_problem(links: Mapping[str, str]) -> str:
    """Return what is wrong with the links of a job, as a sentence; empty if they are valid.

    Args:
        links: name → address.
    """
    if len(links) > MAX_LINKS:
        return f"A job has {MAX_LINKS} links at most, not {len(links)}; remove one."
    for name, url in links.items():
        if not (0 < len(name) <= MAX_NAME_LENGTH and name.isprintable() and name.strip() == name):
            return (
                f"The name of a link is 1 to {MAX_NAME_LENGTH} printable characters, without "
                "spaces at its ends."
            )
        if len(url) > MAX_URL_LENGTH:
            return f"The address of a link has {MAX_URL_LENGTH} characters at most."
        if problem := _url_problem(url):
            return f"The address of the link {name!r} {problem}."
    return ""


def _url_problem(url: str) -> str:
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:
        has_host = False
    if not _URL.fullmatch(url) or not has_host or parts.scheme not in ("http", "https"):
        return "is not one of a web page, such as https://host.example.org:6006/"
    if parts.username is not None:
        return "contains a user name; every user sees the links of a job, so leave it out"
    return ""
