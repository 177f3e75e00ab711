"""A `@function_tool` of verl (`multi_turn.function_tool_path`) as a tool of this package."""

from __future__ import annotations

from typing import Any

from verl.tools.function_tool import FunctionTool, normalize_function_tool_return

from sglang_multiturn.schemas import ToolSchema
from sglang_multiturn.tools.base import BaseTool, ToolResponse


class VerlFunctionTool(BaseTool):
    """Calls the function with the arguments; what it may return is what verl lets it return (function_tool.py:226)."""

    def __init__(self, function: FunctionTool) -> None:
        schema = function.tool_schema.model_dump(exclude_unset=True, exclude_none=True)
        super().__init__({}, ToolSchema.model_validate(schema))
        self._function = function

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str | ToolResponse, float, dict[str, Any]]:
        """Sync functions run in a thread (function_tool.py:62)."""
        response, reward, metrics = normalize_function_tool_return(await self._function.call(parameters))
        return ToolResponse(text=response.text, image=response.image, video=response.video), reward, metrics
