"""What several test files share: a scripted rollout in a line, and tools that misbehave in one way each."""

from __future__ import annotations

import asyncio
import json
import re
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
from sglang_multiturn.chat.byte_chatml import END_OF_TEXT, IM_END, IM_START
from sglang_multiturn.chat.parsing import HermesParser
from sglang_multiturn.chat.template import ChatTemplate
from sglang_multiturn.interactions.base import Done, Interaction, Observation
from sglang_multiturn.request import StopReason
from sglang_multiturn.rewards import RewardFn
from sglang_multiturn.schemas import FunctionSchema, Role, ToolSchema

TEMPLATE = ByteChatML()
_CONTROLS = {"<|endoftext|>": END_OF_TEXT, "<|im_start|>": IM_START, "<|im_end|>": IM_END}
Turns = Sequence[ScriptedTurn | str]


class ForgetfulChatML(ByteChatML):
    """Shows thoughts, and no more of an earlier turn's once a user has spoken after it, as Qwen3 does."""

    def keeps_history(self, role: Role) -> bool:
        return role != "user"

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        last = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
        return super().encode_prompt([_aloud(m) if i > last else m for i, m in enumerate(messages)], tools)


def _aloud(message: Message) -> Message:
    thoughts = (message.model_extra or {}).get("reasoning_content")
    return message.model_copy(
        update={"content": f"<think>\n{thoughts}\n</think>\n\n{message.text}"} if thoughts else {}
    )


class Asking:
    """A user who says these words, one after each turn, and then leaves."""

    def __init__(self, *words: str) -> None:
        self._words = words

    async def respond(self, request_id: str, messages: Sequence[Message]) -> Observation | Done:
        said = sum(message.role == "user" for message in messages) - 1
        if said == len(self._words):
            return Done(reason=StopReason.USER_STOP)
        return Observation(text=self._words[said])


def tokens(text: str) -> list[int]:
    """Ids of text in which control tokens are written out."""
    pieces = re.split(f"({'|'.join(map(re.escape, _CONTROLS))})", text)
    return [i for piece in pieces for i in ([_CONTROLS[piece]] if piece in _CONTROLS else piece.encode())]


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
    template: ChatTemplate = TEMPLATE,
) -> RolloutContext:
    return RolloutContext(
        generator=engine,
        template=template,
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
    template: ChatTemplate = TEMPLATE,
    **changes: Any,
) -> Trajectory:
    """One scripted conversation, checked."""
    engine = ScriptedEngine.playing(template, {"r": turns}, max_model_len=max_model_len)
    async with engine:
        trajectory = await run_one(spec(**changes), context(engine, tools, config, reward_fn, interaction, template))
    trajectory.check(end_ids=template.end_ids)
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
    "Asking",
    "FailingTool",
    "ForgetfulChatML",
    "HangingTool",
    "RecordingTool",
    "ToolError",
    "call",
    "context",
    "roll",
    "spec",
    "tokens",
]
