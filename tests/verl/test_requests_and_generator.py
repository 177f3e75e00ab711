"""Rows of verl's dataset in, verl's servers behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("verl")

import numpy as np
import ray
from verl.workers.rollout.replica import TokenOutput

from sglang_multiturn.engine.base import FinishReason, GenerationId, SamplingParams
from sglang_multiturn.errors import ConfigError, DataError, EngineDiedError, EngineError
from sglang_multiturn.request import RequestSpec, ToolKwargs
from sglang_multiturn.verl_plugin.generator import VerlGenerator
from sglang_multiturn.verl_plugin.requests import RequestNames, request_spec
from sglang_multiturn.verl_plugin.rows import VersionSpan

ROW: dict[str, Any] = {
    "raw_prompt": np.array([{"role": "user", "content": "2+2?"}], dtype=object),
    "uid": "u1",
    "index": np.int64(7),
    "data_source": "sums",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7},
    "tools_kwargs": {"calculator": {"create_kwargs": {"ground_truth": "4"}}, "search": None},
}
PARAMS = SamplingParams(max_new_tokens=3, stop_token_ids=(9,))
TURN = GenerationId("r1", 0)


def spec_of(**row: Any) -> RequestSpec:
    return request_spec(
        ROW | row,
        names=RequestNames(),
        sampling=SamplingParams(temperature=0.5),
        known_tools=("calculator", "search"),
        validate=False,
    )


def test_a_row_of_the_v1_worker() -> None:
    spec = spec_of(session_id=3, global_steps=5)
    assert (spec.request_id, spec.uid, spec.sample_index, spec.input_index) == ("u1-s3-g5", "u1", 3, 7)
    assert [message.text for message in spec.messages] == ["2+2?"]
    assert (spec.data_source, spec.ground_truth, spec.sampling.temperature) == ("sums", "4", 0.5)
    assert spec.tools_kwargs == {"calculator": ToolKwargs(create_kwargs={"ground_truth": "4"})}
    assert spec.tool_names is None


def test_names_are_unique_without_a_session() -> None:
    names = RequestNames()
    asked = {
        request_spec(ROW, names=names, sampling=SamplingParams(), known_tools=(), validate=False).request_id
        for _ in range(8)
    }
    assert len(asked) == 8
    assert spec_of().request_id not in asked


def test_tools_kwargs_may_stand_in_extra_info_only() -> None:
    spec = spec_of(tools_kwargs=None, extra_info={"tools_kwargs": {"search": {"execute_kwargs": {"k": 1}}}})
    assert spec.tools_kwargs == {"search": ToolKwargs(execute_kwargs={"k": 1})}


@pytest.mark.parametrize(
    ("selection", "names"),
    [(None, None), ([], None), (["search"], ("search",)), (np.array(["search", "gone"]), ("search",))],
)
def test_tool_selection_is_read_as_verl_reads_it(selection: Any, names: tuple[str, ...] | None) -> None:
    assert spec_of(extra_info={"tool_selection": selection}).tool_names == names


def test_a_row_that_is_no_conversation_is_named() -> None:
    with pytest.raises(DataError, match="request u1-s0-g5"):
        spec_of(raw_prompt=[{"role": "wizard", "content": "?"}], session_id=0, global_steps=5)


class Servers:
    """verl's client, answering as told."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.calls: list[dict[str, Any]] = []
        self.let_go = asyncio.Event()
        self.let_go.set()
        self.started = asyncio.Event()
        self.running = 0

    async def generate(self, **call: Any) -> TokenOutput:
        self.calls.append(call)
        self.running += 1
        self.started.set()
        try:
            await self.let_go.wait()
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer
        finally:
            self.running -= 1


def output(ids: list[int], stop_reason: str | None, **extra: Any) -> TokenOutput:
    return TokenOutput(token_ids=ids, log_probs=[-1.0] * len(ids), stop_reason=stop_reason, extra_fields=extra)


