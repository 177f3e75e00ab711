"""The host of a tool with `execution: ray`: its processes live on a Ray node, in one named actor of the whole job.

    worker process      RayHost ── Tie
      │ calls, answers    │ lifeline
      ▼                   ▼
    actor on a node     ToolNode ── a ProcessHost for each worker process ── nursery ── instances

Each worker has a ProcessHost of its own there, so that the ids of one are no matter of another's and a dead worker's
instances end together. The actor ends with the process that made it; whoever dies, nothing below it lives on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from sglang_multiturn.config import ToolSettings
from sglang_multiturn.errors import ConfigError, ToolDiedError
from sglang_multiturn.schemas import ToolSchema
from sglang_multiturn.tools.agent_data import AgentData
from sglang_multiturn.tools.host import HostLeaks, ToolReply
from sglang_multiturn.tools.ray.actors import Tie, is_ray_running, shared_actor
from sglang_multiturn.tools.ray.node import Answer, NodeVerb, RemoteTool, ToolNode
from sglang_multiturn.tools.signatures import Verb

__all__ = ["RayHost", "check_ray_options"]

logger = logging.getLogger(__name__)

_END_S = 5.0
"""How long the end of a cancelled call on its node is waited for."""
_PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0)
"""After attempts to make an instance on an actor that is dead, whose name stays taken for a moment."""
_OURS = ("name", "namespace", "get_if_exists", "lifetime", "max_concurrency")


class RayHost:
    """This worker's access to its instances on the node."""

    def __init__(
        self,
        *,
        name: str,
        class_path: str,
        config: Mapping[str, Any],
        tool_schema: ToolSchema | None,
        settings: ToolSettings,
        run_id: str,
    ) -> None:
        """Nothing is started yet; the arguments are ProcessHost's, and the run whose workers share the actor.

        Raises:
            ConfigError: this process belongs to no Ray job, or `ray_options` are none of Ray's.
        """
        self._tool = RemoteTool(
            name=name, class_path=class_path, config=dict(config), tool_schema=tool_schema, settings=settings
        )
        self._actor_name = f"tool-{run_id}-{name}-{self._tool.digest()}"
        self._tie: Tie | None = None
        self._is_started = False
        self._live: set[str] = set()
        self._leaks = HostLeaks()
        self._heard = 0
        """The number of the answer that `_leaks` came with."""
        check_ray_options(name, settings.ray_options)

    async def start(self) -> None:
        """Make the actor, and the tool in it, unless both are there."""
        if self._tie is None or not self._is_started:
            await self._begin("start", "")
            self._is_started = True

    async def create(self, instance_id: str, kwargs: Mapping[str, Any]) -> str:
        """Make the instance; and the actor, if there is none or it died."""
        made = await self._begin("create", instance_id, dict(kwargs))
        assert isinstance(made, str)
        return made

    async def _begin(self, verb: NodeVerb, instance_id: str, *args: Any) -> Any:
        """A call that needs no instance, so that another actor can do it if this one died."""
        from ray.exceptions import RayActorError

        for pause_s in _PAUSES_S:
            try:
                tie = self._tie = self._tie or self._connect()
                answer = await self._ask(tie, verb, instance_id, *args)
            except (RayActorError, ValueError) as error:  # ValueError: its name went between two looks at it
                failure = self._died(error)
                await asyncio.sleep(pause_s)
            else:
                return _value(answer)
        raise failure

    async def execute(
        self,
        instance_id: str,
        parameters: dict[str, Any],
        kwargs: Mapping[str, Any],
        agent_data: AgentData | None = None,
    ) -> ToolReply:
        """`agent_data` travels as plain JSON."""
        sent = None if agent_data is None else agent_data.to_json()
        reply = await self._call("execute", instance_id, parameters, dict(kwargs), sent)
        assert isinstance(reply, ToolReply)
        return reply

    async def calc_reward(self, instance_id: str, kwargs: Mapping[str, Any]) -> float:
        """See `ToolHost`."""
        reward = await self._call("calc_reward", instance_id, dict(kwargs))
        assert isinstance(reward, float)
        return reward

    async def snapshot(self, instance_id: str) -> str:
        """See `ToolHost`."""
        state = await self._call("snapshot", instance_id)
        assert isinstance(state, str)
        return state

    async def restore(self, instance_id: str, state: str) -> None:
        """See `ToolHost`."""
        await self._call("restore", instance_id, state)

    async def release(self, instance_id: str, kwargs: Mapping[str, Any]) -> None:
        """See `ToolHost`."""
        try:
            await self._call("release", instance_id, dict(kwargs))
        finally:
            self._live.discard(instance_id)

    def is_alive(self, instance_id: str) -> bool:
        """As of the last answer: a process that died between two calls is noticed by the next one."""
        return instance_id in self._live

    async def look(self, instance_id: str) -> None:
        """Ask the node."""
        from ray.exceptions import RayActorError

        if self._tie is not None:
            with contextlib.suppress(RayActorError):  # that too has been noted
                await self._ask(self._tie, "look", instance_id)

    def leaks(self) -> HostLeaks:
        """Of this worker, as of the last answer."""
        return self._leaks

    async def aclose(self) -> None:
        """End this worker's instances. The actor stays for the others, and ends with the process that made it."""
        from ray.exceptions import RayError

        tie = self._tie
        self._forget_all()
        if tie is not None:
            with contextlib.suppress(RayError):
                await tie.actor.leave.remote(tie.client)

    def _connect(self) -> Tie:
        return Tie(shared_actor(ToolNode, self._actor_name, self._tool.settings.ray_options, self._tool))

    async def _call(self, verb: Verb, instance_id: str, *args: Any) -> Any:
        """One call of an instance that is there."""
        from ray.exceptions import RayActorError

        if self._tie is None or instance_id not in self._live:
            raise ToolDiedError(f"tool {self._tool.name!r}: there is no living instance {instance_id!r}")
        try:
            return _value(await self._ask(self._tie, verb, instance_id, *args))
        except RayActorError as error:
            raise self._died(error) from error

    async def _ask(self, tie: Tie, verb: NodeVerb, instance_id: str, *args: Any) -> Answer:
        from ray.exceptions import RayActorError

        call_id = uuid4().hex
        running = tie.actor.call.remote(tie.client, call_id, verb, instance_id, *args)
        try:
            answer: Answer = await running
        except asyncio.CancelledError:
            await self._end(tie, running, call_id, instance_id)
            raise
        except RayActorError:
            self._cut(tie)
            raise
        self._note(tie, answer)
        return answer

    async def _end(self, tie: Tie, running: Any, call_id: str, instance_id: str) -> None:
        """See a cancelled call to its end on the node, for some seconds at most."""
        import ray
        from ray.exceptions import RayActorError, TaskCancelledError

        ray.cancel(running)
        try:
            async with asyncio.timeout(_END_S):
                with contextlib.suppress(TaskCancelledError):
                    await running
                settled = tie.actor.settle.remote(tie.client, call_id, instance_id)
                if self._heard:  # an actor that never answered may be minutes from its start
                    self._note(tie, await settled)
        except TimeoutError:
            logger.warning("%s: its Ray node has not said within %g s that a call ended", self._tool.name, _END_S)
            self._live.discard(instance_id)
        except RayActorError:
            self._cut(tie)

    def _note(self, tie: Tie, answer: Answer) -> None:
        if tie is not self._tie:
            return
        if answer.number > self._heard:  # answers may pass each other
            self._heard, self._leaks = answer.number, answer.leaks
        if answer.is_alive:
            self._live.add(answer.instance_id)
        else:
            self._live.discard(answer.instance_id)

    def _died(self, error: Exception) -> ToolDiedError:
        return ToolDiedError(f"tool {self._tool.name!r}: its Ray actor cannot be reached ({type(error).__name__})")

    def _cut(self, tie: Tie) -> None:
        """Give up an actor that died or cannot be reached; the next `create` makes or finds another."""
        if self._tie is tie:
            self._forget_all()
            tie.cut()

    def _forget_all(self) -> None:
        self._tie, self._is_started, self._leaks, self._heard = None, False, HostLeaks(), 0
        self._live.clear()


def _value(answer: Answer) -> Any:
    if answer.error is not None:
        raise answer.error
    return answer.value


def check_ray_options(name: str, options: Mapping[str, Any]) -> None:
    """Raises ConfigError unless these are options that Ray has and a user may set, in a process of a Ray job."""
    if not is_ray_running():
        raise ConfigError(
            f"tool {name!r}: `execution: ray` needs a Ray job, and this process belongs to none; run under verl, "
            "call ray.init() before, or use `execution: process`"
        )
    import ray

    for option in options:
        if option in _OURS:
            raise ConfigError(f"tool {name!r}: ray_options: {option!r} is set by this package; leave it out")
    try:
        ray.remote(ToolNode).options(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"tool {name!r}: ray_options: {error}") from error
