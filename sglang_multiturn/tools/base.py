"""The contract of a tool.

Per conversation and tool: `create` at most once, `execute` any number of times, `calc_reward` at most once, `release`
exactly once if created. Signatures are those of verl's PR #1037, so that tools written for it load unchanged.

    class Weather(BaseTool):
        async def execute(self, instance_id, parameters, **kwargs):
            if parameters["city"] not in CITIES:
                raise ToolError(f"I know no city {parameters['city']!r}.")   # the model reads this and goes on
            return CITIES[parameters["city"]], 0.0, {}

A tool may also have `snapshot(instance_id, **kwargs)`, which returns what the instance remembers as JSON, and
`restore(instance_id, state, **kwargs)`, which gives it to a new one. Neither class here has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable
from uuid import uuid4

from sglang_multiturn.errors import ConfigError, ToolError
from sglang_multiturn.schemas import ToolSchema

__all__ = ["BaseTool", "ExecuteResult", "Tool", "ToolError", "ToolResponse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResponse:
    """What a tool answers. Only text reaches a model in this version; media fail with one sentence."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None
    stop: bool = False
    """The conversation is over once this answer has been read into it (stop_reason `tool_stop`)."""


class ExecuteResult(NamedTuple):
    """What `execute` may return by name; a plain triple of the same order does as well."""

    response: str | ToolResponse
    reward: float = 0.0
    """Step reward of this call."""
    metrics: dict[str, Any] = {}  # noqa: RUF012 - a default nobody writes to


@runtime_checkable
class Tool(Protocol):
    """What the rollout needs of a tool; verl's own `BaseTool` subclasses satisfy it too."""

    name: str

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        """Make the state of one conversation."""
        ...

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Answer one call."""
        ...

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        """Judge the conversation."""
        ...

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Free the state."""
        ...


class BaseTool:
    """Base class of tools. One object serves all conversations; state belongs to an `instance_id`."""

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        self.config = config
        schema = tool_schema if tool_schema is not None else self.default_schema()
        if schema is None:
            raise ConfigError(
                f"{type(self).__name__}: no tool_schema in the YAML and none in the class; add one of them"
            )
        self.tool_schema = schema
        self.name = schema.function.name

    @classmethod
    def default_schema(cls) -> ToolSchema | None:
        """The schema of a class that needs none in the YAML."""
        return None

    def get_openai_tool_schema(self) -> ToolSchema:
        """What the model is shown."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str | tuple[str, ToolResponse]:
        """Make this conversation's state; `kwargs` are the row's `create_kwargs`. Returns the instance id."""
        return instance_id or uuid4().hex

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str | ToolResponse, float, dict[str, Any]]:
        """Answer one call: the response, a step reward, and metrics.

        Raises:
            ToolError: with a sentence for the model; the rollout goes on. Anything else raised ends it as FAILED.
        """
        raise NotImplementedError(f"{type(self).__name__}.execute is not written")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The reward of everything this instance saw, asked once when the conversation has ended."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Free this conversation's state; called exactly once for what was created, whatever happened."""
