"""GSM8K's reward: 1.0 when the number after the model's last `####` is the row's ground truth, else 0.0.

Commas, a dollar sign and a full stop after the number are forgiven; a number without `####` is not an answer. The
reading is the one of the `calc_gsm8k_reward` tool, so tool and reward can never disagree about an answer.

verl finds it by `reward.custom_reward_function.path=examples/gsm8k_tool/reward_gsm8k.py`. Under this package's loop
`solution_str` holds the model's own words only.
"""

from __future__ import annotations

from typing import Any

from sglang_multiturn.tools.builtin.gsm8k import gsm8k_answer, same_number


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> float:
    """Score one conversation; the signature is verl's, of which GSM8K needs the words and the truth."""
    answer = gsm8k_answer(solution_str)
    return float(answer is not None and same_number(answer, ground_truth))
