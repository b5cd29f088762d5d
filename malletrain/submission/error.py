"""What is wrong with a job as given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class SpecError(ValueError):
    """A job that cannot be submitted as given; the message is a sentence that says what is
    accepted. ``options``: which of ``malletrain submit`` it is about, where that is known.
    """

    def __init__(self, sentence: str, *options: str) -> None:
        super().__init__(sentence)
        self.options = options


@contextmanager
def about(*options: str) -> Iterator[None]:
    """What is found wrong inside is about these options of ``malletrain submit``."""
    try:
        yield
    except SpecError as error:
        error.options = error.options or options
        raise
