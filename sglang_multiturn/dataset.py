"""Data files and dataset rows → requests.

A row is what verl's datasets hold (`prompt`, `data_source`, `reward_model.ground_truth`, `extra_info.tools_kwargs`,
...) or plainly `{"messages": [...]}`. The same function serves rows read from files and rows verl hands to its loop.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sglang_multiturn.config import closest
from sglang_multiturn.engine.base import SamplingParams
from sglang_multiturn.errors import DataError, MissingDependencyError
from sglang_multiturn.request import RequestSpec, ToolKwargs
from sglang_multiturn.schemas import Message

_TOOL_KWARGS = tuple(field.name for field in dataclasses.fields(ToolKwargs))


def read_rows(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a `.jsonl` or `.parquet` file, each with its place (`file:line`) for messages.

    Raises:
        DataError: the file is missing, empty, of another kind, or a line is no JSON object.
        MissingDependencyError: parquet without pyarrow.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"data file {str(path)!r} does not exist")
    readers = {".jsonl": _read_jsonl, ".json": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise DataError(f"data file {str(path)!r}: {path.suffix!r} is not supported; use {', '.join(sorted(readers))}")
    empty = True
    for number, row in readers[path.suffix](path):
        empty = False
        yield f"{path}:{number}", row
    if empty:
        raise DataError(f"data file {str(path)!r} holds no rows")


def spec_from_row(
    row: Mapping[str, Any],
    *,
    place: str,
    request_id: str,
    uid: str,
    input_index: int = 0,
    sample_index: int = 0,
    sampling: SamplingParams | None = None,
    validate: bool = False,
) -> RequestSpec:
    """One request for a dataset row.

    Raises:
        DataError: naming `place`, the key and what is wrong with it.
    """
    extra_info = _mapping(row.get("extra_info"), place, "extra_info")
    reward_model = _mapping(row.get("reward_model"), place, "reward_model")
    selection = extra_info.get("tool_selection")
    kwargs = row.get("tools_kwargs") if row.get("tools_kwargs") is not None else extra_info.get("tools_kwargs")
    return RequestSpec(
        request_id=request_id,
        uid=uid,
        sample_index=sample_index,
        input_index=input_index,
        messages=_messages(row, place),
        tool_names=None if selection is None else tuple(map(str, selection)),
        tools_kwargs=_tools_kwargs(kwargs, place),
        sampling=sampling or SamplingParams(),
        data_source=str(row.get("data_source") or ""),
        ground_truth=reward_model.get("ground_truth", row.get("ground_truth")),
        extra_info=extra_info,
        validate=validate,
    )


def in_groups(specs: Iterable[RequestSpec], samples: int) -> Iterator[RequestSpec]:
    """Each request `samples` times: one `uid`, so one group, with ids and indices of their own."""
    for spec in specs:
        for index in range(samples):
            yield dataclasses.replace(
                spec,
                request_id=f"{spec.request_id}-{index}" if samples > 1 else spec.request_id,
                sample_index=index,
                input_index=spec.input_index * samples + index,
            )


def _messages(row: Mapping[str, Any], place: str) -> tuple[Message, ...]:
    prompts = [key for key in ("raw_prompt", "prompt", "messages") if row.get(key) is not None]
    if not prompts:
        raise DataError(f"{place}: no prompt; a row needs 'prompt' or 'messages', it has {sorted(map(str, row))}")
    said = row[prompts[0]]
    if isinstance(said, str):
        said = [{"role": "user", "content": said}]
    said = list(said)
    if not said:
        raise DataError(f"{place}: {prompts[0]!r} holds no messages")
    try:
        messages = tuple(Message.model_validate(_without_none(message)) for message in said)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(f"{place}: {prompts[0]!r}: {where}: {first['msg']}, got {first['input']!r}") from error
    for message in messages:
        if isinstance(message.content, list) and any(part.get("type", "text") != "text" for part in message.content):
            raise DataError(f"{place}: a message holds an image, video or audio; only text is supported")
    return messages


def _tools_kwargs(kwargs: Any, place: str) -> dict[str, ToolKwargs]:
    parsed = {}
    for tool, given in _mapping(kwargs, place, "tools_kwargs").items():
        if given is None:  # parquet gives every row the columns of all rows
            continue
        given = _mapping(given, place, f"tools_kwargs.{tool}")
        for key in given:
            if key not in _TOOL_KWARGS:
                raise DataError(f"{place}: tools_kwargs.{tool}: unknown key {key!r}{closest(key, _TOOL_KWARGS)}")
        parsed[tool] = ToolKwargs(
            **{key: _mapping(value, place, f"tools_kwargs.{tool}.{key}") for key, value in given.items()}
        )
    return parsed


def _mapping(value: Any, place: str, name: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{place}: {name!r} must be a mapping, got {type(value).__name__}")
    return dict(value)


def _without_none(message: Any) -> Any:
    """Parquet gives every message the keys of all messages; those it does not have are None there."""
    return {k: v for k, v in message.items() if v is not None} if isinstance(message, Mapping) else message


def _read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}:{number}: not valid JSON: {error.msg}") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
            yield number, row


def _read_parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingDependencyError.for_extra("reading parquet", "pyarrow", "parquet") from error
    try:
        table = pq.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise DataError(f"data file {str(path)!r} is not parquet: {error}") from error
    number = 0
    for batch in table.iter_batches():
        for row in batch.to_pylist():
            number += 1
            yield number, row
