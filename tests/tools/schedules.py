"""Random lives of a conversation with its tools, and what must hold in each of them.

A schedule says what every method of every tool does, when somebody aborts or cancels, and how the tools are set up. One
seed gives one schedule.
"""

from __future__ import annotations

import asyncio
import collections
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tools.scheduled_tool import Behaviour, Event

from sglang_multiturn import (
    Message,
    RequestSpec,
    RolloutConfig,
    RolloutContext,
    ScriptedEngine,
    ScriptedTurn,
    ToolRegistry,
    Trajectory,
)
from sglang_multiturn.chat.parsing import HermesParser
from sglang_multiturn.config import FailurePolicy, FaultConfig, ToolSettings
from sglang_multiturn.request import RequestState, StopReason, ToolKwargs
from sglang_multiturn.rollout import Rollout
from sglang_multiturn.tools.runtime import ToolRuntime
from sglang_multiturn.trajectory import CallOutcome

from support import TEMPLATE, call

TOOLS = ("alpha", "beta")
Interference = Literal["none", "abort", "cancel", "cancel_twice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One conversation's life."""

    seed: int
    turns: tuple[tuple[tuple[str, Behaviour], ...], ...]
    """For each assistant turn, the tools it calls and what `execute` does then."""
    others: dict[str, dict[str, Behaviour]]
    """By tool: what create, calc_reward and release do."""
    named: tuple[str, ...]
    """Tools the row names, which are made before the first turn."""
    interference: Interference
    at_s: float
    """When somebody interferes."""


def draw(seed: int, behaviours: Sequence[Behaviour], longest_s: float) -> Schedule:
    """The schedule of a seed. Half of all methods behave well, so that conversations get somewhere."""
    rng = random.Random(seed)

    def behave() -> Behaviour:
        return Behaviour.WELL if rng.random() < 0.5 else rng.choice(behaviours)

    turns = tuple(
        tuple((rng.choice(TOOLS), behave()) for _ in range(rng.choice((1, 1, 2, 3)))) for _ in range(rng.randint(0, 4))
    )
    return Schedule(
        seed=seed,
        turns=turns,
        others={name: {verb: behave() for verb in ("create", "calc_reward", "release")} for name in TOOLS},
        named=tuple(name for name in TOOLS if rng.random() < 0.3),
        interference=rng.choice(("none", "none", "none", "abort", "cancel", "cancel_twice")),
        at_s=rng.uniform(0, longest_s),
    )


def draw_settings(seed: int, **always: object) -> ToolSettings:
    """How the tools of a world are set up."""
    rng = random.Random(seed)
    return ToolSettings.model_validate(
        {
            "instance_scope": rng.choice(("conversation", "conversation", "call")),
            "timeout_s": 1.0,
            "retries": rng.choice((0, 0, 1, 2)),
            "retry_backoff_s": 0.1,
            "max_concurrent": rng.choice((None, 1, 3)),
            "max_per_s": rng.choice((None, None, 50.0)),
            "max_calls": rng.choice((None, None, 2)),
            "stop_after_call": rng.random() < 0.1,
            "faults": rng.choice((None, None, FaultConfig(latency_s=0.05, error_rate=0.2, hang_rate=0.1, seed=seed))),
            **always,
        }
    )


def draw_config(seed: int, **always: object) -> RolloutConfig:
    """How the conversations of a world are run."""
    rng = random.Random(seed)
    policy = FailurePolicy.model_validate(
        {name: rng.choice(("tell", "tell", "end", "fail")) for name in FailurePolicy.model_fields}
    )
    given = {
        "on_failure": policy,
        "release_timeout_s": 1.0,
        "rollout_timeout_s": rng.choice((2.0, 60.0, 60.0)),
        "max_errors_in_a_row": rng.choice((1, 5)),
        "calc_rewards": rng.choice(("off", "sum")),
    }
    return RolloutConfig.model_validate({**given, **always})


class World:
    """Several schedules side by side on one engine and one set of tools, as in a run."""

    def __init__(self, schedules: Sequence[Schedule], registry: ToolRegistry, config: RolloutConfig) -> None:
        self.schedules = schedules
        self.finished: dict[int, Trajectory | None] = {}
        """By seed; None where the conversation was cancelled from outside, which must leave as CancelledError."""
        self._engine = ScriptedEngine.playing(TEMPLATE, {_name(one): _script(one) for one in schedules})
        self.runtime = ToolRuntime(registry, config)
        self._context = RolloutContext(
            generator=self._engine,
            template=TEMPLATE,
            tools=registry,
            parser=HermesParser(),
            config=config,
            max_model_len=self._engine.info.max_model_len,
            tool_runtime=self.runtime,
        )

    @property
    def seen(self) -> set[str]:
        """Outcomes of calls and ends of conversations that came up."""
        ended = self.finished.values()
        outcomes = {record.outcome.value for one in ended if one for record in one.tool_calls}
        return outcomes | {one.stop_reason.value if one else "cancelled" for one in ended}

    async def play(self) -> None:
        """Play all schedules to their ends."""
        async with self._engine, self.runtime, asyncio.TaskGroup() as group:
            for schedule in self.schedules:
                group.create_task(self._play(schedule))

    async def _play(self, schedule: Schedule) -> None:
        rollout = Rollout(_spec(schedule), self._context)
        task = asyncio.create_task(rollout.run())  # of its own: what is cancelled is this conversation alone
        await asyncio.wait({task}, timeout=None if schedule.interference == "none" else schedule.at_s)
        if schedule.interference == "abort":
            rollout.abort()
        elif schedule.interference != "none":
            task.cancel()
            if schedule.interference == "cancel_twice":
                await asyncio.sleep(0.01)
                task.cancel()
        await asyncio.wait({task})
        self.finished[schedule.seed] = None if task.cancelled() else task.result()


def _name(schedule: Schedule) -> str:
    return f"r{schedule.seed}"


def _script(schedule: Schedule) -> list[ScriptedTurn | str]:
    said = ["".join(call(name, behave=behave.value) for name, behave in turn) for turn in schedule.turns]
    return [*said, "done"]


def _spec(schedule: Schedule) -> RequestSpec:
    kwargs = {
        name: ToolKwargs(
            create_kwargs={"behave": verbs["create"].value},
            calc_reward_kwargs={"behave": verbs["calc_reward"].value},
            release_kwargs={"behave": verbs["release"].value},
        )
        for name, verbs in schedule.others.items()
    }
    named = {name: kwargs[name] for name in schedule.named}
    return RequestSpec(
        request_id=_name(schedule),
        uid=_name(schedule),
        messages=(Message(role="user", content="hi"),),
        tools_kwargs=named,
    )


# What must hold


def check_world(world: World, events: Sequence[Event], *, may_be_lost: bool = False) -> None:
    """Raises AssertionError that names the seed. Instances may be lost where each has a process that may be killed."""
    by_instance: dict[str, list[Event]] = collections.defaultdict(list)
    for event in events:
        by_instance[event.instance_id].append(event)
    by_request: dict[str, dict[str, list[Event]]] = collections.defaultdict(dict)
    for instance_id, lived in by_instance.items():
        by_request[instance_id.partition("#")[0].partition("-")[0]][instance_id] = lived
    for schedule in world.schedules:
        try:
            lives = by_request[_name(schedule)]
            for lived in lives.values():
                check_life(lived, may_be_lost=may_be_lost)
            check_trajectory(world.finished[schedule.seed], schedule)
        except AssertionError as error:
            raise AssertionError(f"schedule {schedule.seed}: {error}; it was {schedule}; saw {lives}") from error


def check_life(events: Sequence[Event], *, may_be_lost: bool) -> None:
    """create once, then executes, then at most one calc_reward, then one release if it was created (and not lost)."""
    begun = [event.verb for event in events if not event.ended]
    created = any(event.verb == "create" and event.ended for event in events)
    assert begun.count("create") == 1, "create is called once"
    assert begun[0] == "create", "nothing comes before create"
    assert begun.count("calc_reward") <= 1, "calc_reward is called at most once"
    released = begun.count("release")
    assert released == int(created) or (may_be_lost and not released), "release is called exactly once if created"
    if "release" in begun:
        assert begun[-1] == "release", "nothing begins after release"
    if "calc_reward" in begun:
        assert "execute" not in begun[begun.index("calc_reward") :], "nothing is executed after calc_reward"


def check_trajectory(trajectory: Trajectory | None, schedule: Schedule) -> None:
    """One trajectory, whatever happened; it says how it ended and accounts for every call and instance."""
    if trajectory is None:
        assert schedule.interference in ("cancel", "cancel_twice"), "cancelled though nobody did"
        return
    trajectory.check(end_ids=TEMPLATE.end_ids)
    metrics = trajectory.metrics
    assert metrics.tool_instances_created == metrics.tool_instances_released + metrics.lost_instances
    assert (trajectory.state is RequestState.FAILED) == (trajectory.error is not None)
    if trajectory.stop_reason is StopReason.ABORTED:
        assert schedule.interference == "abort", "aborted though nobody did"
    for record in trajectory.tool_calls:
        assert record.answer, "every call is answered"
        assert record.reward == (1.0 if record.outcome is CallOutcome.OK else 0.0)
    answered = [m for m in trajectory.messages if m.role == "tool"]
    assert len({m.tool_call_id for m in answered}) == len(answered), "no call is answered twice"
