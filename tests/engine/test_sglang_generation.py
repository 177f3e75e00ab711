"""What only a real engine can be asked: stop ids, its cache, and weights that change what is said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from engine.subjects import TEST_TIMEOUT_S, TINY_MODEL, Subject, new_id

from sglang_multiturn.chat.hf_template import HFChatTemplate
from sglang_multiturn.conversation.turns import before_stop
from sglang_multiturn.engine.base import FinishReason, GenerationId, SamplingParams
from sglang_multiturn.engine.sglang_engine import SGLangEngine
from sglang_multiturn.errors import EngineError, WeightUpdateError

pytestmark = pytest.mark.slow
safetensors = pytest.importorskip("safetensors.numpy")


@pytest_asyncio.fixture(loop_scope="session")
async def restored(sglang_subject: Subject) -> AsyncIterator[Subject]:
    """The engine, whose weights are those of the folder again afterwards."""
    yield sglang_subject
    engine = sglang_subject.engine
    await engine.update_weights_from_disk(str(TINY_MODEL), weight_version=engine.weight_version + 1)


def _weights() -> dict[str, np.ndarray]:
    weights: dict[str, np.ndarray] = safetensors.load_file(TINY_MODEL / "model.safetensors")
    return weights


def _scrambled() -> dict[str, np.ndarray]:
    """The same embedding rows in another order: other words for everything."""
    name = "model.embed_tokens.weight"
    return {name: _weights()[name][::-1].copy()}


async def test_a_stop_id_ends_the_turn_and_stays_in_it(sglang_subject: Subject) -> None:
    free = await sglang_subject.short(new_id("r"), max_new_tokens=8)
    stop_id = free.token_ids[-1]
    cut = list(free.token_ids[: list(free.token_ids).index(stop_id) + 1])
    for budget in (len(cut), 50):
        params = SamplingParams(temperature=0.0, max_new_tokens=budget, stop_token_ids=(stop_id,))
        stopped = await sglang_subject.engine.generate(GenerationId(new_id("r"), 0), sglang_subject.prompt, params)
        assert (list(stopped.token_ids), stopped.finish_reason) == (cut, FinishReason.STOP)
        assert stopped.logprobs is not None
        assert len(stopped.logprobs) == len(cut)


async def test_a_stop_string_ends_the_turn_and_its_ids_stay_in_it(sglang_subject: Subject) -> None:
    template = HFChatTemplate.from_pretrained(TINY_MODEL)
    free = await sglang_subject.short(new_id("r"), max_new_tokens=8)
    texts = [template.decode([*free.token_ids[:n], template.stop_token_ids[0]]) for n in range(9)]
    stop = texts[5].removeprefix(texts[4])
    first = next(n for n, text in enumerate(texts) if stop in text)
    params = SamplingParams(temperature=0.0, max_new_tokens=50, stop=(stop,))
    stopped = await sglang_subject.engine.generate(GenerationId(new_id("r"), 0), sglang_subject.prompt, params)
    assert (list(stopped.token_ids), stopped.finish_reason) == (list(free.token_ids[:first]), FinishReason.STOP)
    assert before_stop(template.decode(stopped.token_ids), params.stop) == texts[first].partition(stop)[0]
    assert stopped.logprobs is not None
    assert len(stopped.logprobs) == first


async def test_the_next_turn_finds_the_last_one_in_the_cache(sglang_subject: Subject) -> None:
    engine = sglang_subject.engine
    await engine.flush_cache()
    first = await sglang_subject.short(new_id("r"), max_new_tokens=8)
    assert first.cached_tokens == 0
    follow_up = [*sglang_subject.prompt, *first.token_ids, 7, 7, 7]
    second = await engine.generate(GenerationId(new_id("r"), 1), follow_up, SamplingParams(max_new_tokens=1))
    # The last sampled token was never an input, so its keys and values are not in the cache.
    assert second.cached_tokens == len(sglang_subject.prompt) + 7


async def test_flushing_is_refused_while_a_generation_needs_the_cache(sglang_subject: Subject) -> None:
    request_id = new_id("endless")
    async with asyncio.timeout(TEST_TIMEOUT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(sglang_subject.long(request_id))
        await sglang_subject.let_run()
        with pytest.raises(EngineError, match=f"1 generations are in flight .first: {request_id}:t0:a0"):
            await sglang_subject.engine.flush_cache()
        await sglang_subject.engine.abort(request_id)


async def test_new_weights_change_what_is_said_and_the_version(restored: Subject) -> None:
    engine = restored.engine
    before = await restored.short(new_id("r"), max_new_tokens=6)
    version = engine.weight_version + 1
    await engine.update_weights(_scrambled().items(), weight_version=version)
    after = await restored.short(new_id("r"), max_new_tokens=6)
    assert list(after.token_ids) != list(before.token_ids)
    assert (after.weight_version, after.cached_tokens) == (version, 0)
    await engine.update_weights(_weights().items(), weight_version=version + 1)
    again = await restored.short(new_id("r"), max_new_tokens=6)
    assert (list(again.token_ids), again.weight_version) == (list(before.token_ids), version + 1)


async def test_weights_from_disk_change_what_is_said_and_the_version(restored: Subject, tmp_path: Path) -> None:
    engine = restored.engine
    _save_model(tmp_path, _weights() | _scrambled())
    before = await restored.short(new_id("r"), max_new_tokens=6)
    version = engine.weight_version + 1
    await engine.update_weights_from_disk(str(tmp_path), weight_version=version)
    after = await restored.short(new_id("r"), max_new_tokens=6)
    assert list(after.token_ids) != list(before.token_ids)
    assert after.weight_version == version


async def test_an_update_waits_for_running_generations_and_holds_new_ones_back(restored: Subject) -> None:
    engine = restored.engine
    version, request_id = engine.weight_version + 1, new_id("endless")
    async with asyncio.timeout(TEST_TIMEOUT_S), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(restored.long(request_id))
        await restored.let_run()
        update = tasks.create_task(engine.update_weights(_scrambled().items(), weight_version=version))
        await asyncio.sleep(0)
        held_back = tasks.create_task(restored.short(new_id("r")))
        await asyncio.sleep(0)
        await engine.abort("nobody")  # a round trip: all of the above has arrived
        assert (update.done(), held_back.done(), running.done()) == (False, False, False)
        await engine.abort(request_id)
    assert running.result().weight_version == version - 1
    assert held_back.result().weight_version == version


async def test_an_update_is_refused_while_generations_are_frozen(restored: Subject) -> None:
    engine = restored.engine
    version, request_id = engine.weight_version, new_id("endless")
    async with asyncio.timeout(TEST_TIMEOUT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(restored.long(request_id))
        await restored.let_run()
        await engine.pause_generation("in_place")
        with pytest.raises(WeightUpdateError, match="1 generations are frozen by pause_generation"):
            await engine.update_weights(_scrambled().items(), weight_version=version + 1)
        await engine.abort(request_id)
        await engine.continue_generation()
    assert engine.weight_version == version


async def test_an_engine_paused_with_abort_takes_new_weights(restored: Subject) -> None:
    engine = restored.engine
    version = engine.weight_version + 1
    async with asyncio.timeout(TEST_TIMEOUT_S):
        await engine.pause_generation("abort")
        await engine.update_weights(_scrambled().items(), weight_version=version)
        await engine.continue_generation()
    assert (await restored.short(new_id("r"))).weight_version == version


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("model.norm.weight", (3,), r"model.norm.weight has shape \[3\], the model's is \[128\]"),
        ("model.nurm.weight", (128,), "model.nurm.weight is not a weight of this model"),
    ],
)
async def test_wrong_tensors_are_refused_and_the_old_ones_serve(
    sglang_subject: Subject, name: str, shape: tuple[int, ...], message: str
) -> None:
    engine = sglang_subject.engine
    before, version = await sglang_subject.short(new_id("r")), engine.weight_version
    mixed = {**_scrambled(), name: np.zeros(shape, dtype=np.float32)}
    with pytest.raises(WeightUpdateError, match=message):
        await engine.update_weights(mixed.items(), weight_version=version + 1)
    after = await sglang_subject.short(new_id("r"))
    assert (list(after.token_ids), after.weight_version) == (list(before.token_ids), version)
    assert engine.weight_version == version


@pytest.mark.parametrize("fault", ["no folder", "no weights", "broken file", "wrong shape", "missing weight"])
async def test_a_wrong_folder_is_refused_and_the_old_weights_serve(
    sglang_subject: Subject, tmp_path: Path, fault: str
) -> None:
    engine = sglang_subject.engine
    weights = _weights()
    folder = tmp_path if fault != "no folder" else tmp_path / "nowhere"
    message = {
        "no folder": "has no config.json",
        "no weights": "holds no readable",
        "broken file": "is not a safetensors file",
        "wrong shape": r"model.norm.weight has shape \[3\]",
        "missing weight": "model.norm.weight is missing",
    }[fault]
    if fault == "wrong shape":
        weights["model.norm.weight"] = np.zeros(3, dtype=np.float32)
    if fault == "missing weight":
        del weights["model.norm.weight"]
    _save_model(tmp_path, weights)
    if fault == "no weights":
        (tmp_path / "model.safetensors").unlink()
    if fault == "broken file":
        (tmp_path / "model.safetensors").write_bytes(b"not at all")
    before, version = await sglang_subject.short(new_id("r")), engine.weight_version
    with pytest.raises(WeightUpdateError, match=message):
        await engine.update_weights_from_disk(str(folder), weight_version=version + 1)
    after = await sglang_subject.short(new_id("r"))
    assert (list(after.token_ids), after.weight_version) == (list(before.token_ids), version)


def _save_model(folder: Path, weights: dict[str, np.ndarray]) -> None:
    for file in TINY_MODEL.glob("*.json"):
        (folder / file.name).write_text(file.read_text())
    safetensors.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


async def test_the_same_request_twice_at_once_is_refused_and_the_first_goes_on(sglang_subject: Subject) -> None:
    request_id = new_id("endless")
    async with asyncio.timeout(TEST_TIMEOUT_S), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(sglang_subject.long(request_id))
        await sglang_subject.let_run()
        with pytest.raises(EngineError, match="Duplicate request ID"):
            await sglang_subject.long(request_id)
        assert not running.done()
        await sglang_subject.engine.abort(request_id)


def test_info_says_what_stands_in_for_a_gpu(sglang_engine: SGLangEngine) -> None:
    info = sglang_engine.info
    config = json.loads((TINY_MODEL / "config.json").read_text())
    assert (info.device, info.vocab_size) == ("cpu", config["vocab_size"])
    assert 0 < config["max_position_embeddings"] - info.max_model_len <= 6
    assert info.kv_capacity_tokens == 16_384
    assert info.notice is not None
    assert "speed figures mean nothing" in info.notice
