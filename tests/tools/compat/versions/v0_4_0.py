"""A tool as they were written for verl 0.4.0, whose multi-turn rollout is PR #1037: everything flat, answers are text."""
# ruff: noqa: UP006, UP035, UP045

import logging
import os
from typing import Any, Optional, Tuple
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

LOG = []


class Game:
    def __init__(self, ground_truth, low=0):
        self.ground_truth = ground_truth
        self.low = low
        self.solved = False


class GuessTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._games = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(self, instance_id: Optional[str] = None, ground_truth: Optional[int] = None, **kwargs) -> str:
        if instance_id is None:
            instance_id = str(uuid4())
        LOG.append(("create", kwargs))
        self._games[instance_id] = Game(ground_truth, **kwargs)  # anything but the row's own keys would raise here
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> Tuple[str, float, dict]:
        LOG.append(("execute", kwargs))
        game = self._games[instance_id]
        guess = parameters.get("guess")
        game.solved = guess == game.ground_truth
        return f"{guess} is {'right' if game.solved else 'wrong'}", 0.0 if game.solved else -0.05, {"low": game.low}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        LOG.append(("calc_reward", kwargs))
        return float(self._games[instance_id].solved)

    async def release(self, instance_id: str, **kwargs) -> None:
        LOG.append(("release", kwargs))
        del self._games[instance_id]
