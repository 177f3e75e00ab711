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

from sglang_multiturn.chat.calls import BrokenCall, BrokenKind, ParsedCall, ParsedTurn
from sglang_multiturn.conversation.answers import (
    as_shown,
    count,
    ends_conversation,
    errors_in_a_row,
    refuse_failed_create,
)
from sglang_multiturn.conversation.context import RolloutContext
from sglang_multiturn.conversation.generation import ABORT_GRACE_S, SampledTurn, TurnSampler
from sglang_multiturn.conversation.history import History
from sglang_multiturn.conversation.judging import judge
from sglang_multiturn.conversation.staleness import disposition, stale_before
from sglang_multiturn.conversation.suspension import Clock, Gate
from sglang_multiturn.conversation.turns import before_stop, call_id, waiting_words
from sglang_multiturn.engine.base import FinishReason
from sglang_multiturn.errors import EngineError
from sglang_multiturn.interactions.base import Done
from sglang_multiturn.request import (
    AsyncRolloutRequest,
    Disposition,
    RequestSpec,
    RequestState,
    StopReason,
    begun_anew,
)
from sglang_multiturn.schemas import FunctionCall, Message, ToolCall, ToolSchema
from sglang_multiturn.tokens import Origin
from sglang_multiturn.tools.session import NumberedCall, ToolAnswer, ToolSession
from sglang_multiturn.trajectory import Rewards, ToolCallRecord, Trajectory

logger = logging.getLogger(__name__)


async def run_one(spec: RequestSpec, context: RolloutContext) -> Trajectory:
    """Roll out one request. Raises nothing but CancelledError: a bad rollout is data."""
    return await Rollout(spec, context).run()


class _BeginAnewError(Exception):
    """What has been sampled is too old to go on with."""


