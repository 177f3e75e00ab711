"""Imported by verl in its processes (VERL_USE_EXTERNAL_MODULES): conversations that hang, for real.

Sessions `HANG_IN_TOOL` call a tool that sleeps for ever; the model is asked until it makes that call. Session `HANG_IN_GENERATION` is sent to the real SGLang with a
prompt that the model goes on with for minutes, whatever its budget; of what it sampled by the time it is ended the
conversation gets no more than it asked for. What the engine did is written into the file HANG_RECORD, a JSON line each.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tokenizers import Tokenizer

from sglang_multiturn.engine.base import Generation, GenerationId, SamplingParams
from sglang_multiturn.tools.builtin.calculator import CalculatorTool
from sglang_multiturn.verl_plugin.after_import import after_import

HANG_IN_TOOL = (1, 2)
HANG_IN_GENERATION = 3
ENDLESS_TOKENS = 15_000
TINY_MODEL = Path(__file__).parents[2] / "examples" / "gsm8k_tool" / "tiny_model"


class SleepingCalculator(CalculatorTool):
    """Sleeps for ever in the sessions that are to hang."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self._hanging: set[str] = set()

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        if session_of(instance_id or "") in HANG_IN_TOOL:
            self._hanging.add(instance_id or "")
        return await super().create(instance_id, **kwargs)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        if instance_id in self._hanging:
            time.sleep(1_000_000)  # noqa: ASYNC251 - as bad manners as a tool can have
        return await super().execute(instance_id, parameters, **kwargs)


def session_of(request_id: str) -> int | None:
    named = re.search(r"-s(\d+)-g\d+$", request_id)
    return int(named[1]) if named else None


def record_engine(module: ModuleType) -> None:
    engine = module.SGLangEngine
    generate: Callable[..., Any] = engine.generate
    flush: Callable[..., Any] = engine.flush_cache
    in_flight: set[str] = set()
    endless: list[list[int]] = []
    finding = asyncio.Lock()

    async def recorded(
        self: Any, generation_id: GenerationId, input_ids: Sequence[int], params: SamplingParams
    ) -> Generation:
        in_flight.add(generation_id.rid)
        try:
            session = session_of(generation_id.request_id)
            if session in HANG_IN_TOOL and generation_id.turn == 0:
                return await calling(lambda *call: generate(self, *call), generation_id, input_ids, params)
            if session != HANG_IN_GENERATION:
                return await generate(self, generation_id, input_ids, params)
            async with finding:
                if not endless:
                    endless.append(await find_endless(lambda *call: generate(self, *call)))
            greedy = SamplingParams(temperature=0.0, max_new_tokens=ENDLESS_TOKENS)
            generation = await generate(self, generation_id, endless[0], greedy)
            write(event="ended", rid=generation_id.rid, why=generation.finish_reason, tokens=len(generation.token_ids))
            return cut(generation, params.max_new_tokens or 0)
        finally:
            in_flight.discard(generation_id.rid)

    async def recorded_flush(self: Any) -> None:
        await flush(self)
        write(event="idle", in_flight=sorted(in_flight))

    engine.generate, engine.flush_cache = recorded, recorded_flush


async def calling(
    generate: Callable[..., Any], generation_id: GenerationId, input_ids: Sequence[int], params: SamplingParams
) -> Generation:
    """A first turn that calls the tool: the tiny model does in half of them."""
    call_id = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json")).token_to_id("<tool_call>")
    for _ in range(64):
        generation: Generation = await generate(generation_id, input_ids, params)
        if call_id in generation.token_ids and generation.finish_reason == "stop":
            return generation
    raise AssertionError("the tiny model does not call its tool")


async def find_endless(generate: Callable[..., Any]) -> list[int]:
    """A prompt that the model goes on with."""
    for token_id in range(40, 56):
        params = SamplingParams(temperature=0.0, max_new_tokens=200)
        found: Generation = await generate(GenerationId(f"endless-{token_id}", 0), [token_id] * 3, params)
        if found.finish_reason == "length":
            return [token_id] * 3
    raise AssertionError("the tiny model ends whatever it is asked")


def cut(generation: Generation, wanted: int) -> Generation:
    logprobs = generation.logprobs[: wanted - 1] if generation.logprobs is not None else None
    return dataclasses.replace(generation, token_ids=generation.token_ids[: wanted - 1], logprobs=logprobs)


def write(**line: Any) -> None:
    with Path(os.environ["HANG_RECORD"]).open("a") as record:
        record.write(json.dumps(line) + "\n")


if "HANG_RECORD" in os.environ:  # not where a test imports its constants
    after_import("sglang_multiturn.engine.sglang_engine", record_engine)
