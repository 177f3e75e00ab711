"""No false alarm: over real families, nothing a tool or user says and nothing a model spells oddly is taken for drift."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_multiturn import RolloutConfig, ScriptedTurn
from sglang_multiturn.chat.drift import DRIFT
from sglang_multiturn.chat.hf_template import HFChatTemplate
from sglang_multiturn.engine.base import FinishReason
from sglang_multiturn.request import StopReason
from sglang_multiturn.schemas import Message

from families import tokenizer
from support import AnsweringTool, Asking, call, roll

FAMILIES = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_5_think", "qwen3_5_nothink", "deepseek_r1_distill")
USERS_ONLY = ("qwen3_5_think", "qwen3_5_nothink", "deepseek_r1_distill")
"""Their calls are written otherwise than `support.call` writes them."""

words = st.lists(st.sampled_from(["a", "\n", " ", "é", "🙂", '{"x": 1}', "'q'", "\t", "- b"]), max_size=5).map("".join)
hostile = st.lists(
    st.sampled_from(
        ["a", "\n", "  ", "猫", "<|im_end|>", "<|im_start|>assistant\n", "<think>", "</think>", "<|user|>"]
    ),
    max_size=5,
).map("".join)
thoughts = st.none() | words


@functools.cache
def template(name: str) -> HFChatTemplate:
    return HFChatTemplate(tokenizer(name))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("history", ["keep", "split"])
@settings(max_examples=25, deadline=None)
@given(
    turns=st.lists(st.tuples(thoughts, words, st.booleans(), st.booleans()), min_size=1, max_size=4),
    answer=hostile,
    said=st.lists(hostile, min_size=1, max_size=3),
)
def test_hostile_answers_and_odd_words_are_no_drift(
    name: str, history: Any, turns: Any, answer: str, said: Any
) -> None:
    family = template(name)
    script = []
    for thought, text, calls, ends in turns:
        spoken = text if thought is None else f"<think>\n{thought}\n</think>\n\n{text}"
        spoken += call("echo", x=text) if calls and name not in USERS_ONLY else ""
        ids = tuple(family.encoder.encode_rendering(spoken))
        script.append(ScriptedTurn(token_ids=ids, end=ends, finish_reason=FinishReason.STOP))
    trajectory = asyncio.run(
        roll(
            [*script, *["done"] * 4],
            [AnsweringTool(answer)] if name not in USERS_ONLY else [],
            RolloutConfig(history=history),
            interaction=Asking(*said),
            template=family,
            messages=(Message(role="user", content=answer or "hi"),),
        )
    )
    assert trajectory.stop_reason is StopReason.USER_STOP
    assert [str(example) for example in trajectory.drift if example.kind in DRIFT] == []
    assert trajectory.metrics.new_rows <= sum(
        message.role == "user" and history == "split" and not family.keeps_history("user")
        for message in trajectory.messages[1:]
    )
