"""One conversation's tools: instances are made once, used any number of times, judged once and released once.

Whatever a tool does becomes an answer with an outcome; what follows from it is the rollout's to decide (`on_failure`).
Each deadline has one owner, and for all calls of tools it is this module. The order of a call:

    refused? (malformed, unknown tool, wrong arguments, over max_calls)
    └─ attempt, up to 1 + retries times
       └─ a slot of the tool's limits
          └─ deadline ── faults ── create (the first time) ── execute
"""

from __future__ import annotations

import asyncio
import collections
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from sglang_multiturn.chat.parsing import BrokenCall, ParsedCall
from sglang_multiturn.config import RolloutConfig, closest
from sglang_multiturn.errors import ToolDiedError, ToolError
from sglang_multiturn.request import AsyncRolloutRequest, ErrorRecord
from sglang_multiturn.schemas import plain_text
from sglang_multiturn.tools.activity import Stage, ToolActivity
from sglang_multiturn.tools.agent_data import AgentData
from sglang_multiturn.tools.blocking import ToolOverdueError
from sglang_multiturn.tools.host import ToolReply
from sglang_multiturn.tools.instances import Instance, Instances, to_its_end
from sglang_multiturn.tools.runtime import RunningTool, ToolRuntime
from sglang_multiturn.tools.signatures import takes_agent_data
from sglang_multiturn.trajectory import CallOutcome, ToolCallRecord

logger = logging.getLogger(__name__)

Given = TypeVar("Given")
Made = TypeVar("Made")

