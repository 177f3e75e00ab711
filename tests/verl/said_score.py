"""What a conversation says its score is: the scripted runs' `reward.custom_reward_function`."""

from __future__ import annotations

import re
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """What the conversation says its score is."""
    said = re.findall(r"score (\d\.\d)", solution_str)
    return float(said[-1]) if said else 0.0
