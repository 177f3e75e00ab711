"""As for verl 0.7.1: the row's arguments nested alone, and `agent_data` for `execute`."""
# ruff: noqa: UP045

from typing import Any, Optional

from verl.tools.base_tool import BaseTool, ToolResponse
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.rollout_trace import rollout_trace_op

LOG = []


class GuessTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instance_dict = {}

    async def create(self, instance_id: Optional[str] = None, **kwargs) -> tuple[str, ToolResponse]:
        instance_id, response = await super().create(instance_id)
        create_kwargs = kwargs.get("create_kwargs", {})
        LOG.append(("create", create_kwargs))
        self._instance_dict[instance_id] = dict(create_kwargs)
        return instance_id, response

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        agent_data = kwargs.get("agent_data")
        tried = agent_data.extra_fields.setdefault("tried", [])
        tried.append(parameters["guess"])
        LOG.append(("execute", {"tried": list(tried), "turns": agent_data.assistant_turns}))
        solved = parameters["guess"] == self._instance_dict[instance_id]["ground_truth"]
        self._instance_dict[instance_id]["solved"] = solved
        text = f"{parameters['guess']} is {'right' if solved else 'wrong'}"
        return ToolResponse(text=text), 0.0 if solved else -0.05, {"tried": len(tried)}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        LOG.append(("calc_reward", kwargs))
        return float(self._instance_dict[instance_id]["solved"])

    async def release(self, instance_id: str, **kwargs) -> None:
        LOG.append(("release", kwargs))
        del self._instance_dict[instance_id]
