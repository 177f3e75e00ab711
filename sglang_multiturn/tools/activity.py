"""What the tools of one conversation are doing at this moment, for people who look on from outside.

What is waited for goes into the request's own words (`waiting_for`): only calls that have not answered yet, and where
they stand. What is held is asked for with `tools_held`, from any thread.

    tool search                                  one call runs
    a place for tool search                      its limits do not let it begin
    tool search, attempt 2 of 3
    tool search ×2, tool python (3 of 5 calls)   two of the turn's five calls have answered
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from weakref import WeakKeyDictionary

from sglang_multiturn.request import AsyncRolloutRequest
from sglang_multiturn.tools.runtime import RunningTool

__all__ = ["Stage", "ToolActivity", "tools_held"]

_HELD: WeakKeyDictionary[AsyncRolloutRequest, dict[tuple[str, str | None], None]] = WeakKeyDictionary()
"""Instances that were made and not released, by tool and, with `instance_scope: call`, call."""


class Stage(StrEnum):
    """Where one call stands; what its conversation waits for in the meantime."""

    LOAD = "{} to be loaded"
    SNAPSHOT = "a snapshot of {}"
    PLACE = "a place for {}"
    CREATE = "{} to be created"
    ANSWER = "{}"
    RETRY = "the next try of {}"
    RELEASE = "{} to be released"
    CALC_REWARD = "calc_reward of {}"


def tools_held(request: AsyncRolloutRequest) -> tuple[str, ...]:
    """Tools of which the conversation has instances, one name an instance, in the order in which they were made.

    One whose process died stays until the tool is looked at again.
    """
    return tuple(name for name, _ in list(_HELD.get(request, ())))


class ToolActivity:
    """Written by the conversation's session as its calls go on."""

    def __init__(self, request: AsyncRolloutRequest) -> None:
        self._request = request
        self._open: dict[str, tuple[str, float]] = {}
        """By call: what it waits for, and since when."""
        self._calls = 0
        self._held = _HELD.setdefault(request, {})

    @contextmanager
    def calls(self, tools: Mapping[str, str], stage: Stage, *, of: int, then: str) -> Iterator[None]:
        """While calls are answered.

        Args:
            tools: by the id of each call, the name of its tool.
            stage: where all of them stand at first.
            of: how many calls there are, those included that were answered without being made.
            then: what the conversation waits for once all of them have answered.
        """
        now_s = time.time()
        self._open = {call_id: (stage.replace("{}", f"tool {name}"), now_s) for call_id, name in tools.items()}
        self._calls = of
        self._tell()
        try:
            yield
        finally:
            self._open = {}
            self._request.wait_for(then)

    def reaches(self, stage: Stage, tool: RunningTool, call_id: str, number: int = 0) -> None:
        """A call has come to another point in its try `number`, from 0."""
        name = f"tool {tool.name}"
        if number:
            name += f", attempt {number + 1} of {tool.settings.retries + 1}"
        self._open[call_id] = (stage.replace("{}", name), time.time())
        self._tell()

    def answered(self, call_id: str) -> None:
        """A call has its answer."""
        self._open.pop(call_id, None)
        self._tell()

    def holds(self, tool: RunningTool, per_call: str | None) -> bool:
        """Whether there is such an instance."""
        return (tool.name, per_call) in self._held

    def made(self, tool: RunningTool, per_call: str | None) -> None:
        """There is an instance; told again it changes nothing."""
        self._held[tool.name, per_call] = None

    def gone(self, tool: RunningTool, per_call: str | None) -> None:
        """An instance was released, or lost with its process."""
        self._held.pop((tool.name, per_call), None)

    @contextmanager
    def releasing_all(self) -> Iterator[None]:
        """While everything that is held is released."""
        if self._held:
            self._request.wait_for(f"{_counted(f'tool {name}' for name, _ in self._held)} to be released")
        try:
            yield
        finally:
            self._held.clear()

    def _tell(self) -> None:
        if not self._open:
            return
        said = _counted(words for words, _ in self._open.values())
        if self._calls > 1:
            said += f" ({len(self._open)} of {self._calls} calls)"
        self._request.waiting_for = said
        self._request.waiting_since_s = min(since_s for _, since_s in self._open.values())


def _counted(words: Iterable[str]) -> str:
    counts = Counter(words)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(word if count == 1 else f"{word} ×{count}" for word, count in counts.items())
