"""Many requests at once: a limit on how many, one trajectory for each, and an end when nothing works any more.

async with RolloutEngine(engine, template=..., tools=...) as rollouts:
    async for trajectory in rollouts.run(requests):   # as they finish; `run_all` returns input order
        ...
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Self

from sglang_multiturn.chat.parsers import make_parser
from sglang_multiturn.chat.parsing import ToolCallParser
from sglang_multiturn.chat.template import ChatTemplate
from sglang_multiturn.config import RolloutConfig
from sglang_multiturn.conversation.context import RolloutContext
from sglang_multiturn.conversation.history import check_template
from sglang_multiturn.engine.admission import admitted
from sglang_multiturn.engine.base import Engine, Generator
from sglang_multiturn.errors import BatchFailedError, EngineDiedError
from sglang_multiturn.interactions.base import Interaction
from sglang_multiturn.journal import JournalWriter
from sglang_multiturn.request import AsyncRolloutRequest, RequestSpec, RequestState
from sglang_multiturn.rewards import RewardFn, check_weights
from sglang_multiturn.rollout import Rollout
from sglang_multiturn.tools.host import HostLeaks
from sglang_multiturn.tools.registry import ToolRegistry
from sglang_multiturn.tools.runtime import ToolRuntime
from sglang_multiturn.trajectory import Trajectory

MIN_FINISHED_TO_JUDGE = 16
"""A batch is not given up before this many of its conversations have ended."""


class RolloutEngine:
    """Rolls out requests on an engine it starts and closes."""

    def __init__(
        self,
        engine: Engine,
        *,
        template: ChatTemplate,
        tools: ToolRegistry | None = None,
        config: RolloutConfig | None = None,
        parser: ToolCallParser | None = None,
        reward_fn: RewardFn | None = None,
        interaction: Interaction | None = None,
        journal: JournalWriter | None = None,
    ) -> None:
        """Roll out on `engine`. `journal`: what every trajectory is written to before anyone is told; its owner closes it.
        A conversation that ends with the engine is not: it can be asked again.

        Raises TemplateError: the template could never show what tools or users will say; ConfigError: a wrong weight."""
        self.engine = engine
        self.template = template
        self.tools = tools or ToolRegistry()
        self.config = config or RolloutConfig()
        check_template(template, self.tools, interaction)
        check_weights(self.config, self.tools.names)
        self._parser = parser or make_parser(self.config.tool_parser, template)
        self._reward_fn = reward_fn
        self._interaction = interaction
        self._runtime = ToolRuntime(self.tools, self.config, marks=journal.marks if journal else None)
        self._journal = journal
        self._generator: Generator = engine
        self._own_context: RolloutContext | None = None
        self._rollouts: dict[str, Rollout] = {}
        self._all_suspended = False
        self._suspended: set[str] = set()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.engine)
        self._generator = admitted(self.engine, self.config.max_tokens_in_flight or self.engine.info.kv_capacity_tokens)
        await self._stack.enter_async_context(self._runtime)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    async def run(self, specs: Iterable[RequestSpec]) -> AsyncIterator[Trajectory]:
        """Trajectories as they finish, one for each request; `input_index` tells which.

        Requests are taken from `specs` only as there is room for them, so it may be endless.

        Raises:
            BatchFailedError: more than `max_failed_fraction` of what has ended FAILED. What had finished was yielded.
            EngineDiedError: the engine went away; requests that were in flight have no trajectory and can be asked again.
        """
        results: asyncio.Queue[Trajectory | None] = asyncio.Queue(maxsize=self.config.max_concurrent)
        context = self._context()
        # A task and not a TaskGroup: the consumer may leave between two yields, in whatever task it likes.
        pump = asyncio.create_task(self._pump(iter(specs), results, context), name="rollouts")
        verdict = Verdict(self.config.max_failed_fraction)
        try:
            while (trajectory := await results.get()) is not None:
                verdict.refuse_dead_engine(trajectory)
                yield trajectory
                verdict.add(trajectory)
            await pump
            self._runtime.report_leaks()
        finally:
            pump.cancel()
            await asyncio.wait([pump])

    async def run_all(self, specs: Iterable[RequestSpec]) -> list[Trajectory]:
        """All trajectories, in the order of the requests. Raises BatchFailedError."""
        numbered = list(specs)
        order = {spec.request_id: index for index, spec in enumerate(numbered)}
        finished = [trajectory async for trajectory in self.run(numbered)]
        return sorted(finished, key=lambda trajectory: order[trajectory.request_id])

    async def run_one(self, spec: RequestSpec) -> Trajectory:
        """One request, beside whatever else runs: for who decides alone what runs when. It is journaled like all others."""
        if self._own_context is None:
            self._own_context = self._context()
        return await self._roll_out(spec, self._own_context)

    def held_by_tools(self) -> HostLeaks:
        """What tools hold at this moment; nothing is right when no conversation runs."""
        return HostLeaks.total(self._runtime.leaks().values())

    def abort(self, request_id: str) -> bool:
        """End one running conversation as `aborted`; False when it is not running."""
        rollout = self._rollouts.get(request_id)
        if rollout is not None:
            rollout.abort()
        return rollout is not None

    def abort_all(self) -> None:
        """End every running conversation as `aborted`; each still gives its trajectory."""
        for rollout in self._rollouts.values():
            rollout.abort()

    def in_flight(self) -> tuple[AsyncRolloutRequest, ...]:
        """The requests that run at this moment, suspended ones too; to be read, not changed."""
        return tuple(rollout.request for rollout in list(self._rollouts.values()))

    async def suspend(self, request_ids: Iterable[str] | None = None) -> None:
        """Set conversations aside at whatever point they are, and return when nothing of them is in the engine.

        What was sampled is kept with its log-probabilities and weight version. Tool calls go on, and their answers wait.

        Args:
            request_ids: which; None is all, and those that would begin meanwhile wait as well. An id that does not run
                yet begins suspended.

        Raises:
            EngineError: the engine did not end a generation, or is gone.
        """
        if request_ids is None:
            self._all_suspended = True
            chosen = list(self._rollouts.values())
        else:
            named = set(request_ids)
            self._suspended |= named
            chosen = [rollout for name, rollout in self._rollouts.items() if name in named]
        try:
            async with asyncio.TaskGroup() as group:
                for rollout in chosen:
                    group.create_task(rollout.suspend())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    def resume(self, request_ids: Iterable[str] | None = None) -> None:
        """Let suspended conversations go on where they were; None is all of them."""
        if request_ids is None:
            self._all_suspended = False
            self._suspended.clear()
        else:
            self._suspended -= set(request_ids)
        self._resume_others()

    @asynccontextmanager
    async def suspended(self, request_ids: Iterable[str] | None = None) -> AsyncIterator[None]:
        """`suspend` and, whatever happens in the body, `resume`: the place to update weights in.

        What was suspended before stays so.
        """
        named = None if request_ids is None else set(request_ids) - self._suspended
        all_before = self._all_suspended
        try:
            await self.suspend(named)
            yield
        finally:
            self._all_suspended = all_before
            self._suspended -= named or set()
            self._resume_others()

    def _is_suspended(self, request_id: str) -> bool:
        return self._all_suspended or request_id in self._suspended

    def _resume_others(self) -> None:
        for name, rollout in self._rollouts.items():
            if not self._is_suspended(name):
                rollout.resume()

    async def _pump(
        self, specs: Iterator[RequestSpec], results: asyncio.Queue[Trajectory | None], context: RolloutContext
    ) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.config.max_concurrent):
                    if (spec := next(specs, None)) is None:
                        break
                    group.create_task(self._lane(spec, specs, results, context))
        except ExceptionGroup as errors:
            await results.put(None)  # the consumer still waits: let it come and see
            raise errors.exceptions[0] from errors
        await results.put(None)

    async def _lane(
        self,
        spec: RequestSpec | None,
        specs: Iterator[RequestSpec],
        results: asyncio.Queue[Trajectory | None],
        context: RolloutContext,
    ) -> None:
        """One after the other, until there are no more."""
        while spec is not None:
            await results.put(await self._roll_out(spec, context))
            spec = next(specs, None)

    async def _roll_out(self, spec: RequestSpec, context: RolloutContext) -> Trajectory:
        if self._journal is not None:
            self._journal.begin(spec.request_id)
        rollout = self._rollouts[spec.request_id] = Rollout(spec, context)
        try:
            if self._is_suspended(spec.request_id):
                await rollout.suspend()
            trajectory = await rollout.run()
        finally:
            del self._rollouts[spec.request_id]
            self._suspended.discard(spec.request_id)
        if self._journal is not None and not _died_with_engine(trajectory):
            self._journal.write(trajectory)
        return trajectory

    def _context(self) -> RolloutContext:
        return RolloutContext(
            generator=self._generator,
            template=self.template,
            tools=self.tools,
            parser=self._parser,
            config=self.config,
            max_model_len=self.engine.info.max_model_len,
            reward_fn=self._reward_fn,
            interaction=self._interaction,
            weight_version=lambda: self.engine.weight_version,
            tool_runtime=self._runtime,
        )


def _died_with_engine(trajectory: Trajectory) -> bool:
    """Whether its engine went away under it: it can be asked again, so it has not ended."""
    return trajectory.error is not None and trajectory.error.type == EngineDiedError.__name__


class Verdict:
    """Gives a batch up when most of it failed, and says why."""

    def __init__(self, max_failed_fraction: float) -> None:
        """Judge nothing yet."""
        self._limit = max_failed_fraction
        self._finished = 0
        self._causes: dict[str, list[Trajectory]] = collections.defaultdict(list)

    def refuse_dead_engine(self, trajectory: Trajectory) -> None:
        """Raises EngineDiedError: the engine went away under this one."""
        if _died_with_engine(trajectory):
            assert trajectory.error is not None
            raise EngineDiedError(f"after {self._finished} finished rollouts: {trajectory.error.message}")

    def add(self, trajectory: Trajectory) -> None:
        """Count one more. Raises BatchFailedError: too many of those so far FAILED."""
        self._finished += 1
        if trajectory.state is RequestState.FAILED:
            self._causes[trajectory.error.type if trajectory.error else "unknown"].append(trajectory)
        failed = sum(map(len, self._causes.values()))
        if self._finished >= MIN_FINISHED_TO_JUDGE and failed > self._limit * self._finished:
            raise BatchFailedError(self._explain(failed))

    def _explain(self, failed: int) -> str:
        lines = [f"{failed} of the first {self._finished} rollouts failed; stopping. The most frequent causes:"]
        for cause, examples in sorted(self._causes.items(), key=lambda item: -len(item[1]))[:3]:
            example = examples[0]
            message = example.error.message if example.error else ""
            lines.append(f"  {len(examples)}x {cause}, for example {example.request_id}: {message[:300]}")
        return "\n".join(lines)