async def test_what_the_server_is_asked() -> None:
    servers = Servers(output([5, 9], "stop"))
    await VerlGenerator(servers, rollout_name="sglang").generate(TURN, [1, 2], PARAMS)
    assert servers.calls == [
        {
            "request_id": "r1",
            "prompt_ids": [1, 2],
            "sampling_params": {
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,
                "repetition_penalty": 1.0,
                "logprobs": True,
                "max_tokens": 3,
                "stop_token_ids": [9],
            },
        }
    ]


def test_stop_ids_go_only_to_servers_that_hand_them_on() -> None:
    assert "stop_token_ids" not in VerlGenerator(Servers(None), rollout_name="trtllm").sampling_params(PARAMS)


def test_verls_sglang_still_knows_every_key_that_is_sent() -> None:
    pytest.importorskip("sglang")
    import inspect

    from sglang.srt.sampling.sampling_params import SamplingParams as SGLangParams

    sent = set(VerlGenerator(Servers(None), rollout_name="sglang").sampling_params(PARAMS)) - {"logprobs", "max_tokens"}
    assert sent <= set(inspect.signature(SGLangParams).parameters)


def test_stop_strings_are_refused_with_the_flag_to_change() -> None:
    with pytest.raises(ConfigError, match=r"skip_tokenizer_init=False"):
        VerlGenerator(Servers(None), rollout_name="sglang").sampling_params(SamplingParams(stop=("\n\n",)))
    allowed = VerlGenerator(Servers(None), rollout_name="sglang", skip_tokenizer_init=False)
    assert allowed.sampling_params(SamplingParams(stop=("\n\n",)))["stop"] == ["\n\n"]


@pytest.mark.parametrize(
    ("ids", "said", "reason"),
    [
        ([5, 9], "stop", FinishReason.STOP),
        ([5, 6, 7], "length", FinishReason.LENGTH),
        ([5], "abort", FinishReason.ABORT),
        ([], "aborted", FinishReason.ABORT),
        ([5, 9], "completed", FinishReason.STOP),
        ([5, 6, 9], "completed", FinishReason.STOP),
        ([5, 6, 7], "completed", FinishReason.LENGTH),
        ([5, 6, 7], None, FinishReason.LENGTH),
        ([], None, FinishReason.STOP),
    ],
)
async def test_why_a_generation_ended(ids: list[int], said: str | None, reason: FinishReason) -> None:
    generation = await VerlGenerator(Servers(output(ids, said)), rollout_name="vllm").generate(TURN, [1], PARAMS)
    assert generation.finish_reason is reason
    assert list(generation.token_ids) == ids


async def test_versions_of_a_conversation_span_all_its_generations() -> None:
    servers = Servers(output([5, 9], "stop", global_steps=4, min_global_steps=3, max_global_steps=4))
    generator = VerlGenerator(servers, rollout_name="sglang")
    first = await generator.generate(TURN, [1], PARAMS)
    servers.answer = output([5, 9], "stop", global_steps=5)
    await generator.generate(GenerationId("r1", 1), [1], PARAMS)
    assert first.weight_version == 4
    assert generator.take_span("r1") == VersionSpan(3, 5)
    assert generator.take_span("r1") is None


async def test_errors_of_the_server_are_engine_errors() -> None:
    died = VerlGenerator(Servers(ray.exceptions.RayActorError()), rollout_name="sglang")
    with pytest.raises(EngineDiedError):
        await died.generate(TURN, [1], PARAMS)
    refused = VerlGenerator(Servers(ValueError("Prompt length (9) exceeds")), rollout_name="sglang")
    with pytest.raises(EngineError, match="Prompt length"):
        await refused.generate(TURN, [1], PARAMS)


async def test_a_conversation_that_was_cut_short_settles_only_when_the_engine_is_done_with_it() -> None:
    servers = Servers(output([5, 9], "stop"))
    servers.let_go.clear()
    generator = VerlGenerator(servers, rollout_name="sglang")
    generation = asyncio.create_task(generator.generate(TURN, [1], PARAMS))
    await servers.started.wait()
    generation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await generation
    settled = asyncio.create_task(generator.settle("r1"))
    await asyncio.sleep(0)
    assert (servers.running, settled.done()) == (1, False)
    servers.let_go.set()
    await settled
    assert servers.running == 0
