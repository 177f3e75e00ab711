"""A planned conversation through the real parts: `Rollout`, `HFChatTemplate`, `TokenLedger`; the engine is scripted.

What the engine was asked and what it gave is written down beside it, so that a ledger is not its own witness.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass

from conversations.plans import Mishap, Plan, Spoken
from conversations.speakers import PlannedParser, PlannedUser
from conversations.worlds import World

from sglang_multiturn import (
    Generation,
    GenerationId,
    Message,
    RequestSpec,
    RolloutConfig,
    RolloutContext,
    SamplingParams,
    ScriptedEngine,
    ScriptedTurn,
    Trajectory,
)
from sglang_multiturn.chat.parsing import ParsedCall, ParsedTurn
from sglang_multiturn.conversation.turns import call_id
from sglang_multiturn.errors import EngineError
from sglang_multiturn.rollout import Rollout
from sglang_multiturn.schemas import FunctionCall, ToolCall


@dataclass(slots=True)
class Asked:
    """One generation the engine was asked for."""

    id: GenerationId
    given: list[int]
    params: SamplingParams
    got: Generation | None = None
    """None when the engine raised an error."""


@dataclass(slots=True)
class Played:
    """A conversation that was had."""

    world: World
    plan: Plan
    config: RolloutConfig
    trajectory: Trajectory
    asked: list[Asked]
    renderings: list[Rendered]


@dataclass(slots=True)
class Rendered:
    """What the tokenizer makes of a whole conversation up to a turn and what follows it."""

    turn: int
    ids: list[int]
    whole: bool
    """The ids the engine was given stand at its start, and what it sampled was read from it."""
    ended: int
    """The id with which the turn ended."""


_ABORTS = (Mishap.ABORT, Mishap.ENGINE_ABORT, Mishap.SUSPEND)


class _Engine(ScriptedEngine):
    """Writes down what goes in and out; gives every token a log-probability of its own."""

    def __init__(self, player: _Player, plan: Plan) -> None:
        super().__init__(player.world.template, player.turn, max_model_len=plan.max_model_len)
        self.asked: list[Asked] = []
        self._keeps_logprobs = plan.keeps_logprobs
        self._sampled = 0

    async def generate(
        self, generation_id: GenerationId, input_ids: Sequence[int], params: SamplingParams
    ) -> Generation:
        asked = Asked(generation_id, list(input_ids), params)
        self.asked.append(asked)
        generation = await super().generate(generation_id, input_ids, params)
        first, self._sampled = self._sampled, self._sampled + len(generation.token_ids)
        # Multiples of 1/64 are exact in any float.
        logprobs = [-(i + 1) / 64 for i in range(first, self._sampled)] if self._keeps_logprobs else None
        asked.got = dataclasses.replace(generation, logprobs=logprobs, weight_version=len(self.asked))
        return asked.got

    def must_be_idle(self) -> None:
        """Raises AssertionError while something is in flight."""
        assert not self._in_flight, f"{list(self._in_flight)} are in the engine, though the conversation is suspended"


class _Player:
    """Plays one plan."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.plan = plan
        self.engine = _Engine(self, plan)
        self.parser = PlannedParser()
        self.renderings: list[Rendered] = []
        self.config = RolloutConfig(**plan.settings)
        self.rollout = Rollout(
            RequestSpec(request_id="r", uid="u", messages=plan.prompt),
            RolloutContext(
                generator=self.engine,
                template=world.template,
                tools=world.registry,
                parser=self.parser,
                config=self.config,
                max_model_len=plan.max_model_len,
                interaction=None if plan.users is None else PlannedUser(plan.users),
            ),
        )
        world.tool.answers = plan.answers
        world.tool.abort = self.rollout.abort
        world.tool.suspend = lambda: self._later(self._suspend(times=1, steps=0))
        self._tasks: list[asyncio.Task[None]] = []

    async def play(self) -> Played:
        if self.plan.aborted_before:
            self.rollout.abort()
        if self.plan.suspended_before:
            await self.rollout.suspend()
            self._later(self._resume())
        async with self.engine:
            trajectory = await self.rollout.run()
            for task in self._tasks:
                await task
        return Played(self.world, self.plan, self.config, trajectory, self.engine.asked, self.renderings)

    def _later(self, doing: Coroutine[None, None, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(doing))

    async def _resume(self) -> None:
        self.rollout.resume()

    async def _suspend(self, *, times: int, steps: int) -> None:
        """Suspend and resume, each time so many steps of the loop later, wherever the conversation may be by then."""
        for _ in range(times):
            for _ in range(steps):
                await asyncio.sleep(0)
            await self.rollout.suspend()
            self.engine.must_be_idle()
            await asyncio.sleep(0)
            self.engine.must_be_idle()
            self.rollout.resume()

    def turn(self, generation_id: GenerationId, input_ids: Sequence[int]) -> ScriptedTurn:
        """The engine's script."""
        if self.plan.spoken:
            return self._spoken(generation_id.turn, input_ids)
        if generation_id.turn >= len(self.plan.turns):
            return ScriptedTurn(token_ids=self.world.spelt("done"))
        planned = self.plan.turns[generation_id.turn]
        mishap = planned.mishap if generation_id.attempt < planned.attempts else Mishap.NONE
        if mishap is Mishap.ABORT:
            asyncio.get_running_loop().call_soon(self.rollout.abort)
        elif mishap is Mishap.ENGINE_ABORT:
            self._later(self.engine.abort_all())
        elif mishap is Mishap.SUSPEND:
            self._later(self._suspend(times=planned.attempts, steps=planned.after % 11))
        return ScriptedTurn(
            token_ids=planned.ids,
            end=planned.end_id is not None,
            end_id=planned.end_id,
            finish_reason=planned.finish_reason,
            hang_after=planned.after if mishap in _ABORTS else None,
            error=EngineError("planned engine error") if mishap is Mishap.ERROR else None,
        )

    # What the template itself would render

    def _spoken(self, turn: int, given: Sequence[int]) -> ScriptedTurn:
        """A turn as it stands in the rendering of the conversation that holds it and what follows."""
        spoken = self.plan.spoken[turn] if turn < len(self.plan.spoken) else Spoken(words="done")
        end = self.world.ends["tool" if spoken.calls else "user"]
        users = self.plan.users or ()
        said = sum(message.role == "user" for message in self.rollout.request.messages[len(self.plan.prompt) :])
        if not spoken.calls and said >= len(users):
            return ScriptedTurn(token_ids=self.world.spelt(spoken.words), end_id=end)
        assistant = _assistant(turn, spoken)
        following = (
            [
                Message(role="tool", content=self.plan.answers[i].text, name="echo", tool_call_id=call_id(turn, n))
                for n, i in enumerate(spoken.calls)
            ]
            if spoken.calls
            else [Message(role="user", content=users[said])]
        )
        ids = self.world.encode(self.world.render([*self.rollout.request.messages, assistant, *following]))
        whole = ids[: len(given)] == list(given) and end in ids[len(given) :]
        sampled = (
            ids[len(given) : ids.index(end, len(given))]
            if whole
            else self.world.spelt(spoken.words or f"calls {spoken.calls}")
        )
        self.renderings.append(Rendered(turn, ids, whole, end))
        calls = tuple(ParsedCall(name="echo", arguments={"i": i}) for i in spoken.calls)
        text = self.world.template.decode([*sampled, end])
        self.parser.known[text] = ParsedTurn(content=spoken.words, reasoning=spoken.thoughts, calls=calls)
        return ScriptedTurn(token_ids=tuple(sampled), end_id=end)


def _assistant(turn: int, spoken: Spoken) -> Message:
    made = [
        ToolCall(id=call_id(turn, n), function=FunctionCall(name="echo", arguments={"i": i}))
        for n, i in enumerate(spoken.calls)
    ]
    thoughts = {"reasoning_content": spoken.thoughts} if spoken.thoughts else {}
    calls = {"tool_calls": made} if made else {}
    return Message.model_validate({"role": "assistant", "content": spoken.words, **thoughts, **calls})


LOOP = asyncio.new_event_loop()
"""One for all conversations: making one costs more than having a conversation."""


def play(world: World, plan: Plan) -> Played:
    """Have the conversation."""
    return LOOP.run_until_complete(_Player(world, plan).play())
