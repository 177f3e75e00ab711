"""`calc_gsm8k_reward`: the model asks whether its answer is right before it gives it.

Behaves like the tool of that name in verl's PR #1037: the answer is compared with the row's ground truth, a call that
is no better than the one before costs a little, and `calc_reward` is the score of the last answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any
from uuid import uuid4

from sglang_multiturn.errors import ToolError
from sglang_multiturn.schemas import FunctionSchema, ToolSchema
from sglang_multiturn.tools.base import BaseTool, ToolResponse

NO_PROGRESS_REWARD = -0.05
"""Step reward of an answer that scores no better than the one before; PR #1037's figure."""


_ANSWER = re.compile(r"####\s*\$?\s*(-?[\d,]*\.?\d+)")


def gsm8k_answer(text: str) -> str | None:
    """The number after the *last* `####`, commas removed: a corrected answer counts. None when there is none."""
    found = _ANSWER.findall(text)
    return found[-1].replace(",", "") if found else None


def same_number(answer: str, ground_truth: str) -> bool:
    """Whether two texts are the same number; False when one of them is none."""
    try:
        return Fraction(answer.replace(",", "")) == Fraction(ground_truth.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return False


@dataclass(slots=True)
class _State:
    ground_truth: str
    score: float = 0.0


class Gsm8kTool(BaseTool):
    """Scores an answer to a GSM8K problem."""

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self._states: dict[str, _State] = {}

    @classmethod
    def default_schema(cls) -> ToolSchema:
        """One required string, `answer`."""
        answer = {"type": "string", "description": "The answer to check, a number."}
        return ToolSchema(
            function=FunctionSchema(
                name="calc_gsm8k_reward",
                description="Tells whether an answer to the problem is right (1.0) or wrong (0.0).",
                parameters={"type": "object", "properties": {"answer": answer}, "required": ["answer"]},
            )
        )

    async def create(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> str | tuple[str, ToolResponse]:
        """Keep the row's ground truth for this conversation."""
        instance_id = instance_id or uuid4().hex
        self._states[instance_id] = _State("" if ground_truth is None else str(ground_truth))
        return instance_id

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str | ToolResponse, float, dict[str, Any]]:
        """Score `answer`. Raises ToolError when the row brought no ground truth."""
        state = self._states[instance_id]
        if not state.ground_truth:
            raise ToolError("this problem has no known answer to compare with")
        answer = gsm8k_answer(f"#### {parameters.get('answer', '')}") or ""
        score = float(same_number(answer, state.ground_truth))
        step_reward = 0.0 if score > state.score else NO_PROGRESS_REWARD
        state.score = score
        return f"Answer {answer!r} was read, its reward is {score:.1f}.", step_reward, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The score of the last answer; 0.0 when there was none."""
        return self._states[instance_id].score

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget this conversation."""
        del self._states[instance_id]
