"""As for verl 0.9.1: `create` may name the instance itself, and a tool reads the whole conversation."""

from typing import Any
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

LOG = []


class GuessTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.names = list(self.tool_schema.model_dump(exclude_unset=True, exclude_none=True)["function"])
        self._states: dict[str, dict] = {}

    async def create(self, create_kwargs: dict | None = None) -> tuple[str, ToolResponse]:
        LOG.append(("create", create_kwargs))
        instance_id = f"mine-{uuid4()}"
        self._states[instance_id] = dict(create_kwargs or {})
        return instance_id, ToolResponse(text="")

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], agent_data: Any
    ) -> tuple[ToolResponse, float, dict]:
        said = [message["role"] for message in agent_data.messages]
        rewards = list(agent_data.tool_rewards)
        truth = agent_data.tools_kwargs["guess"]["create_kwargs"]["ground_truth"]
        LOG.append(("execute", {"said": said, "rewards": rewards, "request": agent_data.request_id}))
        solved = self._states[instance_id]["solved"] = parameters["guess"] == truth
        agent_data.metrics["guesses"] = agent_data.metrics.get("guesses", 0) + 1
        text = f"{parameters['guess']} is {'right' if solved else 'wrong'}"
        return ToolResponse(text=text), 0.0 if solved else -0.05, {}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        LOG.append(("calc_reward", kwargs))
        return float(self._states[instance_id]["solved"])

    async def release(self, instance_id: str, **kwargs) -> None:
        LOG.append(("release", kwargs))
        del self._states[instance_id]
