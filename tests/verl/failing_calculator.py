"""The calculator with a bug that shows in one session of every prompt."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sglang_multiturn.tools.builtin.calculator import CalculatorTool

FAILING_SESSION = 3
_SESSIONS: Counter[int] = Counter()


class FailingCalculator(CalculatorTool):
    """Breaks in the fourth of every eight conversations about a question."""

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        question = kwargs["question"]
        _SESSIONS[question] += 1
        if (_SESSIONS[question] - 1) % 8 == FAILING_SESSION:
            raise RuntimeError(f"question {question}: the calculator is broken")
        return await super().create(instance_id, **kwargs)
