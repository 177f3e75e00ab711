"""What every engine promises a conversation, asked of each of them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from engine.subjects import SGLANG_SLOTS, TEST_TIMEOUT_S, LetterTemplate, Subject, alphabet, new_id

from sglang_multiturn.engine.base import Engine, FinishReason, GenerationId, PauseMode, SamplingParams
from sglang_multiturn.engine.scripted import ScriptedEngine
from sglang_multiturn.errors import EngineDiedError, InvalidRequestError, WeightUpdateError


def test_both_engines_satisfy_the_protocol(engine: Engine) -> None:
    assert isinstance(engine, Engine)


async def test_every_token_has_one_logprob(subject: Subject) -> None:
    generation = await subject.short(new_id("r"), max_new_tokens=7)
    assert len(generation.token_ids) == 7
    assert generation.logprobs is not None
    assert len(generation.logprobs) == 7
    assert all(logprob <= 0.0 for logprob in generation.logprobs)
    assert all(0 <= token_id < subject.engine.info.vocab_size for token_id in generation.token_ids)


async def test_ids_are_those_the_engine_went_on_from(subject: Subject) -> None:
    whole = await subject.short(new_id("r"), max_new_tokens=9)
    params = SamplingParams(temperature=0.0, max_new_tokens=5)
    rest = await subject.engine.generate(GenerationId(new_id("r"), 0), [*subject.prompt, *whole.token_ids[:4]], params)
    assert list(rest.token_ids) == list(whole.token_ids[4:])


async def test_budget_is_used_up_exactly_and_reported_as_length(subject: Subject) -> None:
    for max_new_tokens in (1, 2, 6):
        generation = await subject.short(new_id("r"), max_new_tokens=max_new_tokens)
        assert len(generation.token_ids) == max_new_tokens
        assert generation.finish_reason is FinishReason.LENGTH


async def test_thirty_two_generations_at_once_all_end_with_their_own_tokens(subject: Subject) -> None:
    alone = await subject.short(new_id("r"), max_new_tokens=6)
    async with asyncio.timeout(TEST_TIMEOUT_S), asyncio.TaskGroup() as tasks:
        together = [tasks.create_task(subject.short(new_id("r"), max_new_tokens=6)) for _ in range(32)]
    assert [list(task.result().token_ids) for task in together] == [list(alone.token_ids)] * 32


async def test_aborting_a_running_generation_returns_what_it_has(subject: Subject) -> None:
    request_id = new_id("endless")
    async with asyncio.timeout(TEST_TIMEOUT_S), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(subject.long(request_id))
        await subject.let_run()
        await subject.engine.abort(request_id)
    generation = running.result()
    assert generation.finish_reason is FinishReason.ABORT
    assert 0 < len(generation.token_ids) < subject.endless_tokens
    assert generation.logprobs is not None
    assert len(generation.logprobs) == len(generation.token_ids)


async def test_aborting_a_queued_generation_returns_nothing_and_leaves_the_others(subject: Subject) -> None:
    ids = [new_id("endless") for _ in range(SGLANG_SLOTS + 1)]
    async with asyncio.timeout(TEST_TIMEOUT_S), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(subject.long(request_id)) for request_id in ids[:-2]]
        await subject.let_run()
        running.append(tasks.create_task(subject.long(ids[-2])))
        queued = tasks.create_task(subject.long(ids[-1]))
        await asyncio.sleep(0)
        await subject.engine.abort(ids[-1])
        generation = await queued
        assert not any(task.done() for task in running)
        await subject.engine.abort_all()
    assert (list(generation.token_ids), generation.finish_reason) == ([], FinishReason.ABORT)
    assert {task.result().finish_reason for task in running} == {FinishReason.ABORT}


async def test_an_abort_right_behind_its_generation_is_not_lost(subject: Subject) -> None:
    for _ in range(10):
        request_id = new_id("endless")
        async with asyncio.timeout(TEST_TIMEOUT_S), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(subject.long(request_id))
            await asyncio.sleep(0)
            await subject.engine.abort(request_id)
        assert running.result().finish_reason is FinishReason.ABORT


async def test_aborting_one_request_leaves_another_whose_id_begins_alike(subject: Subject) -> None:
    first, second = new_id("endless"), new_id("endless")
    longer = first + "0"
    async with asyncio.timeout(TEST_TIMEOUT_S), asyncio.TaskGroup() as tasks:
        running = {name: tasks.create_task(subject.long(name)) for name in (first, second, longer)}
        await subject.let_run()
        await subject.engine.abort(first)
        await running[first]
        assert [running[name].done() for name in (second, longer)] == [False, False]
        await subject.engine.abort_all()


async def test_aborting_an_unknown_request_does_nothing(subject: Subject) -> None:
    await subject.engine.abort("nobody")
    assert (await subject.short(new_id("r"))).finish_reason is FinishReason.LENGTH


async def test_abort_all_ends_everything_in_flight(subject: Subject) -> None:
    async with asyncio.timeout(TEST_TIMEOUT_S), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(subject.long(new_id("endless"))) for _ in range(4)]
        await subject.let_run()
        await subject.engine.abort_all()
    assert [task.result().finish_reason for task in running] == [FinishReason.ABORT] * 4


async def test_cancelling_the_call_frees_the_engine_and_raises(subject: Subject) -> None:
    async with asyncio.timeout(TEST_TIMEOUT_S):
        running = [asyncio.create_task(subject.long(new_id("endless"))) for _ in range(SGLANG_SLOTS - 1)]
        await subject.let_run()
        for task in running:
            task.cancel()
        outcomes = [await asyncio.wait([task]) for task in running]
        # Only an engine that has nothing in flight flushes its cache.
        await subject.engine.flush_cache()
    assert len(outcomes) == len(running)
    assert all(task.cancelled() for task in running)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_a_paused_engine_starts_nothing_until_it_continues(subject: Subject, mode: PauseMode) -> None:
    engine = subject.engine
    async with asyncio.timeout(TEST_TIMEOUT_S), asyncio.TaskGroup() as tasks:
        await engine.pause_generation(mode)
        waiting = tasks.create_task(subject.short(new_id("r")))
        dropped = tasks.create_task(subject.long(request_id := new_id("endless")))
        await asyncio.sleep(0)
        await engine.abort(request_id)
        assert list((await dropped).token_ids) == []
        assert not waiting.done()
        await engine.continue_generation()
    assert (dropped.result().finish_reason, waiting.result().finish_reason) == (
        FinishReason.ABORT,
        FinishReason.LENGTH,
    )


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_it_says_when_a_pause_is_over(subject: Subject, mode: PauseMode) -> None:
    engine = subject.engine
    async with asyncio.timeout(TEST_TIMEOUT_S), asyncio.TaskGroup() as tasks:
        await engine.serving("r")
        await engine.pause_generation(mode)
        serving = tasks.create_task(engine.serving("r"))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not serving.done()
        await engine.continue_generation()


@pytest.mark.parametrize(("mode", "done"), [("abort", True), ("retract", False), ("in_place", False)])
async def test_pausing_ends_running_generations_only_under_abort(subject: Subject, mode: PauseMode, done: bool) -> None:
    engine, request_id = subject.engine, new_id("endless")
    async with asyncio.timeout(TEST_TIMEOUT_S), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(subject.long(request_id))
        await subject.let_run()
        await engine.pause_generation(mode)
        if done:
            await running
        assert running.done() is done
        await engine.continue_generation()
        if not done:
            await subject.let_run()
        await engine.abort(request_id)
    assert running.result().finish_reason is FinishReason.ABORT
    assert len(running.result().token_ids) > 0


async def test_pausing_with_abort_ends_what_an_earlier_pause_froze(subject: Subject) -> None:
    async with asyncio.timeout(TEST_TIMEOUT_S), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(subject.long(new_id("endless")))
        await subject.let_run()
        await subject.engine.pause_generation("in_place")
        await subject.engine.pause_generation("abort")
        generation = await running
        await subject.engine.continue_generation()
    assert generation.finish_reason is FinishReason.ABORT


async def test_generations_carry_the_version_of_the_last_update(subject: Subject) -> None:
    engine = subject.engine
    before = engine.weight_version
    assert (await subject.short(new_id("r"))).weight_version == before
    nothing: list[tuple[str, np.ndarray]] = []
    await engine.update_weights(nothing, weight_version=before + 1)
    assert engine.weight_version == before + 1
    assert (await subject.short(new_id("r"))).weight_version == before + 1


async def test_a_version_that_goes_back_is_refused(subject: Subject) -> None:
    engine = subject.engine
    before = engine.weight_version
    with pytest.raises(WeightUpdateError, match=f"weight_version {before - 1} is older than {before}"):
        await engine.update_weights([], weight_version=before - 1)
    assert engine.weight_version == before


async def test_flushing_changes_no_outcome(subject: Subject) -> None:
    before = await subject.short(new_id("r"))
    await subject.engine.flush_cache()
    assert list((await subject.short(new_id("r"))).token_ids) == list(before.token_ids)


async def test_ids_outside_the_vocabulary_are_refused_and_the_engine_still_serves(subject: Subject) -> None:
    vocab_size = subject.engine.info.vocab_size
    for bad in (vocab_size, -1, 10**9):
        with pytest.raises(InvalidRequestError, match=f"token id {bad} is outside the vocabulary"):
            await subject.engine.generate(GenerationId(new_id("r"), 0), [1, bad], SamplingParams(max_new_tokens=1))
    assert len((await subject.short(new_id("r"))).token_ids) == 4


async def test_a_generation_that_cannot_fit_is_refused_and_the_longest_that_can_is_served(subject: Subject) -> None:
    limit = subject.engine.info.max_model_len
    prompt = [subject.prompt[0]] * (limit - 2)
    with pytest.raises(InvalidRequestError, match=f"exceed max_model_len {limit}"):
        await subject.engine.generate(GenerationId(new_id("r"), 0), prompt, SamplingParams(max_new_tokens=3))
    params = SamplingParams(temperature=0.0, max_new_tokens=2)
    served = await subject.engine.generate(GenerationId(new_id("r"), 0), prompt, params)
    assert len(served.token_ids) == 2


@pytest.mark.parametrize("max_new_tokens", [None, 0])
async def test_a_generation_without_a_budget_is_refused(subject: Subject, max_new_tokens: int | None) -> None:
    params = SamplingParams(max_new_tokens=max_new_tokens)
    with pytest.raises(InvalidRequestError, match="max_new_tokens must be at least 1"):
        await subject.engine.generate(GenerationId(new_id("r"), 0), subject.prompt, params)


async def test_a_closed_engine_says_so_and_can_be_closed_again() -> None:
    engine = ScriptedEngine(LetterTemplate(), alphabet)
    await engine.start()
    await engine.close()
    await engine.close()
    with pytest.raises(EngineDiedError, match="closed"):
        await engine.generate(GenerationId("r", 0), [65], SamplingParams(max_new_tokens=1))
