"""Conversations the tiny model is taught from, most of them poor on purpose.

A model that only ever saw good conversations would leave reinforcement learning nothing to do. So the mixture knows the
format of a call well and the task badly: it guesses, picks a wrong operation or stops a step early. Each flaw is a habit
that sampling can escape, which is what a group of samples needs in order to differ.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast
from word_problems import OPERATIONS, Problem, Step, carry_out, prompt

Message = dict[str, Any]

ASSISTANT_START = "<|im_start|>assistant\n"
TURN_END = "<|im_end|>"


@dataclass(frozen=True, slots=True)
class Mixture:
    """Weights of the kinds of conversation."""

    good: float = 0.25
    """Every step right."""
    guess: float = 0.35
    """No call at all, and a number of about the right size."""
    wrong_operation: float = 0.22
    """One step computes something else."""
    early: float = 0.18
    """The last step is missing."""

    def draw(self, rng: random.Random) -> str:
        """One kind, by weight."""
        kinds = ("good", "guess", "wrong_operation", "early")
        return rng.choices(kinds, [getattr(self, kind) for kind in kinds])[0]


def demonstrate(problem: Problem, kind: str, rng: random.Random) -> list[Message]:
    """One conversation about `problem`, of the kind named."""
    messages: list[Message] = list(prompt(problem.question))
    if kind == "guess":
        guess = max(1, int(problem.answer * rng.uniform(0.6, 1.5)))
        return [*messages, {"role": "assistant", "content": f"The answer is {guess}."}]
    plan = problem.plan
    if kind == "wrong_operation":
        plan = spoiled(plan, rng)
    elif kind == "early":
        plan = plan[:-1]
    steps = carry_out(plan, problem.numbers)
    for step in steps:
        messages += [call(step), {"role": "tool", "content": str(step.result)}]
    return [*messages, {"role": "assistant", "content": f"The answer is {steps[-1].result}."}]


def spoiled(plan: tuple[str, ...], rng: random.Random) -> tuple[str, ...]:
    """The plan with the operation of one step exchanged for another."""
    victim = rng.randrange(len(plan))
    left, operation, right = plan[victim].split()
    other = rng.choice([candidate for candidate in OPERATIONS if candidate != operation])
    return (*plan[:victim], f"{left} {other} {right}", *plan[victim + 1 :])


def call(step: Step) -> Message:
    """The assistant message that asks the calculator for one step."""
    function = {"name": "calculator", "arguments": {"expression": step.expression}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def encode(
    tokenizer: PreTrainedTokenizerFast, messages: list[Message], tools: list[Any]
) -> tuple[list[int], list[int]]:
    """Ids of a conversation, and a mask that is 1 on what the assistant has to produce, its end token included.

    The text is encoded in the pieces in which it comes to be at rollout time, so that the ids taught are the ids met.
    """
    text = str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))
    ids: list[int] = []
    mask: list[int] = []

    def append(piece: str, trained: int) -> None:
        encoded = tokenizer.encode(piece, add_special_tokens=False)
        ids.extend(encoded)
        mask.extend([trained] * len(encoded))

    before, *turns = re.split(f"(?<={re.escape(ASSISTANT_START)})", text)
    append(before, 0)
    for turn in turns:
        said, after = turn.split(TURN_END, 1)
        append(said + TURN_END, 1)
        append(after, 0)
    return ids, mask
