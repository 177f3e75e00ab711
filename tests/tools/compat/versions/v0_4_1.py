"""As for verl 0.4.1: the schema may stand in the class, and `create` may leave the id to the base class."""
# ruff: noqa: UP006, UP035, UP045

from typing import Any, Optional, Tuple

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import (
    OpenAIFunctionParametersSchema,
    OpenAIFunctionPropertySchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
)

LOG = []


class GuessTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._truths = {}
        self._solved = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return OpenAIFunctionToolSchema(
            type="function",
            function=OpenAIFunctionSchema(
                name="guess",
                description="Tells whether a guess is right.",
                parameters=OpenAIFunctionParametersSchema(
                    type="object",
                    properties={"guess": OpenAIFunctionPropertySchema(type="integer", description="A number.")},
                    required=["guess"],
                ),
            ),
        )

    async def create(self, instance_id: str, ground_truth: int, **kwargs) -> str:
        LOG.append(("create", kwargs))
        self._truths[instance_id] = ground_truth
        return await super().create(instance_id, **kwargs)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], unit: Optional[str] = None
    ) -> Tuple[str, float, dict]:
        LOG.append(("execute", {"unit": unit}))
        solved = self._solved[instance_id] = parameters["guess"] == self._truths[instance_id]
        return f"{parameters['guess']} is {'right' if solved else 'wrong'}", 0.0 if solved else -0.05, {}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        LOG.append(("calc_reward", kwargs))
        return float(self._solved.get(instance_id, False))

    async def release(self, instance_id: str, **kwargs) -> None:
        LOG.append(("release", kwargs))
        del self._truths[instance_id]
