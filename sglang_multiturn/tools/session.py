"""One conversation's tools: instances are made once, used any number of times, judged once and released once.

A call that goes wrong by the model's or a tool's own word becomes an answer; anything else a tool raises leaves this
module and ends this conversation, and no other.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from sglang_multiturn.chat.parsing import BrokenCall, ParsedCall
from sglang_multiturn.config import RolloutConfig, closest
from sglang_multiturn.errors import ToolContractError, ToolError
from sglang_multiturn.metrics import RolloutMetrics
from sglang_multiturn.request import RequestSpec, ToolKwargs
from sglang_multiturn.schemas import plain_json, plain_text
from sglang_multiturn.tools.base import Tool, ToolResponse
from sglang_multiturn.tools.registry import ToolRegistry
from sglang_multiturn.trajectory import CallOutcome, ToolCallRecord

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedCall:
    """A call of one turn with the id its answer will carry."""

    call_id: str
    call: ParsedCall | BrokenCall


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """What the model is shown, the record of it, and whether the tool ended the conversation."""

    record: ToolCallRecord
    stop: bool = False


class ToolSession:
    """`async with ToolSession(...) as session`: whatever happens inside, what was created is released."""

    def __init__(
        self, spec: RequestSpec, registry: ToolRegistry, config: RolloutConfig, metrics: RolloutMetrics
    ) -> None:
        self._spec = spec
        self._registry = registry
        self._config = config
        self._metrics = metrics
        self._instances: dict[str, str] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self.offered = tuple(schema.name for schema in registry.schemas(spec.tool_names))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._release()

    async def create_named(self) -> None:
        """Make instances of the tools the dataset row names, as verl's PR #1037 did; others on their first call."""
        for name in self._spec.tools_kwargs:
            if name in self.offered:
                await self._instance(name)

    async def execute(self, calls: Sequence[NumberedCall], turn: int) -> list[ToolAnswer]:
        """Answer every call of a turn, side by side; answers come in the order of the calls."""
        limit = self._config.max_parallel_calls
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._answer(call, turn)) for call in calls[:limit]]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors.exceptions[0].__cause__
        skipped = f"Not executed: at most {limit} tool calls are made a turn. Call it again if you still need it."
        return [task.result() for task in tasks] + [
            self._refuse(call, turn, CallOutcome.SKIPPED, skipped) for call in calls[limit:]
        ]

    async def calc_rewards(self) -> dict[str, float]:
        """`calc_reward` of every instance, once."""
        rewards: dict[str, float] = {}
        for name, instance_id in self._instances.items():
            tool = self._tool(name)
            what = f"{name}.calc_reward"
            judge = functools.partial(tool.calc_reward, instance_id, **self._kwargs(name).calc_reward_kwargs)
            value = await self._timed(what, judge)
            rewards[name] = _number(value, what)
        return rewards

    # One call

    async def _answer(self, numbered: NumberedCall, turn: int) -> ToolAnswer:
        call = numbered.call
        if isinstance(call, BrokenCall):
            return self._refuse(numbered, turn, CallOutcome.MALFORMED, f"Error: {call.reason}")
        if call.name not in self.offered:
            known = closest(call.name, self.offered).removeprefix("; ")
            text = f"Error: there is no tool {call.name[:100]!r}; {known}."
            return self._refuse(numbered, turn, CallOutcome.UNKNOWN_TOOL, text)
        if wrong := self._registry.explain_arguments(call.name, call.arguments):
            return self._refuse(numbered, turn, CallOutcome.INVALID_ARGUMENTS, f"Error: invalid arguments: {wrong}")
        started = time.monotonic()
        try:
            answer = await self._run(numbered, call, turn)
        except ToolError as error:
            answer = self._refuse(numbered, turn, CallOutcome.TOOL_ERROR, f"Error: {plain_text(str(error))}")
        except _ToolTimeout as error:
            answer = self._refuse(numbered, turn, CallOutcome.TIMEOUT, f"Error: {plain_text(str(error))}")
        self._metrics.tool_s += time.monotonic() - started
        return answer

    async def _run(self, numbered: NumberedCall, call: ParsedCall, turn: int) -> ToolAnswer:
        started = time.monotonic()
        instance_id = await self._instance(call.name)
        tool, kwargs = self._tool(call.name), self._kwargs(call.name).execute_kwargs
        what = f"{call.name}.execute"
        execute = functools.partial(tool.execute, instance_id, dict(call.arguments), **kwargs)
        result = await self._timed(what, execute)
        response, reward, metrics = _unpack(result, what)
        record = ToolCallRecord(
            call_id=numbered.call_id,
            turn=turn,
            name=call.name,
            arguments=call.arguments,
            outcome=CallOutcome.OK,
            answer=_text_of(response, what),
            reward=reward,
            metrics=metrics,
            duration_s=time.monotonic() - started,
        )
        return ToolAnswer(record=record, stop=bool(getattr(response, "stop", False)))

    def _refuse(self, numbered: NumberedCall, turn: int, outcome: CallOutcome, text: str) -> ToolAnswer:
        call = numbered.call
        arguments = call.arguments if isinstance(call, ParsedCall) else None
        record = ToolCallRecord(
            call_id=numbered.call_id, turn=turn, name=call.name, arguments=arguments, outcome=outcome, answer=text
        )
        return ToolAnswer(record=record)

    # Lifecycle

    async def _instance(self, name: str) -> str:
        # Two calls of one turn may need the same instance: the second waits for the first one's `create`.
        async with self._locks.setdefault(name, asyncio.Lock()):
            if name not in self._instances:
                tool, row = self._tool(name), self._kwargs(name)
                kwargs = _fitting(tool.create, row.create_kwargs)
                what = f"{name}.create"
                created = await self._timed(what, functools.partial(tool.create, self._spec.request_id, **kwargs))
                instance_id = created[0] if isinstance(created, tuple) else created
                if not isinstance(instance_id, str):
                    raise ToolContractError(f"{what} must return an instance id, got {type(instance_id).__name__}")
                self._instances[name] = instance_id
                self._metrics.tool_instances_created += 1
            return self._instances[name]

    async def _release(self) -> None:
        """Release every instance, each bounded in time; one that fails is logged and counted, and stops no other."""
        while self._instances:
            name, instance_id = self._instances.popitem()
            kwargs = self._kwargs(name).release_kwargs
            try:
                async with asyncio.timeout(self._config.release_timeout_s):
                    await self._tool(name).release(instance_id, **kwargs)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - cleaning up must not end a conversation
                self._metrics.release_errors += 1
                logger.warning("request %s: %s.release failed: %r", self._spec.request_id, name, error)
            self._metrics.tool_instances_released += 1

    async def _timed(self, what: str, call: Callable[[], Awaitable[Result]]) -> Result:
        """Await a tool's coroutine under `tool_timeout_s`; whatever it raises leaves as an error asyncio survives."""
        limit = self._config.tool_timeout_s
        try:
            async with asyncio.timeout(limit) as clock:
                return await call()
        except TimeoutError as error:
            if clock.expired():
                raise _ToolTimeout(f"the tool did not answer within {limit:g} seconds") from error
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling() == 0:
                raise ToolContractError(f"{what} raised CancelledError though nobody cancelled it") from error
            raise
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            # SystemExit and its like: a task that raises one takes the whole event loop along.
            raise ToolContractError(f"{what} raised {type(error).__name__}: {error}") from error

    def _tool(self, name: str) -> Tool:
        tool = self._registry.get(name)
        assert tool is not None  # names were checked against the registry
        return tool

    def _kwargs(self, name: str) -> ToolKwargs:
        return self._spec.tools_kwargs.get(name, ToolKwargs())


