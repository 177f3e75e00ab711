"""Decisions out of a string of bytes: a whole random conversation is one value, quick to draw and to make smaller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

SIZE = 160
"""Bytes of one conversation; what it decides beyond them is decided the simplest way."""

Option = TypeVar("Option")


class Choices:
    """Zeros are the simplest choices, and so is everything after the last byte."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def below(self, limit: int) -> int:
        """A number below `limit`, which is at most 256."""
        return self._next() * limit >> 8

    def wide(self, limit: int) -> int:
        """A number below `limit`, which may be large."""
        number = self._next() << 16 | self._next() << 8 | self._next()
        return number * limit >> 24

    def chance(self, percent: int) -> bool:
        """True in so many of a hundred cases."""
        return self.below(100) >= 100 - percent

    def pick(self, options: Sequence[Option]) -> Option:
        """One of at most 256 options; the first is the simplest."""
        return options[self.below(len(options))]

    def _next(self) -> int:
        at = self._at
        self._at += 1
        return self._data[at] if at < len(self._data) else 0
