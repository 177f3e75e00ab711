"""Generations wait for room in the engine: in their order, abortable and cancellable, and each gives its room back once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.virtual_time import run_virtual

from sglang_multiturn import (
    FinishReason,
    Generation,
    GenerationId,
    RolloutConfig,
    RolloutEngine,
    SamplingParams,
    ScriptedEngine,
    ScriptedTurn,
    StopReason,
)
from sglang_multiturn.engine.admission import (
    BLOCK_TOKENS,
    FIRST_GUESS_TOKENS,
    ExpectedTokens,
    TokenAdmission,
    admitted,
)
from sglang_multiturn.errors import EngineError

from support import TEMPLATE, spec

TAIL = [7]


class Watched(ScriptedEngine):
    """Answers after ten seconds, and knows which generations it was given and which it has."""

    def __init__(self, *, hang: bool = False) -> None:
        super().__init__(TEMPLATE, lambda *_: ScriptedTurn(text="abc", hang_after=1 if hang else None), latency_s=10)
        self.given: list[str] = []
        self.inside: dict[str, int] = {}
        """By rid: its input and the most it may sample."""

    async def generate(
        self, generation_id: GenerationId, input_ids: Sequence[int], params: SamplingParams
    ) -> Generation:
        self.given.append(generation_id.request_id)
        self.inside[generation_id.rid] = len(input_ids) + (params.max_new_tokens or 0)
        try:
            return await super().generate(generation_id, input_ids, params)
        finally:
            del self.inside[generation_id.rid]


def ask(admission: TokenAdmission, name: str, tokens: int, *, new: int = 20) -> asyncio.Task[Generation]:
    """A generation with an input of so many tokens that it shares with nobody."""
    ids = [ord(name[0])] + TAIL * (tokens - 1)
    generation = admission.generate(GenerationId(name, 0), ids, SamplingParams(max_new_tokens=new))
    return asyncio.create_task(generation, name=name)


def test_a_generation_waits_until_those_before_it_have_left_room() -> None:
    async def play() -> tuple[list[str], list[Generation]]:
        async with Watched() as engine:
            admission = TokenAdmission(engine, 100)
            asked = [ask(admission, name, tokens) for name, tokens in (("a", 40), ("b", 20), ("c", 50), ("d", 10))]
            await asyncio.sleep(1)
            assert engine.given == ["a", "b"]  # 60 and 40; neither c nor d, for which there would not be room either
            assert (admission.tokens_in_flight, admission.num_waiting) == (100, 2)
            done = [await task for task in asked]
            assert (admission.tokens_in_flight, admission.num_waiting) == (0, 0)
            return engine.given, done

    given, done = run_virtual(play())
    assert given == ["a", "b", "c", "d"]
    assert [generation.queue_s for generation in done] == [0, 0, 10, 10]
    assert all(generation.finish_reason is FinishReason.STOP for generation in done)


def test_nobody_overtakes_one_that_is_too_big_for_now() -> None:
    async def play() -> list[str]:
        async with Watched() as engine:
            admission = TokenAdmission(engine, 100)
            asked = [ask(admission, name, tokens) for name, tokens in (("a", 40), ("b", 70), ("c", 5))]
            await asyncio.sleep(5)
            assert engine.given == ["a"]
            await asyncio.wait(asked)
            return engine.given

    assert run_virtual(play()) == ["a", "b", "c"]


def test_one_that_is_too_big_altogether_runs_alone() -> None:
    async def play() -> list[float]:
        async with Watched() as engine:
            admission = TokenAdmission(engine, 100)
            asked = [ask(admission, name, tokens) for name, tokens in (("a", 10), ("b", 500), ("c", 10))]
            await asyncio.sleep(15)
            assert list(engine.inside) == ["b:t0:a0"]
            return [(await task).queue_s for task in asked]

    assert run_virtual(play()) == [0, 10, 20]


def test_what_inputs_begin_with_is_held_once() -> None:
    async def play() -> None:
        async with Watched() as engine:
            admission = TokenAdmission(engine, 10_000)
            prompt = [position % 200 for position in range(2 * BLOCK_TOKENS + 5)]
            tasks = []
            for number in range(3):
                ids = [*prompt, number]
                params = SamplingParams(max_new_tokens=4)
                tasks.append(asyncio.create_task(admission.generate(GenerationId(f"r{number}", 0), ids, params)))
            await asyncio.sleep(1)
            rest = 5 + 1 + 4
            assert admission.tokens_in_flight == 2 * BLOCK_TOKENS + 3 * rest
            await admission.abort("r0")
            await asyncio.sleep(1)
            assert admission.tokens_in_flight == 2 * BLOCK_TOKENS + 2 * rest
            await asyncio.wait(tasks)
            assert admission.tokens_in_flight == 0

    run_virtual(play())


def test_the_same_block_after_another_beginning_is_another_block() -> None:
    async def play() -> int:
        async with Watched() as engine:
            admission = TokenAdmission(engine, 10_000)
            params = SamplingParams(max_new_tokens=1)
            for number in range(2):
                ids = [number] * BLOCK_TOKENS + TAIL * BLOCK_TOKENS
                asyncio.create_task(admission.generate(GenerationId(f"r{number}", 0), ids, params))  # noqa: RUF006
            await asyncio.sleep(1)
            return admission.tokens_in_flight

    assert run_virtual(play()) == 4 * BLOCK_TOKENS + 2


async def test_one_that_waits_can_be_aborted_and_leaves_the_line() -> None:
    async with Watched(hang=True) as engine:
        admission = TokenAdmission(engine, 100)
        first, second, third = ask(admission, "a", 60), ask(admission, "b", 60), ask(admission, "c", 60)
        await engine.wait_until_started("a")
        await admission.abort("b")
        assert await second == Generation(
            token_ids=(), logprobs=(), finish_reason=FinishReason.ABORT, queue_s=(await second).queue_s
        )
        await admission.abort("a")
        assert (await first).finish_reason is FinishReason.ABORT
        await engine.wait_until_started("c")
        assert engine.given == ["a", "c"]
        await admission.abort("c")
        await third
        assert admission.tokens_in_flight == 0


async def test_an_abort_in_the_moment_of_its_admission_is_not_lost() -> None:
    may_end = asyncio.get_running_loop().create_future()

    class Held(Watched):
        async def generate(
            self, generation_id: GenerationId, input_ids: Sequence[int], params: SamplingParams
        ) -> Generation:
            self.given.append(generation_id.request_id)
            return await may_end

    async with Held() as engine:
        admission = TokenAdmission(engine, 100)
        first, second = ask(admission, "a", 60), ask(admission, "b", 60)
        await asyncio.sleep(0)
        may_end.set_result(Generation(token_ids=[1], logprobs=None, finish_reason=FinishReason.STOP))
        # These run in this order in the loop's next round: a ends and lets b in, the abort comes, b would go on after that.
        await asyncio.create_task(admission.abort("b"))
        assert admission.num_waiting == 0
        assert (await second).finish_reason is FinishReason.ABORT
        assert (await first).finish_reason is FinishReason.STOP
        assert engine.given == ["a"]
        assert admission.tokens_in_flight == 0


async def test_cancelled_generations_give_back_their_room_and_their_place() -> None:
    async with Watched(hang=True) as engine:
        admission = TokenAdmission(engine, 100)
        running, waiting, last = ask(admission, "a", 60), ask(admission, "b", 60), ask(admission, "c", 60)
        await engine.wait_until_started("a")
        waiting.cancel()
        await asyncio.wait([waiting])
        assert admission.num_waiting == 1
        running.cancel()
        await engine.wait_until_started("c")
        assert admission.tokens_in_flight == 80
        last.cancel()
        await asyncio.wait([running, last])
        assert (admission.tokens_in_flight, admission.num_waiting, engine.given) == (0, 0, ["a", "c"])


async def test_a_refused_generation_gives_back_its_room() -> None:
    class Refusing(Watched):
        async def generate(self, *_: Any) -> Generation:
            raise EngineError("out of order")

    async with Refusing() as engine:
        admission = TokenAdmission(engine, 100)
        with pytest.raises(EngineError, match="out of order"):
            await ask(admission, "a", 60)
        assert admission.tokens_in_flight == 0


def test_without_a_limit_there_is_nothing_in_between() -> None:
    engine = Watched()
    assert admitted(engine, None) is engine


def test_what_is_reserved_follows_the_turns_that_ended_lately() -> None:
    expected = ExpectedTokens()
    for _ in range(15):
        expected.note(10)
    assert expected.tokens == FIRST_GUESS_TOKENS  # fifteen are too few to go by
    expected.note(10)
    assert expected.tokens == 12  # all are equal: the mean, and a fifth more
    expected.note(1000)
    # One in flight is most probably the long one: 1,001,600 / 2 / 1,160, and a fifth more.
    assert expected.tokens == 519
    for _ in range(512):
        expected.note(100)
    assert expected.tokens == 120  # the early ones are forgotten


def test_more_is_let_in_once_turns_turn_out_to_be_short() -> None:
    async def play() -> list[int]:
        async with Watched() as engine:
            admission = TokenAdmission(engine, 30_000)
            asked = [ask(admission, f"{chr(97 + n)}", 10, new=20_000) for n in range(26)]
            at_once = []
            for _ in range(3):
                await asyncio.sleep(1)
                at_once.append(len(engine.inside))
                await asyncio.sleep(9.5)
            await asyncio.wait(asked)
            return at_once

    # Ten of 2867 tokens fit at first; that a turn has four is known after sixteen of them.
    assert run_virtual(play()) == [10, 10, 6]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1_000_000))
def test_whatever_happens_the_limit_holds_and_everything_is_given_back(seed: int) -> None:
    rng = random.Random(seed)
    limit = rng.choice([40, 100, 300])

    class Measured(Watched):
        async def generate(
            self, generation_id: GenerationId, input_ids: Sequence[int], params: SamplingParams
        ) -> Generation:
            own = len(input_ids) + (params.max_new_tokens or 0)
            assert not self.inside or sum(self.inside.values()) + own <= limit
            return await super().generate(generation_id, input_ids, params)

    async def play() -> tuple[list[str], list[str]]:
        async with Measured() as engine:
            admission = TokenAdmission(engine, limit)
            tasks, never = [], set[str]()
            for number in range(rng.randint(1, 12)):
                name = f"{chr(97 + number)}"
                tasks.append(ask(admission, name, rng.randint(1, 60), new=rng.randint(1, 60)))
                await asyncio.sleep(rng.choice([0, 0, 0.5, 4, 10]))
                victim = rng.choice(tasks)
                match rng.randrange(4):
                    case 0:
                        await admission.abort(victim.get_name())
                    case 1:
                        victim.cancel()
                    case _:
                        continue
                if victim.get_name() not in engine.given:
                    never.add(victim.get_name())
            await asyncio.wait(tasks)
            assert (admission.tokens_in_flight, admission.num_waiting, engine.inside) == (0, 0, {})
            asked = [task.get_name() for task in tasks if task.get_name() not in never]
            return engine.given, asked

    given_over, asked = run_virtual(play())
    # Those that were ended while they waited never came to the engine, and all others did.
    assert sorted(given_over) == asked


def test_conversations_wait_for_room_and_say_how_long() -> None:
    async def play() -> list[tuple[StopReason, float]]:
        engine = ScriptedEngine(TEMPLATE, lambda *_: "abc", latency_s=10)
        config = RolloutConfig(max_response_tokens=30, max_tokens_in_flight=100)
        async with RolloutEngine(engine, template=TEMPLATE, config=config) as rollouts:
            prompt_tokens = len(TEMPLATE.encode_prompt(spec().messages, []))
            assert 100 // (prompt_tokens + 30) == 1
            finished = await rollouts.run_all([spec(f"r{i}") for i in range(3)])
        return [(trajectory.stop_reason, trajectory.metrics.queue_s) for trajectory in finished]

    assert run_virtual(play()) == [(StopReason.ANSWERED, 0), (StopReason.ANSWERED, 10), (StopReason.ANSWERED, 20)]


def test_conversations_that_wait_for_room_can_be_suspended_and_aborted() -> None:
    async def play() -> list[StopReason]:
        engine = ScriptedEngine(TEMPLATE, lambda *_: "abc", latency_s=10)
        config = RolloutConfig(max_response_tokens=30, max_tokens_in_flight=100)
        async with RolloutEngine(engine, template=TEMPLATE, config=config) as rollouts, asyncio.TaskGroup() as group:
            ended = group.create_task(rollouts.run_all([spec(f"r{i}") for i in range(3)]))
            await asyncio.sleep(5)
            async with rollouts.suspended():
                await engine.update_weights([], weight_version=1)
                await asyncio.sleep(100)
            rollouts.abort("r1")
        return [trajectory.stop_reason for trajectory in ended.result()]

    assert run_virtual(play()) == [StopReason.ANSWERED, StopReason.ABORTED, StopReason.ANSWERED]
