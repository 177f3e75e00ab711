"""One request → one trajectory, whatever happens on the way.

`run_one` is the whole conversation: a handler for each state returns the next state, or the reason why it is over.

    PENDING ──► RUNNING ──► TOOL_CALLING ──► RUNNING ...
                   │  └───► INTERACTING ──► RUNNING ...
                   └──────► a StopReason: calc_reward, score, release, Trajectory
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_multiturn.answers import (
    as_shown,
    count,
    ends_conversation,
    errors_in_a_row,
    judgements,
    refuse_failed_create,
)
from sglang_multiturn.chat.calls import BrokenCall, BrokenKind, ParsedCall, ParsedTurn
from sglang_multiturn.chat.drift import DriftLog
from sglang_multiturn.chat.parsing import ToolCallParser
from sglang_multiturn.chat.template import ChatTemplate
from sglang_multiturn.config import RolloutConfig
from sglang_multiturn.engine.base import FinishReason, Generation, Generator
from sglang_multiturn.generation import generate_turn
from sglang_multiturn.history import History, check_template
from sglang_multiturn.interactions.base import Done, Interaction
from sglang_multiturn.request import AsyncRolloutRequest, Disposition, RequestSpec, RequestState, StopReason
from sglang_multiturn.rewards import RewardFn, call_reward_fn, check_weights, combine
from sglang_multiturn.schemas import FunctionCall, Message, ToolCall, ToolSchema
from sglang_multiturn.tokens import Origin
from sglang_multiturn.tools.registry import ToolRegistry
from sglang_multiturn.tools.runtime import ToolRuntime
from sglang_multiturn.tools.session import NumberedCall, ToolAnswer, ToolSession
from sglang_multiturn.trajectory import Rewards, ToolCallRecord, Trajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """What a conversation needs and many share."""

    generator: Generator
    template: ChatTemplate
    tools: ToolRegistry
    parser: ToolCallParser
    config: RolloutConfig
    max_model_len: int
    reward_fn: RewardFn | None = None
    interaction: Interaction | None = None
    drift_log: DriftLog = field(default_factory=DriftLog)
    tool_runtime: ToolRuntime | None = None
    """What the tools run in; None makes one of `tools`. Whoever gives one closes it."""

    def __post_init__(self) -> None:
        """Raises ConfigError: a reward's weight is wrong; TemplateError: the template cannot show what tools or users say."""
        check_weights(self.config, self.tools.names)
        if self.tool_runtime is None:
            object.__setattr__(self, "tool_runtime", ToolRuntime(self.tools, self.config))
        check_template(self.template, self.tools, self.interaction)


def call_id(turn: int, index: int) -> str:
    """The id of a turn's call: nine letters and digits (Mistral's template takes no others), unique, readable."""
    return f"call{turn:02d}{index:03d}" if turn < 100 and index < 1000 else f"{turn:04x}i{index:04x}"


async def run_one(spec: RequestSpec, context: RolloutContext) -> Trajectory:
    """Roll out one request. Raises nothing but CancelledError: a bad rollout is data."""
    return await Rollout(spec, context).run()


