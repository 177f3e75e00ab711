"""As for verl 0.5.0: `execute` is traced, and a YAML says `type: native`."""
# ruff: noqa: UP045

from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.rollout_trace import rollout_trace_op

LOG = []


class GuessTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instance_dict = {}

    async def create(self, instance_id: Optional[str] = None, ground_truth: Optional[int] = None, **kwargs) -> str:
        LOG.append(("create", kwargs))
        if instance_id is None:
            instance_id = str(uuid4())
        self._instance_dict[instance_id] = {"ground_truth": ground_truth, "reward": 0.0}
        return instance_id

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[str, float, dict]:
        LOG.append(("execute", kwargs))
        guess = parameters.get("guess")
        reward = float(guess == self._instance_dict[instance_id]["ground_truth"])
        self._instance_dict[instance_id]["reward"] = reward
        return f"{guess} is {'right' if reward else 'wrong'}", 0.0 if reward else -0.05, {"type": self.config["type"]}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        LOG.append(("calc_reward", kwargs))
        return self._instance_dict[instance_id]["reward"]

    async def release(self, instance_id: str, **kwargs) -> None:
        LOG.append(("release", kwargs))
        del self._instance_dict[instance_id]
