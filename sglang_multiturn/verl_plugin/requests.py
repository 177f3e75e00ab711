"""A row of verl's dataset, as verl hands it to an agent loop, as a `RequestSpec`."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterable, Mapping
from typing import Any
from uuid import uuid4

from sglang_multiturn.config import closest
from sglang_multiturn.dataset import spec_from_row
from sglang_multiturn.engine.base import SamplingParams
from sglang_multiturn.request import RequestSpec

logger = logging.getLogger(__name__)

_ROW_KEYS = ("raw_prompt", "data_source", "reward_model", "extra_info", "tools_kwargs")


class RequestNames:
    """Names that are unique in a run: prompt + session + step under V1, which alone tells the session."""

    def __init__(self) -> None:
        self._process = uuid4().hex[:8]
        self._count = itertools.count()
        self._unknown_tools: set[str] = set()

    def name(self, row: Mapping[str, Any], uid: str) -> str:
        """`uid-s<session>-g<step>`; under V0 the n-th conversation of this process instead."""
        if "session_id" in row:
            return f"{uid}-s{row['session_id']}-g{row.get('global_steps', 0)}"
        return f"{uid}-{self._process}-{next(self._count)}"

    def note_tools(self, named: Iterable[str], known: tuple[str, ...]) -> None:
        """Say once a worker and name that rows bring arguments for a tool that is not configured."""
        for name in named:
            if name not in known and name not in self._unknown_tools:
                self._unknown_tools.add(name)
                logger.warning(
                    "rows bring extra_info.tools_kwargs for %r, which is not configured%s", name, closest(name, known)
                )


def request_spec(
    row: Mapping[str, Any],
    *,
    names: RequestNames,
    sampling: SamplingParams,
    known_tools: tuple[str, ...],
    validate: bool,
    step: int = 0,
    sample_index: int = 0,
) -> RequestSpec:
    """What one conversation is asked to do.

    Args:
        row: as verl hands it to a loop.
        names: names it; one for all conversations of a process.
        sampling: what verl asks for.
        known_tools: names of all tools that are configured.
        validate: whether it is validation.
        step: the trainer's.
        sample_index: which of its prompt's samples it is, where the row does not say so itself (`session_id`).

    Raises:
        DataError: the row is no conversation.
    """
    index = int(row["index"]) if row.get("index") is not None else 0
    uid = str(row.get("uid") or index)
    request_id = names.name(row, uid)
    given = {key: plain(row[key]) for key in _ROW_KEYS if key in row}
    given["extra_info"] = _with_known_tools(given.get("extra_info") or {}, known_tools)
    spec = spec_from_row(
        given,
        place=f"request {request_id}",
        request_id=request_id,
        uid=uid,
        input_index=index,
        sample_index=int(row.get("session_id", sample_index)),
        sampling=sampling,
        validate=validate,
    )
    names.note_tools(spec.tools_kwargs, known_tools)
    return dataclasses.replace(spec, step=step)


def _with_known_tools(extra_info: dict[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    """`tool_selection` as verl reads it (tool_agent_loop.py:158): unknown names are left out, an empty one means all."""
    selection = extra_info.get("tool_selection")
    if unknown := sorted(set(selection or ()) - set(known)):
        logger.warning("tool_selection names tools that are not configured: %s", ", ".join(unknown))
    return extra_info | {"tool_selection": [name for name in selection if name in known] if selection else None}


def plain(value: Any) -> Any:
    """NumPy arrays and scalars, which datasets and DataProto leave in rows, as lists and numbers."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return plain(value.tolist()) if hasattr(value, "tolist") else value