_ERROR_CHARS = 4000
"""Of what a tool says went wrong; ordinary answers have `max_result_tokens`."""
_SLOT_GRACE_S = 10.0
"""A limit takes a slot back this long after its holder's deadline, should the holder have died."""
_RETRIED = frozenset({CallOutcome.TOOL_ERROR, CallOutcome.TIMEOUT, CallOutcome.DIED})


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedCall:
    """A call of one turn with the id its answer will carry."""

    call_id: str
    call: ParsedCall | BrokenCall


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """What the model is shown, the record of it, and whether the tool ended the conversation."""

    record: ToolCallRecord
    stop: bool = False
    error: Exception | None = None
    """What was raised, when the outcome is RAISED."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalcReward:
    """What one tool said of the conversation, or why it said nothing."""

    name: str
    outcome: CallOutcome
    value: float = 0.0
    error: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedCreate:
    """Why an instance that the row names could not be made at the start."""

    name: str
    outcome: CallOutcome
    text: str
    error: Exception | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """What came of one try of a call."""

    outcome: CallOutcome
    text: str
    reward: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    stop: bool = False
    error: Exception | None = None


class ToolSession:
    """`async with ToolSession(...) as session`: whatever happens inside, what was created is released."""

    def __init__(self, request: AsyncRolloutRequest, runtime: ToolRuntime, config: RolloutConfig) -> None:
        self._request = request
        self._spec = spec = request.spec
        self._runtime = runtime
        self._config = config
        self._metrics = request.metrics
        self._instances = Instances(spec, request.metrics, release_timeout_s=config.release_timeout_s)
        self._activity = ToolActivity(request)
        self._calls_made: collections.Counter[str] = collections.Counter()
        self.offered = tuple(schema.name for schema in runtime.registry.schemas(spec.tool_names))
        self.named = tuple(
            name
            for name in spec.tools_kwargs
            if name in self.offered and runtime.tool(name).settings.instance_scope == "conversation"
        )
        """Tools that the dataset row names: made at the start, as verl's PR #1037 did; others on their first call."""
        self._agent_data = self._new_agent_data()

    @property
    def release_errors(self) -> Mapping[str, ErrorRecord]:
        """By tool, the first `release` that went wrong; complete once the session was left."""
        return self._instances.release_errors

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        with self._activity.releasing_all():
            await self._instances.release_all()

    async def create(self, name: str) -> FailedCreate | None:
        """Make the instance of a tool in `named`. Raises nothing of the tool's; the first call of it tries again."""
        tool = self._runtime.tool(name)
        async with self._instances.in_use(tool):
            failed = await self._start(tool) or await self._in_time(tool, self._instance(tool), lambda _: None)
        if failed is None:
            return None
        logger.info("request %s: %s.create: %s", self._spec.request_id, name, failed.text)
        return FailedCreate(name=name, outcome=failed.outcome, text=failed.text, error=failed.error)

    def suspend(self) -> None:
        """Begin to take snapshots of what tools remember. What runs goes on; only a tool's next call waits for its own."""
        self._instances.suspend()

    def resume(self) -> None:
        """The conversation goes on."""
        self._instances.resume()

    async def execute(self, calls: Sequence[NumberedCall], turn: int) -> list[ToolAnswer]:
        """Answer every call of a turn, side by side; answers come in the order of the calls. Raises nothing of a tool's."""
        limit = self._config.max_parallel_calls
        skipped = f"Not executed: at most {limit} tool calls are made a turn. Call it again if you still need it."
        self._tell_agent_data(turn)
        answers: list[ToolAnswer | None] = [self._refusal(call, turn) for call in calls[:limit]]
        asked = {at: calls[at] for at, refused in enumerate(answers) if refused is None}
        made = {n.call_id: n.call.name for n in asked.values() if isinstance(n.call, ParsedCall)}
        with self._activity.calls(made, Stage.ANSWER, of=len(calls), then=""):
            async with asyncio.TaskGroup() as group:
                tasks = {at: group.create_task(self._answer(numbered, turn)) for at, numbered in asked.items()}
        given = [tasks[at].result() if answer is None else answer for at, answer in enumerate(answers)]
        if self._agent_data is not None:
            self._agent_data.tool_rewards += [answer.record.reward for answer in given]
        return given + [_refused(call, turn, CallOutcome.SKIPPED, skipped) for call in calls[limit:]]

    async def calc_rewards(self) -> list[CalcReward]:
        """`calc_reward` of every instance that was kept for the conversation, once, in the order of creation.

        Raises nothing of a tool's. An instance that was lost with its process is made anew from its last snapshot; without
        one it has nothing to say.
        """
        async with asyncio.TaskGroup() as group:
            for name in self._instances.restorable():
                group.create_task(self.create(name))
        kept = self._instances.kept()
        names = {instance.tool.name: instance.tool.name for instance in kept}
        with self._activity.calls(names, Stage.CALC_REWARD, of=len(kept), then=self._request.waiting_for):
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._calc_reward(instance)) for instance in kept]
        return [task.result() for task in tasks]

    def _new_agent_data(self) -> AgentData | None:
        """None where no tool of this conversation would look at it: keeping it costs a copy of every message."""
        entries = map(self._runtime.registry.entry, self.offered)
        if all(entry.tool is not None and not takes_agent_data(entry.tool.execute) for entry in entries):
            return None
        return AgentData(
            request_id=self._spec.request_id,
            tools_kwargs={name: row.as_verl() for name, row in self._spec.tools_kwargs.items()},
            interaction_kwargs=dict(self._spec.extra_info.get("interaction_kwargs") or {}),
        )

    def _tell_agent_data(self, turn: int) -> None:
        data, messages = self._agent_data, self._request.messages
        if data is None:
            return
        data.messages += [message.for_template() for message in messages[len(data.messages) :]]
        data.assistant_turns = turn + 1
        data.user_turns = self._metrics.tool_turns + self._metrics.user_turns

    # One call

    def _refusal(self, numbered: NumberedCall, turn: int) -> ToolAnswer | None:
        """The answer to a call that is not made; None for one that is, which then counts against `max_calls`."""
        call = numbered.call
        if isinstance(call, BrokenCall):
            return _refused(numbered, turn, CallOutcome.MALFORMED, f"Error: {call.reason}")
        if call.name not in self.offered:
            text = f"Error: there is no tool {call.name[:100]!r}{closest(call.name, self.offered)}"
            return _refused(numbered, turn, CallOutcome.UNKNOWN_TOOL, text)
        if wrong := self._runtime.registry.explain_arguments(call.name, call.arguments):
            return _refused(numbered, turn, CallOutcome.INVALID_ARGUMENTS, f"Error: invalid arguments: {wrong}")
        most = self._runtime.tool(call.name).settings.max_calls
        if most is not None and self._calls_made[call.name] >= most:
            self._metrics.refused_calls += 1
            times = "once" if most == 1 else f"{most} times"
            text = f"Not executed: {call.name} may be called {times} in a conversation. Go on without it."
            return _refused(numbered, turn, CallOutcome.SKIPPED, text)
        self._calls_made[call.name] += 1
        return None

    async def _answer(self, numbered: NumberedCall, turn: int) -> ToolAnswer:
        call = numbered.call
        assert isinstance(call, ParsedCall)  # broken ones were refused
        started = time.monotonic()
        tool = self._runtime.tool(call.name)
        if self._instances.gives_snapshot(tool):
            self._activity.reaches(Stage.SNAPSHOT, tool, numbered.call_id)
        async with self._instances.in_use(tool):
            attempt = await self._with_retries(tool, numbered.call_id, call)
        self._activity.answered(numbered.call_id)
        duration_s = time.monotonic() - started
        self._metrics.tool_s += duration_s
        record = ToolCallRecord(
            call_id=numbered.call_id,
            turn=turn,
            name=call.name,
            arguments=call.arguments,
            outcome=attempt.outcome,
            answer=attempt.text,
            reward=attempt.reward,
            metrics=attempt.metrics,
            duration_s=duration_s,
        )
        stop = attempt.outcome is CallOutcome.OK and (attempt.stop or tool.settings.stop_after_call)
        return ToolAnswer(record=record, stop=stop, error=attempt.error)

    async def _with_retries(self, tool: RunningTool, call_id: str, call: ParsedCall) -> _Attempt:
        attempt = await self._attempt(tool, call_id, call, 0)
        for number in range(1, tool.settings.retries + 1):
            if attempt.outcome not in _RETRIED:
                break
            self._metrics.tool_retries += 1
            self._activity.reaches(Stage.RETRY, tool, call_id, number)
            await asyncio.sleep(random.uniform(0, tool.settings.retry_backoff_s * 2 ** (number - 1)))
            attempt = await self._attempt(tool, call_id, call, number)
        return attempt

    async def _attempt(self, tool: RunningTool, call_id: str, call: ParsedCall, number: int) -> _Attempt:
        """One try of a call, when the tool's limits let it begin; `number` is 0 for the first."""
        per_call = f"{call_id}-{number}" if tool.settings.instance_scope == "call" else None
        self._activity.reaches(Stage.LOAD, tool, call_id, number)
        if failed := await self._start(tool):
            return failed
        asked = time.monotonic()
        self._activity.reaches(Stage.PLACE, tool, call_id, number)
        try:
            async with tool.limiter.slot(None if tool.timeout_s is None else tool.timeout_s + _SLOT_GRACE_S):
                self._metrics.tool_queue_s += time.monotonic() - asked
                try:
                    return await self._in_time(tool, self._run(tool, call_id, per_call, call, number), _answered)
                finally:
                    if per_call is not None:
                        self._activity.reaches(Stage.RELEASE, tool, call_id, number)
                        await to_its_end(self._instances.release(tool, per_call))
                        self._activity.gone(tool, per_call)
        except ToolDiedError as error:  # whoever keeps the limits of the run
            return _failed(CallOutcome.DIED, error, str(error))

    async def _start(self, tool: RunningTool) -> _Attempt | None:
        """Load the tool where it runs, which is no part of a call's deadline; what went wrong, if anything did."""
        try:
            await tool.host.start()
        except ToolDiedError as error:
            return _failed(CallOutcome.DIED, error, str(error))
        except Exception as error:  # noqa: BLE001 - a class that cannot be made, a system out of processes
            return _failed(CallOutcome.RAISED, error, "the tool cannot be made")
        return None

    async def _run(
        self, tool: RunningTool, call_id: str, per_call: str | None, call: ParsedCall, number: int
    ) -> ToolReply:
        is_made = self._activity.holds(tool, per_call)
        self._activity.reaches(Stage.ANSWER if is_made else Stage.CREATE, tool, call_id, number)
        if tool.faults is not None and not self._spec.validate:
            fault = tool.faults.draw(self._spec.request_id, call_id, number)
            self._metrics.injected_faults += fault.error or fault.hang
            await fault.happen()
        instance = await self._instance(tool, per_call)
        if not is_made:
            self._activity.reaches(Stage.ANSWER, tool, call_id, number)
        arguments = self._runtime.registry.with_defaults(tool.name, call.arguments)
        return await tool.host.execute(instance.instance_id, arguments, instance.row.execute_kwargs, self._agent_data)

    async def _instance(self, tool: RunningTool, per_call: str | None = None) -> Instance:
        instance = await self._instances.get(tool, per_call)
        self._activity.made(tool, per_call)
        return instance

    async def _calc_reward(self, instance: Instance) -> CalcReward:
        tool, name = instance.tool, instance.tool.name
        async with self._instances.in_use(tool):
            asked = tool.host.calc_reward(instance.instance_id, instance.row.calc_reward_kwargs)
            said = await self._in_time(tool, asked, lambda value: value)
        self._activity.answered(name)
        if isinstance(said, _Attempt):
            return CalcReward(name=name, outcome=said.outcome, error=said.error)
        return CalcReward(name=name, outcome=CallOutcome.OK, value=said)

    async def _in_time(
        self, tool: RunningTool, work: Awaitable[Given], then: Callable[[Given], Made]
    ) -> Made | _Attempt:
        """Await a tool under its deadline. Whatever it raises is an outcome; only a cancellation from outside leaves."""
        lost = self._metrics.lost_instances
        try:
            async with asyncio.timeout(tool.timeout_s) as clock:
                return then(await work)
        except ToolError as error:
            return _failed(CallOutcome.TOOL_ERROR, error, str(error))
        except ToolDiedError as error:
            self._forget_lost(tool)
            return _failed(CallOutcome.DIED, error, f"{error}; {self._what_is_left(tool)}")
        except Exception as error:  # noqa: BLE001 - other people's code raises anything
            timed_out = isinstance(error, ToolOverdueError) or (isinstance(error, TimeoutError) and clock.expired())
            if not timed_out:
                return _failed(CallOutcome.RAISED, error, "the tool failed")
            self._forget_lost(tool)
            gone = f" and was stopped; {self._what_is_left(tool)}"
            text = f"the tool did not answer within {tool.timeout_s:g} seconds"
            return _failed(CallOutcome.TIMEOUT, TimeoutError(text), text + gone * (self._metrics.lost_instances > lost))

    def _what_is_left(self, tool: RunningTool) -> str:
        if self._instances.can_restore(tool):
            return "it goes on from an earlier state of this conversation, in which this call was not made"
        return "what it remembered of this conversation is gone"

    def _forget_lost(self, tool: RunningTool) -> None:
        lost = self._metrics.lost_instances
        self._instances.forget_lost(tool)
        if self._metrics.lost_instances > lost:
            self._activity.gone(tool, None)


def _answered(reply: ToolReply) -> _Attempt:
    return _Attempt(
        outcome=CallOutcome.OK, text=reply.text, reward=reply.reward, metrics=reply.metrics, stop=reply.stop
    )


def _failed(outcome: CallOutcome, error: Exception, text: str) -> _Attempt:
    return _Attempt(outcome=outcome, text=f"Error: {plain_text(text)[:_ERROR_CHARS]}", error=error)


def _refused(numbered: NumberedCall, turn: int, outcome: CallOutcome, text: str) -> ToolAnswer:
    call = numbered.call
    arguments = call.arguments if isinstance(call, ParsedCall) else None
    record = ToolCallRecord(
        call_id=numbered.call_id, turn=turn, name=call.name, arguments=arguments, outcome=outcome, answer=text
    )
    return ToolAnswer(record=record)
