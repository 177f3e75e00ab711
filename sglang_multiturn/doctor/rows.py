"""The rows of data files: all of them, or a sample of many with the longest ones among them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_multiturn.dataset import read_rows, spec_from_row
from sglang_multiturn.doctor.findings import Findings, note, ok, problem
from sglang_multiturn.errors import DataError, MissingDependencyError
from sglang_multiturn.request import RequestSpec

_LONGEST_KEPT = 16
PROMPT_KEYS = ("raw_prompt", "prompt", "messages")
"""Where `dataset.spec_from_row` looks for the messages, the first one first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row as it was read, and the request it makes."""

    index: int
    """From 0, over all files."""
    place: str
    """`file:line`."""
    values: dict[str, Any]
    spec: RequestSpec | None
    error: str = ""
    """Why there is no spec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSample:
    """What is looked at of the data."""

    rows: tuple[Row, ...]
    total: int

    @property
    def is_whole(self) -> bool:
        """Whether these are all rows there are."""
        return len(self.rows) == self.total

    @property
    def readable(self) -> Iterator[tuple[Row, RequestSpec]]:
        """Rows that make a request."""
        return ((row, row.spec) for row in self.rows if row.spec is not None)


class _Sampler:
    """Every k-th row of a stream of unknown length, k doubling as it grows; the rows with most text; and one asked for."""

    def __init__(self, most: int, asked: int, prompt_keys: Sequence[str]) -> None:
        self._most = most
        self._asked = asked
        self._prompt_keys = prompt_keys
        self._step = 1
        self._kept: list[tuple[int, str, dict[str, Any]]] = []
        self._longest: list[tuple[int, int, str, dict[str, Any]]] = []
        self._always: list[tuple[int, str, dict[str, Any]]] = []
        self.total = 0

    def add(self, place: str, row: dict[str, Any]) -> None:
        index, self.total = self.total, self.total + 1
        if index == self._asked:
            self._always.append((index, place, row))
        if index % self._step == 0:
            self._kept.append((index, place, row))
        if len(self._kept) > 2 * self._most:
            self._kept, self._step = self._kept[::2], self._step * 2
        # The index comes second: two rows of one length are never compared themselves.
        heapq.heappush(self._longest, (self._size(row), -index, place, row))
        if len(self._longest) > _LONGEST_KEPT:
            heapq.heappop(self._longest)

    def rows(self) -> list[tuple[int, str, dict[str, Any]]]:
        if self.total <= self._most:
            return self._kept
        even = self._kept[:: -(-len(self._kept) // self._most)]
        longest = [(-index, place, row) for _, index, place, row in self._longest]
        unique = {row[0]: row for row in even + longest + self._always}
        return [unique[index] for index in sorted(unique)]

    def _size(self, row: dict[str, Any]) -> int:
        """Characters of the prompt, about: what decides which rows are the longest."""
        prompt = next((row[key] for key in self._prompt_keys if row.get(key) is not None), "")
        return len(str(prompt))


def read_sample(
    paths: Sequence[Path], *, prompt_key: str | None, most: int, asked: int = 0
) -> tuple[RowSample, Findings]:
    """Rows of all files, at most about `most` of them, and what was found while reading.

    Args:
        paths: files in the order in which rows are counted.
        prompt_key: the column that holds the messages; None takes the first of PROMPT_KEYS that is there.
        most: how many rows are kept.
        asked: the index of a row that is kept in any case.
    """
    sampler = _Sampler(most, asked, PROMPT_KEYS if prompt_key is None else (prompt_key,))
    broken: list[str] = []
    for path in paths:
        try:
            for place, row in read_rows(path):
                sampler.add(place, row)
        except (DataError, MissingDependencyError, UnicodeDecodeError) as error:
            broken.append(f"{path}: not UTF-8 text: {error}" if isinstance(error, UnicodeDecodeError) else str(error))
    rows = tuple(_row(index, place, row, prompt_key) for index, place, row in sampler.rows())
    sample = RowSample(rows=rows, total=sampler.total)
    return sample, _said(sample, broken, paths)


def _said(sample: RowSample, broken: Sequence[str], paths: Sequence[Path]) -> Findings:
    files = ", ".join(map(str, paths))
    for what in broken:
        yield problem("data-file", what, "Mend the file; rows behind this place were not read.")
    if sample.total and sample.is_whole:
        yield ok("data-file", f"{sample.total:,} rows were read, and all are looked at", files)
    elif sample.total:
        yield note(
            "data-sampled",
            f"{len(sample.rows):,} of {sample.total:,} rows are looked at, those with most text among them",
            "Give --max-rows to look at more.",
            files,
        )


def _row(index: int, place: str, values: dict[str, Any], prompt_key: str | None) -> Row:
    named = {**values, "raw_prompt": values[prompt_key]} if prompt_key in values else values
    try:
        spec = spec_from_row(named, place=place, request_id=f"row-{index}", uid=str(index), input_index=index)
    except DataError as error:
        return Row(index=index, place=place, values=values, spec=None, error=str(error))
    return Row(index=index, place=place, values=values, spec=spec)
