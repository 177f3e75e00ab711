"""A tool that remembers a conversation, can write down what it remembers, and can fail to."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from sglang_multiturn import BaseTool, ToolError
from sglang_multiturn.schemas import FunctionSchema, ToolSchema

HUGE_CHARS = 2 * 1024 * 1024


class ForgetfulTool(BaseTool):
    """Answers with every word it was told. config: pid_folder, where `create` writes its process."""

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self.words: dict[str, list[str]] = {}
        self.log: list[str] = []
        self.running = 0
        self.fails: dict[str, str] = {}
        """By verb: how it fails, from the call on that said so."""

    @classmethod
    def default_schema(cls) -> ToolSchema:
        return ToolSchema(function=FunctionSchema(name="memory"))

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        assert instance_id is not None
        self.log.append("create")
        self.words[instance_id] = []
        if folder := self.config.get("pid_folder"):
            Path(folder, instance_id).write_text(str(os.getpid()))  # noqa: ASYNC240 - a test's
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.log.append("execute")
        self.fails |= parameters.get("fails") or {}
        self.words[instance_id].append(parameters.get("word", "?"))
        if "takes_s" in parameters:
            self.running += 1
            await asyncio.sleep(parameters["takes_s"])
            self.running -= 1
        if parameters.get("dies"):
            os._exit(7)
        return " ".join(self.words[instance_id]), 1.0, {"pid": os.getpid()}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        self.log.append("calc_reward")
        return float(len(self.words[instance_id]))

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.log.append("release")
        del self.words[instance_id]


class RememberingTool(ForgetfulTool):
    """The same, with snapshots, which take as long as `config.takes_s` says."""

    async def snapshot(self, instance_id: str, **kwargs: Any) -> Any:
        self.log.append("snapshot")
        assert not self.running, "a call runs"
        if "takes_s" in self.config:
            await asyncio.sleep(self.config["takes_s"])
        failed = await _failed(self.fails.get("snapshot"))
        self.log.append("snapshot given")
        return {"words": self.words[instance_id], "fails": self.fails} if failed is None else failed

    async def restore(self, instance_id: str, state: Any, **kwargs: Any) -> None:
        self.log.append("restore")
        await _failed(state["fails"].get("restore"))
        self.words[instance_id], self.fails = state["words"], state["fails"]


class HalfTool(ForgetfulTool):
    """Could never be restored."""

    async def snapshot(self, instance_id: str, **kwargs: Any) -> Any:
        return []


async def _failed(how: str | None) -> Any:
    match how:
        case "raises":
            raise ValueError("a bug of the tool's")
        case "says_why":
            raise ToolError("not today")
        case "hangs":
            await asyncio.Event().wait()
        case "returns_rubbish":
            return {"words": {1, 2}}
        case "returns_too_much":
            return "x" * HUGE_CHARS
        case "returns_keys_that_are_no_text":
            return {1: "one"}
        case "returns_nan":
            return float("nan")
    return None
