"""The queue of calls: order, exact numbers, exact times (in virtual time), and cancellation at any moment."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.virtual_time import run_virtual

from sglang_multiturn.config import ToolSettings
from sglang_multiturn.tools.limits import Limiter, LocalLimiter, NoLimit, Turnstile, make_local
from sglang_multiturn.tools.ray.limits import make_limiter


def play(main: Coroutine[Any, Any, None]) -> None:
    """Run to the end in virtual time; nothing may be left then."""

    async def watched() -> None:
        await main
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(watched())


def time_s() -> float:
    return asyncio.get_running_loop().time()


# Slots


def test_no_more_calls_run_at_once_than_there_are_slots_and_they_begin_in_the_order_they_came() -> None:
    limiter, begun, running, most = LocalLimiter(max_concurrent=3, max_per_s=None), [], 0, 0

    async def call(number: int) -> None:
        nonlocal running, most
        async with limiter.slot(None):
            begun.append(number)
            running += 1
            most = max(most, running)
            await asyncio.sleep(1.0 + number % 2)
            running -= 1

    async def main() -> None:
        async with asyncio.TaskGroup() as calls:
            for number in range(10):
                calls.create_task(call(number))

    play(main())
    assert (begun, most, running) == (list(range(10)), 3, 0)


def test_a_slot_is_free_again_when_its_call_fails() -> None:
    async def main() -> None:
        limiter = LocalLimiter(max_concurrent=1, max_per_s=None)
        for _ in range(3):
            with pytest.raises(ValueError, match="broken"):
                async with limiter.slot(None):
                    raise ValueError("broken")

    play(main())


def test_a_newcomer_does_not_pass_those_who_wait() -> None:
    async def main() -> None:
        turnstile = Turnstile(max_concurrent=1, max_per_s=None)
        first, second = turnstile.queue(), turnstile.queue()
        turnstile.leave(first)
        third = turnstile.queue()
        assert (second.done(), third.done()) == (True, False)

    play(main())


def test_a_call_cancelled_while_it_waits_leaves_the_queue_to_the_next() -> None:
    async def main() -> None:
        limiter = LocalLimiter(max_concurrent=1, max_per_s=None)
        inside, done = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            async with limiter.slot(None):
                inside.set()
                await done.wait()

        async def wait() -> str:
            async with limiter.slot(None):
                return "had its turn"

        async with asyncio.TaskGroup() as calls:
            calls.create_task(hold())
            await inside.wait()
            cancelled, patient = calls.create_task(wait()), calls.create_task(wait())
            await asyncio.sleep(0)
            cancelled.cancel()
            done.set()
        assert cancelled.cancelled()
        assert patient.result() == "had its turn"

    play(main())


def test_a_call_cancelled_in_the_moment_its_turn_comes_gives_its_slot_back() -> None:
    async def main() -> None:
        limiter = LocalLimiter(max_concurrent=1, max_per_s=None)

        async def call() -> None:
            async with limiter.slot(None):
                raise AssertionError("it was cancelled before it began")

        async with limiter.slot(None):
            waiting = asyncio.get_running_loop().create_task(call())  # outside any group: it is cancelled below
            await asyncio.sleep(0)
        waiting.cancel()  # leaving the block above granted it the slot, which it has not yet seen
        async with asyncio.timeout(1), limiter.slot(None):
            assert waiting.cancelled()

    play(main())


def test_calls_that_run_already_count_although_there_was_no_slot_for_them() -> None:
    async def main() -> None:
        turnstile = Turnstile(max_concurrent=2, max_per_s=None)
        running = [turnstile.occupy() for _ in range(3)]
        waiting = turnstile.queue()
        assert all(place.done() for place in running)
        turnstile.leave(running[0])
        assert not waiting.done()
        turnstile.leave(running[1])
        assert waiting.done()

    play(main())


# Rate


def test_calls_begin_evenly_spaced_also_the_first_ones() -> None:
    times: list[float] = []

    async def main() -> None:
        limiter = LocalLimiter(max_concurrent=None, max_per_s=5.0)
        for _ in range(11):
            async with limiter.slot(None):
                times.append(time_s())

    play(main())
    # A fifth of a second, and the hundredth of it that late timers may catch up on.
    assert times == pytest.approx([0.202 * number - 0.01 * (number > 0) for number in range(11)])


def test_after_a_rest_nothing_is_made_up_for() -> None:
    times: list[float] = []

    async def main() -> None:
        limiter = LocalLimiter(max_concurrent=None, max_per_s=1.0)
        for _ in range(2):
            async with limiter.slot(None):
                pass
        await asyncio.sleep(100.0 - time_s())
        for _ in range(3):
            async with limiter.slot(None):
                times.append(time_s())

    play(main())
    assert times == pytest.approx([100.0, 101.0, 102.01])


def test_less_than_one_call_a_second() -> None:
    times: list[float] = []

    async def main() -> None:
        limiter = LocalLimiter(max_concurrent=None, max_per_s=0.25)
        for _ in range(3):
            async with limiter.slot(None):
                times.append(time_s())

    play(main())
    assert times == pytest.approx([0.0, 4.03, 8.07])


def test_a_full_house_is_waited_for_and_the_rate_kept_play() -> None:
    times: list[float] = []

    async def call(limiter: Limiter) -> None:
        async with limiter.slot(None):
            times.append(time_s())
            await asyncio.sleep(10.0)

    async def main() -> None:
        limiter = LocalLimiter(max_concurrent=2, max_per_s=1.0)
        async with asyncio.TaskGroup() as calls:
            for _ in range(4):
                calls.create_task(call(limiter))

    play(main())
    assert times == pytest.approx([0.0, 1.0, 10.0, 11.0])


@given(
    rate=st.integers(1, 40),
    pauses_s=st.lists(st.floats(0.0, 0.7), min_size=1, max_size=60),
    late_s=st.floats(0.0, 0.009),
)
def test_no_second_holds_more_calls_than_the_rate_says_however_they_come_and_however_late_timers_are(
    rate: int, pauses_s: list[float], late_s: float
) -> None:
    times: list[float] = []

    async def call(limiter: Limiter) -> None:
        async with limiter.slot(None):
            times.append(time_s())

    async def main() -> None:
        loop = asyncio.get_running_loop()
        on_time = loop.call_at
        loop.call_at = lambda when, *rest, **more: on_time(when + late_s, *rest, **more)  # type: ignore[method-assign]
        limiter = LocalLimiter(max_concurrent=None, max_per_s=float(rate))
        async with asyncio.TaskGroup() as calls:
            for pause_s in pauses_s:
                calls.create_task(call(limiter))
                await asyncio.sleep(pause_s if pause_s > 0.3 else 0.0)

    play(main())
    assert len(times) == len(pauses_s)
    fullest = max(sum(start <= other < start + 1.0 - 1e-6 for other in times) for start in times)
    assert fullest <= rate


def test_late_timers_do_not_slow_a_fast_tool_down() -> None:
    times: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        on_time = loop.call_at
        loop.call_at = lambda when, *rest, **more: on_time(when + 0.003, *rest, **more)  # type: ignore[method-assign]
        limiter = LocalLimiter(max_concurrent=None, max_per_s=1000.0)
        for _ in range(1000):
            async with limiter.slot(None):
                times.append(time_s())

    play(main())
    assert times[-1] == pytest.approx(1.0, abs=0.01)


# Any order of events

STEPS = st.lists(
    st.tuples(st.sampled_from(["queue", "leave", "leave twice", "cancel"]), st.integers(0, 30)), max_size=80
)


@given(slots=st.integers(1, 4), steps=STEPS)
def test_whatever_happens_no_slot_is_lost_or_given_twice_and_nobody_is_passed(
    slots: int, steps: list[tuple[str, int]]
) -> None:
    async def main() -> None:
        turnstile = Turnstile(max_concurrent=slots, max_per_s=None)
        places: list[asyncio.Future[None]] = []  # asked for and not yet left, in their order
        for what, which in steps:
            if what == "queue" or not places:
                places.append(turnstile.queue())
            elif what == "cancel":  # as a task's cancellation does; its `leave` comes later
                places[which % len(places)].cancel()
            else:
                place = places.pop(which % len(places))
                turnstile.leave(place)
                assert place.done()  # whoever awaits it is not left waiting
                if what == "leave twice":
                    turnstile.leave(place)
            wanted = [place for place in places if not place.cancelled()]
            assert [place.done() for place in wanted] == [number < slots for number in range(len(wanted))]

    play(main())


# From settings


async def test_a_tool_without_limits_has_none() -> None:
    limiter = make_local(ToolSettings())
    assert isinstance(limiter, NoLimit)
    async with limiter.slot(None), limiter.slot(1.0):
        pass


@pytest.mark.parametrize("settings", [ToolSettings(max_concurrent=2), ToolSettings(max_per_s=math.pi)])
def test_a_tool_with_one_limit_has_a_queue(settings: ToolSettings) -> None:
    assert isinstance(make_local(settings), LocalLimiter)


def test_without_ray_the_limits_are_those_of_this_process() -> None:
    assert isinstance(make_limiter("tool", ToolSettings(max_concurrent=1), run_id="run"), LocalLimiter)
