"""What several test files share: a scripted rollout in a line, and tools that misbehave in one way each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from sglang_multiturn import (
    BaseTool,
    ByteChatML,
    Message,
    RequestSpec,
    RolloutConfig,
    RolloutContext,
    ScriptedEngine,
    ScriptedTurn,
    ToolError,
    ToolRegistry,
    ToolResponse,
    Trajectory,
    run_one,
)
from sglang_multiturn.chat.parsing import HermesParser
from sglang_multiturn.interactions.base import Interaction
from sglang_multiturn.rewards import RewardFn
from sglang_multiturn.schemas import FunctionSchema, ToolSchema

TEMPLATE = ByteChatML()
Turns = Sequence[ScriptedTurn | str]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def spec(request_id: str = "r", **changes: Any) -> RequestSpec:
    return RequestSpec(
        **{"request_id": request_id, "uid": "u", "messages": (Message(role="user", content="hi"),), **changes}
    )


def context(
    engine: ScriptedEngine,
    tools: Sequence[BaseTool] = (),
    config: RolloutConfig | None = None,
    reward_fn: RewardFn | None = None,
    interaction: Interaction | None = None,
) -> RolloutContext:
    return RolloutContext(
        generator=engine,
        template=TEMPLATE,
        tools=ToolRegistry(tools),
        parser=HermesParser(),
        config=config or RolloutConfig(),
        max_model_len=engine.info.max_model_len,
        reward_fn=reward_fn,
        interaction=interaction,
    )


async def roll(
    turns: Turns,
    tools: Sequence[BaseTool] = (),
    config: RolloutConfig | None = None,
    *,
    reward_fn: RewardFn | None = None,
    interaction: Interaction | None = None,
    max_model_len: int = 32_768,
    **changes: Any,
) -> Trajectory:
    """One scripted conversation, checked."""
    engine = ScriptedEngine.playing(TEMPLATE, {"r": turns}, max_model_len=max_model_len)
    async with engine:
        trajectory = await run_one(spec(**changes), context(engine, tools, config, reward_fn, interaction))
    trajectory.check(end_id=TEMPLATE.stop_token_ids[0])
    assert Trajectory.from_json(trajectory.to_json()) == trajectory
    return trajectory


class RecordingTool(BaseTool):
    """Says back what it was given and keeps a log of its lifecycle: (verb, instance_id, kwargs)."""

    def __init__(self, name: str = "echo", parameters: dict[str, Any] | None = None) -> None:
        schema = FunctionSchema(name=name, parameters=parameters or {"type": "object", "properties": {}})
        super().__init__({}, ToolSchema(function=schema))
        self.log: list[tuple[str, str, dict[str, Any]]] = []

    @property
    def verbs(self) -> list[str]:
        return [verb for verb, _, _ in self.log]

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str | tuple[str, ToolResponse]:
        assert instance_id is not None
        self.log.append(("create", instance_id, kwargs))
        return instance_id

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str | ToolResponse, float, dict[str, Any]]:
        self.log.append(("execute", instance_id, {"parameters": parameters, **kwargs}))
        return await self.answer(parameters)

    async def answer(self, parameters: dict[str, Any]) -> Any:
        return json.dumps(parameters, sort_keys=True), 0.5, {"n": 1}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        self.log.append(("calc_reward", instance_id, kwargs))
        return 0.25

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.log.append(("release", instance_id, kwargs))


class FailingTool(RecordingTool):
    """Raises what it is given."""

    def __init__(self, error: BaseException) -> None:
        super().__init__("echo")
        self.error = error

    async def answer(self, parameters: dict[str, Any]) -> Any:
        raise self.error


class HangingTool(RecordingTool):
    """Never answers; `started` tells that it was called."""

    def __init__(self) -> None:
        super().__init__("echo")
        self.started = asyncio.Event()

    async def answer(self, parameters: dict[str, Any]) -> Any:
        self.started.set()
        await asyncio.Event().wait()


class AnsweringTool(RecordingTool):
    """Answers with the very object it was given."""

    def __init__(self, result: Any) -> None:
        super().__init__("echo")
        self.result = result

    async def answer(self, parameters: dict[str, Any]) -> Any:
        return self.result


__all__ = [
    "TEMPLATE",
    "AnsweringTool",
    "FailingTool",
    "HangingTool",
    "RecordingTool",
    "ToolError",
    "call",
    "context",
    "roll",
    "spec",
]