class _ToolTimeout(Exception):  # noqa: N818 - never leaves this module
    pass


def _fitting(create: Callable[..., Any], create_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Row arguments flat, as in PR #1037; and nested too for tools of verl 0.5 and later, which read both."""
    parameters = inspect.signature(create).parameters
    fitting = dict(create_kwargs)
    if "create_kwargs" in parameters:
        fitting = {key: value for key, value in fitting.items() if key in parameters}
        fitting["create_kwargs"] = dict(create_kwargs)
    return fitting


def _unpack(result: Any, what: str) -> tuple[Any, float, dict[str, Any]]:
    """Response, step reward and metrics of whatever `execute` returned. Raises ToolContractError."""
    if not isinstance(result, tuple):
        return result, 0.0, {}
    if not 1 <= len(result) <= 3:
        raise ToolContractError(f"{what} must return (response, reward, metrics), got {len(result)} values")
    response = result[0]
    reward = _number(result[1], what) if len(result) > 1 else 0.0
    metrics = result[2] if len(result) > 2 else {}
    if not isinstance(metrics, Mapping):
        raise ToolContractError(f"{what} must return its metrics as a dict, got {type(metrics).__name__}")
    kept = plain_json(dict(metrics))
    return response, reward, kept if isinstance(kept, dict) else {"unreadable": kept}


def _text_of(response: Any, what: str) -> str:
    """Text of a str, our ToolResponse or verl's. Raises ToolContractError for anything else, media included."""
    if isinstance(response, str):
        return plain_text(response)
    if getattr(response, "image", None) or getattr(response, "video", None):
        raise ToolContractError(f"{what} returned an image or video; only text is supported in this version")
    text = getattr(response, "text", response)
    if text is None and (isinstance(response, ToolResponse) or hasattr(response, "text")):
        return ""
    if not isinstance(text, str):
        raise ToolContractError(f"{what} must return text or a ToolResponse, got {type(response).__name__}")
    return plain_text(text)


def _number(value: Any, what: str) -> float:
    if value is None:
        return 0.0
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ToolContractError(f"{what} returned {value!r} as a reward; a number is needed") from error
    if not math.isfinite(number):
        raise ToolContractError(f"{what} returned {number} as a reward; a finite number is needed")
    return number