@dataclass(slots=True)
class _Turn:
    """The assistant turn that tools or a user are about to answer."""

    calls: list[NumberedCall] = field(default_factory=list)


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string: what is parsed. The ledger keeps every id that was sampled."""
    return text[: min((at for stop in stops if stop and (at := text.find(stop)) >= 0), default=len(text))]


class Rollout:
    """One conversation. `run` once; `abort` at any time from the same event loop."""

    def __init__(self, spec: RequestSpec, context: RolloutContext) -> None:
        self.request = AsyncRolloutRequest(spec)
        self._spec = spec
        self._context = context
        self._config = context.config
        self._schemas: list[ToolSchema] = []
        self._history = History(self.request, context.template, self._config, context.max_model_len)
        self._turn = _Turn()
        self._broken_turns: set[int] = set()
        self._records: list[ToolCallRecord] = []
        self._session: ToolSession | None = None
        self._clock: asyncio.Timeout | None = None
        self._abort_requested = False

    def abort(self) -> None:
        """End this conversation as `aborted`; its generation is aborted and acknowledged first.

        One that has ended already and is being scored keeps its own stop_reason.
        """
        self._abort_requested = True
        if self._clock is not None and not self._clock.expired():  # which a second abort would find it to be
            self._clock.reschedule(asyncio.get_running_loop().time())

    async def run(self) -> Trajectory:
        """The whole conversation."""
        started = time.monotonic()
        stop_reason, error, rewards = StopReason.ERROR, None, Rewards()
        try:
            runtime = self._context.tool_runtime
            assert runtime is not None  # the context made one
            self._session = ToolSession(self.request, runtime, self._config)
            async with self._session:
                stop_reason = await self._converse_in_time()
                if stop_reason is not StopReason.ABORTED:
                    self._history.check_drift(self._context.drift_log, self._broken_turns)
                    rewards = await self._judge(stop_reason)
        except (Exception, SystemExit, asyncio.CancelledError) as caught:  # the one boundary: a bad rollout is data
            task = asyncio.current_task()
            if isinstance(caught, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise
            logger.warning("request %s failed: %r", self._spec.request_id, caught)
            stop_reason, error, rewards = StopReason.ERROR, caught, Rewards()
        self.request.finish(stop_reason, error)
        self.request.metrics.total_s = time.monotonic() - started
        return self._trajectory(stop_reason, rewards)

    async def _converse_in_time(self) -> StopReason:
        clock = asyncio.timeout(self._config.rollout_timeout_s)
        try:
            async with clock:
                self._clock = clock
                return StopReason.ABORTED if self._abort_requested else await self._converse()
        except TimeoutError:
            if self._abort_requested:
                return StopReason.ABORTED
            if clock.expired():
                return StopReason.TIMEOUT
            raise
        finally:
            self._clock = None

    async def _converse(self) -> StopReason:
        handlers: Mapping[RequestState, Callable[[], Awaitable[RequestState | StopReason]]] = {
            RequestState.PENDING: self._begin,
            RequestState.RUNNING: self._generate_turn,
            RequestState.TOOL_CALLING: self._call_tools,
            RequestState.INTERACTING: self._interact,
        }
        while True:
            step = await handlers[self.request.state]()
            if isinstance(step, StopReason):
                return step
            self.request.transition(step)

    # PENDING

    async def _begin(self) -> RequestState | StopReason:
        assert self._session is not None
        self._schemas = self._context.tools.schemas(self._spec.tool_names)
        if too_long := self._history.begin(self._schemas):
            return too_long
        for name in self._session.named:
            refuse_failed_create(await self._session.create(name), self._config.on_failure)
        return RequestState.RUNNING

    # RUNNING

    async def _generate_turn(self) -> RequestState | StopReason:
        if exhausted := self._history.exhausted():
            return exhausted
        turn = self.request.metrics.assistant_turns
        opened = self._opened()
        generation = await self._sample(turn, self._history.max_turn_tokens)
        if generation.finish_reason is FinishReason.ABORT:
            return StopReason.ABORTED
        said = self._context.template.decode(generation.token_ids)
        text = before_stop(said, self._spec.sampling.stop)
        parsed = self._context.parser.parse(text, self._schemas, prompt=opened)
        # A stop string that came with the last token allowed ended the turn, whichever reason the engine gives.
        if generation.finish_reason is FinishReason.LENGTH and text == said:
            return self._cut_turn(parsed, turn)
        self._note_turn(parsed, turn)
        return self._after_turn(bool(parsed.calls))

    def _opened(self) -> str | None:
        """What the template put right before the turn; None for its usual generation prompt.

        Not every template opens a turn after tools as it does after a user: DeepSeek's opens no thoughts there.
        """
        last = self.request.ledger.segments[-1]
        return self._context.template.decode(last.ids) if last.origin is Origin.BOUNDARY else None

    async def _sample(self, turn: int, max_new_tokens: int) -> Generation:
        params = dataclasses.replace(
            self._spec.sampling,
            max_new_tokens=max_new_tokens,
            stop_token_ids=tuple({*self._spec.sampling.stop_token_ids, *self._context.template.stop_token_ids}),
        )
        retries = self._config.engine_retries
        return await generate_turn(self._context.generator, self.request, params, turn=turn, retries=retries)

    def _cut_turn(self, parsed: ParsedTurn, turn: int) -> RequestState | StopReason:
        """A turn that ended by length: no call is made; the model is told when the budget lets it go on."""
        if exhausted := self._history.exhausted():
            self._note_turn(dataclasses.replace(parsed, calls=()), turn)
            return exhausted
        if not parsed.calls:
            self._note_turn(parsed, turn)
            return StopReason.MAX_RESPONSE_TOKENS if self._context.interaction is None else self._after_turn(False)
        reason = "The turn was cut at its length limit before the tool call could be made. Write less and call again."
        self._note_turn(
            dataclasses.replace(parsed, calls=(BrokenCall(reason=reason, kind=BrokenKind.TRUNCATED),)), turn
        )
        return self._after_turn(called=True)

    def _after_turn(self, called: bool) -> RequestState | StopReason:
        config, metrics = self._config, self.request.metrics
        if not called and self._context.interaction is None:
            return StopReason.ANSWERED
        if config.max_assistant_turns is not None and metrics.assistant_turns >= config.max_assistant_turns:
            return StopReason.MAX_ASSISTANT_TURNS
        if called:
            if config.max_tool_turns is not None and metrics.tool_turns >= config.max_tool_turns:
                return StopReason.MAX_TOOL_TURNS
            return RequestState.TOOL_CALLING
        if config.max_user_turns is not None and metrics.user_turns >= config.max_user_turns:
            return StopReason.MAX_USER_TURNS
        return RequestState.INTERACTING

    # TOOL_CALLING

    async def _call_tools(self) -> RequestState | StopReason:
        assert self._session is not None
        request = self.request
        turn = request.metrics.assistant_turns - 1
        calls = self._turn.calls
        answers = [self._noted(*one) for one in zip(await self._session.execute(calls, turn), calls, strict=True)]
        request.metrics.tool_turns += 1
        self._count(answers)
        messages = [
            Message(role="tool", content=a.record.answer, tool_call_id=a.record.call_id, name=a.record.name or None)
            for a in answers
        ]
        request.messages.extend(messages)
        request.errors_in_a_row = errors_in_a_row(request.errors_in_a_row, answers)
        if ends_conversation(answers, self._config.on_failure):
            return StopReason.TOO_MANY_ERRORS
        if any(answer.stop for answer in answers):
            return StopReason.TOOL_STOP
        if request.errors_in_a_row >= self._config.max_errors_in_a_row:
            return StopReason.TOO_MANY_ERRORS
        return self._observe(messages, turn, [answer.record.call_id for answer in answers])

    def _noted(self, answer: ToolAnswer, call: NumberedCall) -> ToolAnswer:
        tools, name = self._context.tools, answer.record.name
        return as_shown(
            answer,
            call,
            template=self._context.template,
            config=self._config,
            settings=tools.entry(name).settings if name in tools.names else None,
            metrics=self.request.metrics,
        )

    def _count(self, answers: Sequence[ToolAnswer]) -> None:
        records = [answer.record for answer in answers]
        self._records.extend(records)
        count(records, self.request.metrics)

    # INTERACTING

    async def _interact(self) -> RequestState | StopReason:
        assert self._context.interaction is not None
        said = await self._context.interaction.respond(self._spec.request_id, tuple(self.request.messages))
        if isinstance(said, Done):
            return said.reason
        message = Message(role="user", content=said.text)
        self.request.messages.append(message)
        self.request.metrics.user_turns += 1
        return self._observe([message], self.request.metrics.assistant_turns - 1, [None])

    # What the states share

    def _observe(
        self, messages: Sequence[Message], turn: int, call_ids: Sequence[str | None]
    ) -> RequestState | StopReason:
        return self._history.observe(messages, turn=turn, call_ids=call_ids) or RequestState.RUNNING

    def _note_turn(self, parsed: ParsedTurn, turn: int) -> None:
        """Keep the turn as a message, and number its calls."""
        self._turn = _Turn([NumberedCall(call_id=call_id(turn, i), call=call) for i, call in enumerate(parsed.calls)])
        if any(isinstance(call, BrokenCall) for call in parsed.calls):
            self._broken_turns.add(turn)
        made = [
            ToolCall(id=n.call_id, function=FunctionCall(name=n.call.name, arguments=n.call.arguments))
            for n in self._turn.calls
            if isinstance(n.call, ParsedCall)
        ]
        extra = {"reasoning_content": parsed.reasoning} if parsed.reasoning else {}
        message = Message.model_validate(
            {"role": "assistant", "content": parsed.content, **({"tool_calls": made} if made else {}), **extra}
        )
        self.request.messages.append(message)

    # The end

    async def _judge(self, stop_reason: StopReason) -> Rewards:
        """Ask every tool for its `calc_reward` and the reward function for its score."""
        assert self._session is not None
        metrics, scored = self.request.metrics, self._disposition(stop_reason) is not Disposition.DROP
        started = time.monotonic()
        try:
            said = await self._session.calc_rewards()
            calc_rewards, calc_errors = judgements(said, self._config.on_failure, metrics)
            score: float | None = None
            extra: dict[str, Any] = {}
            if self._context.reward_fn is not None and scored:
                tool_rewards = tuple(record.reward for record in self._records)
                score, extra = await call_reward_fn(
                    self._context.reward_fn,
                    data_source=self._spec.data_source,
                    solution_str=self._own_words(),
                    ground_truth=self._spec.ground_truth,
                    extra_info=self._scorer_info(stop_reason, tool_rewards, calc_rewards),
                    timeout_s=self._config.reward_timeout_s,
                )
            return combine(
                self._config,
                score=score,
                calls=self._records,
                calc_rewards=calc_rewards,
                calc_errors=calc_errors,
                extra=extra,
                scored=scored,
            )
        finally:
            metrics.reward_s += time.monotonic() - started

    def _own_words(self) -> str:
        """What the model sampled, turn by turn, and nothing anyone else said."""
        sampled = (s for row in self.request.rows for s in row.segments if s.origin is Origin.SAMPLED)
        return "\n".join(self._context.template.decode(segment.ids) for segment in sampled)

    def _scorer_info(
        self, stop_reason: StopReason, tool_rewards: tuple[float, ...], calc_rewards: dict[str, float]
    ) -> dict[str, Any]:
        return {
            **self._spec.extra_info,
            "request_id": self._spec.request_id,
            "stop_reason": stop_reason.value,
            "messages": [message.for_template() for message in self.request.messages],
            "full_text": "\n".join(self._context.template.decode(row.response_ids) for row in self.request.rows),
            "tool_rewards": list(tool_rewards),
            "calc_rewards": calc_rewards,
            "num_turns": self.request.metrics.assistant_turns,
        }

    def _disposition(self, stop_reason: StopReason) -> Disposition:
        return self._config.disposition(stop_reason)

    def _trajectory(self, stop_reason: StopReason, rewards: Rewards) -> Trajectory:
        request, spec = self.request, self._spec
        return Trajectory(
            request_id=spec.request_id,
            uid=spec.uid,
            sample_index=spec.sample_index,
            input_index=spec.input_index,
            state=request.state,
            stop_reason=stop_reason,
            disposition=self._disposition(stop_reason),
            segments=tuple(segment for row in request.rows for segment in row.segments),
            turns=tuple(record for row in request.rows for record in row.turns),
            messages=tuple(request.messages),
            rewards=rewards,
            tool_calls=tuple(self._records),
            release_errors=dict(self._session.release_errors) if self._session else {},
            error=request.error,
            metrics=request.metrics,
            drift=self._history.drift_examples,
            truncated_sampling=spec.sampling.truncates,
            data_source=spec.data_source,
            ground_truth=spec.ground_truth,
            validate=spec.validate,
            spec_digest=spec.digest,
        )
