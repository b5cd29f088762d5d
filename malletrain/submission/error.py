"""Errors of a job as submitted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class SpecError(ValueError):
    """A job cannot be submitted as given; the message is a sentence that says what is accepted.
    ``options``: the options of ``malletrain submit`` that are wrong, if known.
    """

    def __init__(self, sentence: str, *options: str) -> None:
        super().__init__(sentence)
        self.options = options


@contextmanager
def about(*options: str) -> Iterator[None]:
    """Set these options of ``malletrain submit`` on each SpecError that is raised inside."""
    try:
        yield
    except SpecError as error:
        error.options = error.options or options
        raise
