"""A conversation for every stop reason that a verl run can end in: what the engine says, and the row that must follow.

Each prompt names a plan, and each is sampled SAMPLES times. The first sample plays the plan, the others answer with fixed
scores, so that a group's advantages are known by hand. Each plan's first turn says `score 0.5`.

Not reachable from verl, which configures no interaction: `user_stop`, `environment_done`, `max_user_turns`. Their rows
stand in test_rows.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_multiturn.chat.hf_template import HFChatTemplate
from sglang_multiturn.engine.base import FinishReason, GenerationId
from sglang_multiturn.engine.scripted import ScriptedEngine, ScriptedTurn
from sglang_multiturn.errors import EngineError, ToolError
from sglang_multiturn.request import StopReason
from sglang_multiturn.tools.base import BaseTool, ToolResponse

SAMPLES = 4
OTHERS = (1.0, 0.0, 1.0)
"""What the other samples of a group score."""
PLANNED = 0.5
"""What the plan's own sample scores, where it is scored."""
KEPT = (-0.2611165, 0.7833495, -1.3055824, 0.7833495)
"""Advantages of a group that scored 0.5, 1, 0, 1: its mean is 0.625, its deviation 0.4787136."""

MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS, SHORT_CONTEXT_TOKENS = 128, 256, 24
"""The last one is what `short_context` leaves for the response."""
END = "<|im_end|>"
LOOP = "sglang_multiturn"

SCHEMA = {
    "type": "function",
    "function": {
        "name": "do",
        "description": "Does it.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
    },
}
LOOPS: dict[str, dict[str, Any]] = {
    LOOP: {},
    "one_tool_turn": {"max_tool_turns": 1},
    "short_context": {},  # max_model_len: the test sets it, from the length of the prompt
    "masking": {"overlong": "mask", "failed_rows": "mask"},
    "hurried": {"rollout_timeout_s": 4.0},
    "hurried_kept": {"rollout_timeout_s": 4.0, "timeout": "train"},
}
"""Agent loops of one run: this package's under several names, each with its own settings (the rows' `agent_name`)."""
SETTINGS = {"max_assistant_turns": 3, "max_errors_in_a_row": 2}
"""Of all loops."""


class Do(BaseTool):
    """The one tool, which does what it is told."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str | ToolResponse, float, dict[str, Any]]:
        match parameters["what"]:
            case "stop":
                return ToolResponse(text="done", stop=True), 0.0, {}
            case "fail":
                raise ToolError("it failed")
            case "break":
                raise RuntimeError("it broke")
            case "hang":
                await asyncio.Event().wait()
        return "four", 0.0, {}


def call(what: str) -> str:
    return f'<tool_call>\n{{"name": "do", "arguments": {{"what": "{what}"}}}}\n</tool_call>'


def answer(text: str) -> str:
    """What the template puts between a call and the next turn, around a tool's answer."""
    return f"\n<|im_start|>user\n<tool_response>\n{text}\n</tool_response>{END}\n<|im_start|>assistant\n"


