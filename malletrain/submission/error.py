"""What is wrong with a job as given."""

from __future__ import annotations


class SpecError(ValueError):
    """A job that cannot be submitted as given; the message is a sentence that says what is
    accepted.
    """
