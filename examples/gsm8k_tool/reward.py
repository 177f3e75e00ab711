"""The demo's reward: 1.0 when the model's last stated answer is exactly right, else 0.0.

verl finds it by `reward.custom_reward_function.path=examples/gsm8k_tool/reward.py`. Under this package's loop
`solution_str` holds the model's own words only, so a number that the calculator printed is worth nothing until the model
says it itself.
"""

from __future__ import annotations

import re
from typing import Any

ANSWER = re.compile(r"The answer is (-?\d{1,100})\.(?!\d)")
"""How the system prompt of `word_problems.py` asks for the answer: a whole number and a full stop."""


def stated_answer(text: str) -> int | None:
    """The last answer stated in `text`, or None where there is none."""
    stated = ANSWER.findall(text)
    return int(stated[-1]) if stated else None


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> float:
    """Score one conversation; the signature is verl's, of which this task needs the words and the truth."""
    return float(stated_answer(solution_str) == int(ground_truth))