FIRST = "score 0.5\n"
THOUGHT = "<think>\nhm\n</think>\n\n"
INTERRUPTED_AFTER = 16
"""Tokens that `interrupted` has when the engine is paused, which lets it go on."""
BABBLE = ScriptedTurn(text=FIRST + "x" * MAX_RESPONSE_TOKENS, end=False)
"""More tokens than any budget, each `x` one token."""
ABORTED = ScriptedTurn(text=FIRST, end=False, finish_reason=FinishReason.ABORT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One prompt's conversation and its row."""

    stop_reason: StopReason
    turns: tuple[ScriptedTurn | str, ...]
    row: tuple[tuple[int, str], ...] | None
    """Its tokens as (mask, text); None where it is dropped."""
    loop: str = LOOP
    sampled_tokens: int | None = None
    """Where the row is cut at a number of tokens, which `x` fill up."""
    v0: bool = True
    """Whether V0 trains on it too: its groups must divide among the workers."""


PLANS: dict[str, Plan] = {
    "answered": Plan(
        stop_reason=StopReason.ANSWERED,
        turns=(FIRST + call("say"), "So four."),
        row=((1, FIRST + call("say") + END), (0, answer("four")), (1, "So four." + END)),
    ),
    "tool_stop": Plan(
        stop_reason=StopReason.TOOL_STOP,
        turns=(FIRST + call("stop"),),
        row=((1, FIRST + call("stop") + END),),
    ),
    "too_many_errors": Plan(
        stop_reason=StopReason.TOO_MANY_ERRORS,
        turns=(FIRST + call("fail"), call("fail")),
        row=((1, FIRST + call("fail") + END), (0, answer("Error: it failed")), (1, call("fail") + END)),
    ),
    "max_assistant_turns": Plan(
        stop_reason=StopReason.MAX_ASSISTANT_TURNS,
        turns=(FIRST + call("say"), call("a"), call("b")),
        row=(
            *((1, FIRST + call("say") + END), (0, answer("four")), (1, call("a") + END)),
            *((0, answer("four")), (1, call("b") + END)),
        ),
    ),
    "max_tool_turns": Plan(
        stop_reason=StopReason.MAX_TOOL_TURNS,
        loop="one_tool_turn",
        turns=(FIRST + call("say"), call("a")),
        row=((1, FIRST + call("say") + END), (0, answer("four")), (1, call("a") + END)),
    ),
    "max_response_tokens": Plan(
        stop_reason=StopReason.MAX_RESPONSE_TOKENS,
        turns=(BABBLE,),
        row=((1, FIRST),),
        sampled_tokens=MAX_RESPONSE_TOKENS,
    ),
    "max_model_len": Plan(
        stop_reason=StopReason.MAX_MODEL_LEN,
        loop="short_context",
        turns=(BABBLE,),
        row=((1, FIRST),),
        sampled_tokens=SHORT_CONTEXT_TOKENS,
    ),
    "overlong_masked": Plan(
        stop_reason=StopReason.MAX_RESPONSE_TOKENS,
        loop="masking",
        turns=(BABBLE,),
        row=((0, FIRST),),
        sampled_tokens=MAX_RESPONSE_TOKENS,
    ),
    "timeout": Plan(
        stop_reason=StopReason.TIMEOUT,
        loop="hurried",
        turns=(FIRST + call("hang"),),
        row=None,
    ),
    "timeout_kept": Plan(
        stop_reason=StopReason.TIMEOUT,
        loop="hurried_kept",
        turns=(FIRST + call("hang"),),
        row=((1, FIRST + call("hang") + END),),
    ),
    "timeout_in_generation": Plan(
        stop_reason=StopReason.TIMEOUT,
        loop="hurried_kept",
        turns=(ScriptedTurn(text=FIRST + "x" * 20, hang_after=16),),
        row=((1, FIRST),),
        sampled_tokens=16,
    ),
    "aborted": Plan(stop_reason=StopReason.ABORTED, turns=(ABORTED,), row=None),
    "error": Plan(stop_reason=StopReason.ERROR, turns=(FIRST + call("break"),), row=None),
    "prompt_too_long": Plan(stop_reason=StopReason.PROMPT_TOO_LONG, turns=(), row=None),
    "error_masked": Plan(
        stop_reason=StopReason.ERROR,
        loop="masking",
        turns=(FIRST + call("break"),),
        row=((0, END),),
        v0=False,
    ),
}
MORE_PLANS: dict[str, Plan] = {
    "thinks": Plan(
        stop_reason=StopReason.ANSWERED,
        turns=(THOUGHT + FIRST + call("say"), "So four."),
        row=None,  # two rows, where a template leaves out the thought later
    ),
    "interrupted": Plan(
        stop_reason=StopReason.ANSWERED,
        turns=(ScriptedTurn(text=FIRST + "x" * 20, hang_after=INTERRUPTED_AFTER),),
        row=((1, FIRST + "x" * 20 + END),),
    ),
}
"""For runs of their own: what an engine says whose pause alone lets a generation go on, and what a template forgets."""
WHOLE_GROUP = frozenset({"prompt_too_long"})
"""Plans that all samples of a prompt play."""


def prompt_text(plan: str, samples: int) -> str:
    """What the user says. One that is too long is so by its words."""
    padding = " long" * MAX_PROMPT_TOKENS if plan == "prompt_too_long" else ""
    return f"plan {plan} of {samples}{padding}"


def dataset_row(plan: str, index: int, *, samples: int = SAMPLES, source: str = "plans") -> dict[str, Any]:
    """A row of a verl dataset."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": prompt_text(plan, samples)}],
        "agent_name": (PLANS | MORE_PLANS)[plan].loop,
        "reward_model": {"style": "rule", "ground_truth": "0"},
        "extra_info": {"index": index},
    }


class Script:
    """Plays PLANS for the scripted engine; later turns follow from what stands in the conversation."""

    def __init__(self, template: HFChatTemplate) -> None:
        self._template = template
        self._asked: Counter[str] = Counter()

    def __call__(self, generation_id: GenerationId, input_ids: Sequence[int]) -> ScriptedTurn:
        text = self._template.decode(input_ids)
        turns = text.split("<|im_start|>assistant\n")[1:]
        name, samples = re.findall(r"plan (\w+) of (\d+)", text)[0]
        plan = (PLANS | MORE_PLANS)[name]
        if len(turns) > 1 or turns[0]:
            return self._turn(plan.turns[len(turns) - 1], len(turns) - 1, said=turns[-1])
        sample = self._asked[text] % int(samples)
        self._asked[text] += 1
        return self._turn(f"score {OTHERS[sample - 1]}" if sample else plan.turns[0], 0)

    def _turn(self, planned: ScriptedTurn | str, turn: int, said: str = "") -> ScriptedTurn:
        """A planned turn, in the ids a model would choose; `said` is what it has, where it is asked again."""
        scripted = ScriptedTurn(text=planned) if isinstance(planned, str) else planned
        left = scripted.text.removeprefix(said)
        return dataclasses.replace(
            scripted,
            token_ids=tuple(self._template.tokenizer.encode(left, add_special_tokens=False)),
            hang_after=None if said else scripted.hang_after,
            logprob=logprob_of(turn),
        )


def logprob_of(turn: int) -> float:
    """Of every token of a turn, as the engine reports it."""
    return -(turn + 1) / 8


class StrictEngine(ScriptedEngine):
    """Must be idle when verl puts it to sleep, as SGLang must."""

    async def flush_cache(self) -> None:
        if self._in_flight:
            raise EngineError(f"not idle: {', '.join(self._in_flight)}")
