"""The calculator with a bug that shows in one session of every prompt, in whatever process it runs."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from sglang_multiturn.tools.builtin.calculator import CalculatorTool

FAILING_SESSION = 3
_SESSIONS: Counter[int] = Counter()


class FailingCalculator(CalculatorTool):
    """Breaks in the fourth of every eight conversations about a question."""

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        question = kwargs["question"]
        if _session(instance_id or "", question) == FAILING_SESSION:
            raise RuntimeError(f"question {question}: the calculator is broken")
        return await super().create(instance_id, **kwargs)


def _session(instance_id: str, question: int) -> int:
    """V1 names the session; under V0 it is the n-th conversation about the question in this process."""
    if named := re.search(r"-s(\d+)-g\d+$", instance_id):
        return int(named[1])
    _SESSIONS[question] += 1
    return (_SESSIONS[question] - 1) % 8
