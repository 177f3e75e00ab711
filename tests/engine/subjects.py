"""What the tests of this folder know of an engine, whichever it is.

Nothing sleeps: a generation is known to be under way once another one, sent after it, has come back.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sglang_multiturn.engine.base import Engine, Generation, GenerationId, SamplingParams
from sglang_multiturn.engine.scripted import ScriptedTurn

TINY_MODEL = Path(__file__).parents[2] / "examples" / "gsm8k_tool" / "tiny_model"
TEST_TIMEOUT_S = 30.0
SGLANG_SLOTS = 8
"""Small, so that 32 generations queue."""

_request_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An engine under test and prompts whose outcome is known."""

    engine: Engine
    prompt: list[int]
    """Some ids of the vocabulary."""
    endless: list[int]
    """A prompt whose greedy generation goes on until its budget, `endless_tokens`, is used up."""
    endless_tokens: int

    async def short(self, request_id: str, max_new_tokens: int = 4) -> Generation:
        """A few greedy tokens."""
        params = SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens)
        return await self.engine.generate(GenerationId(request_id, 0), self.prompt, params)

    async def long(self, request_id: str, turn: int = 0) -> Generation:
        """A generation that takes long enough to be aborted; its request_id must start with `endless`."""
        assert request_id.startswith("endless")
        params = SamplingParams(temperature=0.0, max_new_tokens=self.endless_tokens)
        return await self.engine.generate(GenerationId(request_id, turn), self.endless, params)

    async def let_run(self) -> None:
        """Return when what was sent before is being sampled: later arrivals have already been answered."""
        await asyncio.sleep(0)  # tasks made by the caller send their request first
        await self.short(new_id("probe"))


def new_id(prefix: str) -> str:
    """A request id no other test has used."""
    return f"{prefix}-{next(_request_numbers)}"


class LetterTemplate:
    """One id a character; the end of a turn is id 0."""

    stop_token_ids = (0,)
    vocab_size = 256
    tool_call_format = None

    def encode_text(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token_id) for token_id in ids if token_id)

    def encode_prompt(self, *_args: object) -> NoReturn:
        raise NotImplementedError

    def encode_delta(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError


def alphabet(generation_id: GenerationId, input_ids: Sequence[int]) -> ScriptedTurn:
    """Goes on with the alphabet from the last input letter, like a model that has learnt nothing else."""
    following = range(input_ids[-1] + 1, min(input_ids[-1] + 25, 256))
    hang_after = 3 if generation_id.request_id.startswith("endless") else None
    return ScriptedTurn(token_ids=tuple(following), end=False, hang_after=hang_after)
