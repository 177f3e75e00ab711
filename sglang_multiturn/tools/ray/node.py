"""What runs on a Ray node for a tool with `execution: ray`: an actor, and in it a ProcessHost for each worker process.

A worker's instances end with its host, which ends when the worker leaves or dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

from sglang_multiturn.config import ToolSettings
from sglang_multiturn.errors import SglangMultiturnError, ToolDiedError, ToolRaisedError
from sglang_multiturn.schemas import ToolSchema
from sglang_multiturn.tools.agent_data import AgentData
from sglang_multiturn.tools.host import HostLeaks, ToolHost
from sglang_multiturn.tools.process.host import ProcessHost
from sglang_multiturn.tools.ray.actors import SharedActor
from sglang_multiturn.tools.signatures import Verb

__all__ = ["Answer", "NodeVerb", "RemoteTool", "ToolNode"]

NodeVerb = Verb | Literal["start", "look"]

_LATE_RELEASE_S = 4.0
"""For an instance that was made when its caller had already gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteTool:
    """What makes the tool on its node."""

    name: str
    class_path: str
    config: Mapping[str, Any]
    tool_schema: ToolSchema | None
    settings: ToolSettings

    def digest(self) -> str:
        """Tells two tools of one name apart."""
        schema = None if self.tool_schema is None else self.tool_schema.for_template()
        known = [self.class_path, self.config, schema, self.settings.model_dump(mode="json")]
        return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of a call. Errors travel as values: those that are raised Ray would wrap."""

    value: Any = None
    error: SglangMultiturnError | None = None
    instance_id: str
    """The call's instance; for `create`, the one that was made."""
    is_alive: bool
    """Whether it still exists."""
    leaks: HostLeaks
    """Of the worker that called."""
    number: int
    """Counts from 1; later answers have higher ones."""


class ToolNode(SharedActor):
    """The actor."""

    def __init__(self, tool: RemoteTool) -> None:
        super().__init__()
        self._tool = tool
        self._hosts: dict[str, ToolHost] = {}
        self._running: dict[str, set[asyncio.Task[Any]]] = {}
        self._made: dict[str, dict[str, str]] = {}
        """By worker: instances, and the call that made each."""
        self._numbers = count(1)

    async def call(self, client: str, call_id: str, verb: NodeVerb, instance_id: str, *args: Any) -> Answer:
        """Pass one call on to that worker's host."""
        if client in self.gone:
            error = ToolDiedError(f"tool {self._tool.name!r}: this worker has left its Ray node")
            return self._answer(client, instance_id, error=error)
        running, task = self._running.setdefault(client, set()), asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            value = await _forward(self._host(client), verb, instance_id, *args)
        except SglangMultiturnError as raised:
            return self._answer(client, instance_id, error=raised)
        except Exception as raised:  # noqa: BLE001 - whatever happens here is that call's affair
            text = f"{self._tool.name}.{verb} failed on its Ray node: {type(raised).__name__}: {raised}"
            return self._answer(client, instance_id, error=ToolRaisedError(text))
        finally:
            running.discard(task)
        if verb == "create":
            self._made.setdefault(client, {})[value] = call_id
            instance_id = value  # the tool's own choice
        return self._answer(client, instance_id, value=value)

    async def settle(self, client: str, call_id: str, instance_id: str) -> Answer:
        """After a cancelled call: an instance that it made all the same is released, since nobody knows of it."""
        for made, made_by in list(self._made.get(client, {}).items()):
            if made_by == call_id:
                with contextlib.suppress(SglangMultiturnError, TimeoutError):
                    async with asyncio.timeout(_LATE_RELEASE_S):
                        await self._host(client).release(made, {})
        return self._answer(client, instance_id)

    async def free(self, client: str) -> None:
        """End a worker's instances, whatever they do."""
        self._made.pop(client, None)
        if running := self._running.pop(client, None):
            for task in running:
                task.cancel()
            await asyncio.wait(running)
        if (host := self._hosts.pop(client, None)) is not None:
            await host.aclose()

    def _host(self, client: str) -> ToolHost:
        tool = self._tool
        if client not in self._hosts:
            self._hosts[client] = ProcessHost(
                name=tool.name,
                class_path=tool.class_path,
                config=tool.config,
                tool_schema=tool.tool_schema,
                settings=tool.settings,
            )
        return self._hosts[client]

    def _answer(
        self, client: str, instance_id: str, *, value: Any = None, error: SglangMultiturnError | None = None
    ) -> Answer:
        host = self._hosts.get(client)
        is_alive = host is not None and host.is_alive(instance_id)
        if not is_alive:
            self._made.get(client, {}).pop(instance_id, None)
        return Answer(
            value=value,
            error=error,
            instance_id=instance_id,
            is_alive=is_alive,
            leaks=HostLeaks() if host is None else host.leaks(),
            number=next(self._numbers),
        )


async def _forward(host: ToolHost, verb: NodeVerb, instance_id: str, *args: Any) -> Any:
    if verb == "start":
        return await host.start()
    if verb == "look":
        return await host.look(instance_id)
    if verb == "execute":
        parameters, kwargs, sent = args
        agent_data = None if sent is None else AgentData.from_json(sent, {})
        return await host.execute(instance_id, parameters, kwargs, agent_data)
    if verb == "create":
        return await host.create(instance_id, *args)
    if verb == "calc_reward":
        return await host.calc_reward(instance_id, *args)
    if verb == "snapshot":
        return await host.snapshot(instance_id)
    if verb == "restore":
        return await host.restore(instance_id, *args)
    return await host.release(instance_id, *args)