class Rollout:
    """One conversation. `run` once; `abort`, `suspend` and `resume` at any time from the same event loop."""

    def __init__(self, spec: RequestSpec, context: RolloutContext) -> None:
        self._spec = spec
        self._context = context
        self._config = context.config
        self._clock = Clock(self._config.rollout_timeout_s)
        self._gate = Gate()
        self._abort_requested = False
        self._over = False
        """Whether it is being scored, or ended altogether: nothing of it reaches the engine any more."""
        self._begin_with(AsyncRolloutRequest(spec))

    def _begin_with(self, request: AsyncRolloutRequest) -> None:
        context = self._context
        self.request = request
        self._schemas: list[ToolSchema] = []
        self._history = History(request, context.template, self._config, context.max_model_len)
        self._sampler = TurnSampler(
            context.generator, request, self._passed, self._gate, self._clock, self._config.engine_retries
        )
        self._calls: list[NumberedCall] = []
        """Of the assistant turn that tools are about to answer."""
        self._broken_turns: set[int] = set()
        self._records: list[ToolCallRecord] = []
        self._session: ToolSession | None = None
        if self._gate.is_closed:
            request.suspend()

    def abort(self) -> None:
        """End this conversation as `aborted`; its generation is aborted and acknowledged first.

        One that has ended already and is being scored keeps its own stop_reason.
        """
        self._abort_requested = True
        self._clock.expire()

    async def suspend(self) -> None:
        """Set this conversation aside; when this returns, nothing of it is in the engine. `resume` lets it go on.

        A generation ends with what it has sampled, which is kept; a tool call goes on, and its answer waits. Tools that
        give snapshots are asked for them; nobody waits for that here. The time of `rollout_timeout_s` stands still, a
        tool's own does not. One that is over and being scored is left alone.

        Raises:
            EngineError: the engine did not acknowledge the generation's end.
        """
        if not self._over and not self._gate.is_closed:
            self._gate.close()
            self._clock.stop()
            self.request.suspend()
            self.request.metrics.suspensions += 1
            if self._session is not None:
                self._session.suspend()
        try:
            async with asyncio.timeout(ABORT_GRACE_S):
                await self._context.generator.abort(self.request.request_id)
                await self._gate.idle()
        except TimeoutError as error:
            raise EngineError(
                f"request {self.request.request_id}: its generation did not end within {ABORT_GRACE_S:g} s of its suspension"
            ) from error

    def resume(self) -> None:
        """Let a suspended conversation go on where it was."""
        if not self._gate.is_closed:
            return
        if self.request.state is RequestState.SUSPENDED:
            self.request.resume()
            self._clock.go_on()
        if self._session is not None:
            self._session.resume()
        self._gate.open()

    async def run(self) -> Trajectory:
        """The whole conversation."""
        started = time.monotonic()
        while True:
            try:
                stop_reason, error, rewards = await self._run_once()
                break
            except _BeginAnewError:
                self._begin_with(begun_anew(self.request))
        self.request.finish(stop_reason, error)
        self.request.metrics.total_s = time.monotonic() - started
        return self._trajectory(stop_reason, rewards)

    async def _run_once(self) -> tuple[StopReason, BaseException | None, Rewards]:
        try:
            runtime = self._context.tool_runtime
            assert runtime is not None  # the context made one
            self._session = ToolSession(self.request, runtime, self._config)
            rewards = Rewards()
            async with self._session:
                stop_reason = await self._converse_in_time()
                self._over = True
                if stop_reason is not StopReason.ABORTED:
                    self._history.check_drift(self._context.drift_log, self._broken_turns)
                    rewards = await self._judge(stop_reason)
            return stop_reason, None, rewards
        except _BeginAnewError:
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as caught:  # the one boundary: a bad rollout is data
            task = asyncio.current_task()
            if isinstance(caught, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise
            self._over = True
            logger.warning("request %s failed: %r", self._spec.request_id, caught)
            return StopReason.ERROR, caught, Rewards()

    async def _converse_in_time(self) -> StopReason:
        if self._abort_requested:
            return StopReason.ABORTED
        try:
            async with self._clock.running():
                return await self._converse()
        except TimeoutError:
            if self._abort_requested:
                return StopReason.ABORTED
            if self._clock.has_expired:
                return StopReason.TIMEOUT
            raise

    async def _passed(self) -> None:
        """Wait while this conversation is suspended. Raises _BeginAnewError: what it has is too old to go on with."""
        if not self._gate.is_closed:
            return
        await self._gate.passed()
        if self._config.stale == "restart" and self._stale_before() is not None:
            raise _BeginAnewError

    async def _converse(self) -> StopReason:
        handlers: Mapping[RequestState, Callable[[], Awaitable[RequestState | StopReason]]] = {
            RequestState.PENDING: self._begin,
            RequestState.RUNNING: self._generate_turn,
            RequestState.TOOL_CALLING: self._call_tools,
            RequestState.INTERACTING: self._interact,
        }
        while True:
            await self._passed()
            step = await handlers[self.request.state]()
            await self._passed()
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
            self.request.wait_for(f"tool {name} to be created")
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

    async def _sample(self, turn: int, max_new_tokens: int) -> SampledTurn:
        params = dataclasses.replace(
            self._spec.sampling,
            max_new_tokens=max_new_tokens,
            stop_token_ids=tuple({*self._spec.sampling.stop_token_ids, *self._context.template.stop_token_ids}),
        )
        self.request.wait_for("the engine")
        return await self._sampler.sample(params, turn=turn)

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
        calls = self._calls
        request.wait_for(waiting_words(calls))
        answers = [self._shown(*one) for one in zip(await self._session.execute(calls, turn), calls, strict=True)]
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
        call_ids = [answer.record.call_id for answer in answers]
        return self._history.observe(messages, turn=turn, call_ids=call_ids) or RequestState.RUNNING

    def _shown(self, answer: ToolAnswer, call: NumberedCall) -> ToolAnswer:
        template, tools = self._context.template, self._context.tools
        return as_shown(answer, call, template=template, config=self._config, tools=tools, metrics=self.request.metrics)

    def _count(self, answers: Sequence[ToolAnswer]) -> None:
        records = [answer.record for answer in answers]
        self._records.extend(records)
        count(records, self.request.metrics)

    # INTERACTING

    async def _interact(self) -> RequestState | StopReason:
        assert self._context.interaction is not None
        self.request.wait_for("the user")
        said = await self._context.interaction.respond(self._spec.request_id, tuple(self.request.messages))
        if isinstance(said, Done):
            return said.reason
        message = Message(role="user", content=said.text)
        self.request.messages.append(message)
        self.request.metrics.user_turns += 1
        turn = self.request.metrics.assistant_turns - 1
        return self._history.observe([message], turn=turn, call_ids=[None]) or RequestState.RUNNING

    # What the states share

    def _note_turn(self, parsed: ParsedTurn, turn: int) -> None:
        """Keep the turn as a message, and number its calls."""
        self._calls = [NumberedCall(call_id=call_id(turn, i), call=call) for i, call in enumerate(parsed.calls)]
        if any(isinstance(call, BrokenCall) for call in parsed.calls):
            self._broken_turns.add(turn)
        made = [
            ToolCall(id=n.call_id, function=FunctionCall(name=n.call.name, arguments=n.call.arguments))
            for n in self._calls
            if isinstance(n.call, ParsedCall)
        ]
        extra = {"reasoning_content": parsed.reasoning} if parsed.reasoning else {}
        message = Message.model_validate(
            {"role": "assistant", "content": parsed.content, **({"tool_calls": made} if made else {}), **extra}
        )
        self.request.messages.append(message)

    # The end

    async def _judge(self, stop_reason: StopReason) -> Rewards:
        assert self._session is not None
        return await judge(
            self.request,
            self._session,
            self._records,
            template=self._context.template,
            config=self._config,
            reward_fn=self._context.reward_fn,
            stop_reason=stop_reason,
            scored=disposition(self._config, stop_reason, self._stale_before()) is not Disposition.DROP,
        )

    def _stale_before(self) -> int | None:
        return stale_before(self.request, self._config, self._context.weight_version())

    def _trajectory(self, stop_reason: StopReason, rewards: Rewards) -> Trajectory:
        request, spec, stale = self.request, self._spec, self._stale_before()
        return Trajectory(
            request_id=spec.request_id,
            uid=spec.uid,
            sample_index=spec.sample_index,
            input_index=spec.input_index,
            state=request.state,
            stop_reason=stop_reason,
            disposition=disposition(self._config, stop_reason, stale),
            stale_before=stale if self._config.stale == "mask" else None,
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
            step=spec.step,
            restarts=request.restarts,
            spec_digest=spec.digest,
        )
