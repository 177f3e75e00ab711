"""What crosses the border as text: messages, tool schemas and tool calls, in OpenAI's shapes.

Nothing a user wrote is dropped: unknown keys are kept, and a parameter schema is any JSON Schema (nested objects,
`items`, `enum`, `default`, ...), shown to the model as it was written.
"""

from __future__ import annotations

from typing import Any, Literal

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field

Role = Literal["system", "developer", "user", "assistant", "tool"]


class FunctionSchema(BaseModel):
    """One function a model may call."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1)
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    """A JSON Schema of the arguments."""


class ToolSchema(BaseModel):
    """A tool as chat templates show it: `{"type": "function", "function": {...}}`."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: FunctionSchema

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.name

    def for_template(self) -> dict[str, Any]:
        """The dict a chat template renders: only what the user wrote, in the order they wrote it."""
        return self.model_dump(exclude_unset=True)


class FunctionCall(BaseModel):
    """Name and arguments of one call."""

    model_config = ConfigDict(extra="allow")

    name: str
    arguments: dict[str, Any] | str


class ToolCall(BaseModel):
    """One call a model made, as it stands in an assistant message."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(BaseModel):
    """One chat message. `content` may be text, content parts or nothing beside tool calls."""

    model_config = ConfigDict(extra="allow")

    role: Role
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The dict a chat template renders; `content` is always there, empty rather than missing."""
        rendered = self.model_dump(exclude_unset=True, exclude_none=True)
        rendered.setdefault("content", "")
        return rendered

    @property
    def text(self) -> str:
        """The text of the content, parts joined."""
        if isinstance(self.content, list):
            return "".join(str(part.get("text", "")) for part in self.content)
        return self.content or ""


def plain_text(text: str) -> str:
    """Text that can be encoded: lone surrogates, which JSON escapes and careless tools produce, become `?`."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def plain_json(value: Any) -> Any:
    """What other people's code returned, as JSON that can be written and read again.

    Numbers of NumPy and the like become plain ones, what JSON does not know becomes text, and a value that is circular,
    too deep or no valid text becomes its `repr`.
    """
    try:
        return pydantic_core.from_json(pydantic_core.to_json(value, fallback=json_fallback, inf_nan_mode="strings"))
    except ValueError:
        return repr(value)[:1000].encode("ascii", errors="backslashreplace").decode("ascii")


def json_fallback(value: Any) -> Any:
    """Arrays and numbers of NumPy and the like as plain ones; anything else that JSON does not know as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
