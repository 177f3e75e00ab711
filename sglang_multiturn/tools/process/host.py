"""The host of a tool with `execution: process`."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping
from typing import Any

from sglang_multiturn.config import ToolSettings
from sglang_multiturn.errors import ConfigError, ToolContractError, ToolDiedError
from sglang_multiturn.schemas import ToolSchema
from sglang_multiturn.tools.agent_data import AgentData
from sglang_multiturn.tools.host import HostLeaks, ToolReply
from sglang_multiturn.tools.process.connection import Connection
from sglang_multiturn.tools.process.messages import Created, Executed, Judged, Load, Written
from sglang_multiturn.tools.process.nursery_process import NurseryProcess

__all__ = ["ProcessHost"]

logger = logging.getLogger(__name__)


class ProcessHost:
    """Each instance in a process of its own, forked from one that has made the tool.

    The class is made once, in the nursery; what its constructor loads is shared by all instances. Threads that it starts
    are not there in the instances, and its exit functions are not run. Calls of one instance may overlap, as far as the
    tool's methods await; a cancelled call ends the instance with all that it started, and its other calls with it.
    """

    def __init__(
        self,
        *,
        name: str,
        class_path: str,
        config: Mapping[str, Any],
        tool_schema: ToolSchema | None,
        settings: ToolSettings,
        start_timeout_s: float = 60.0,
    ) -> None:
        """Nothing is started yet.

        Args:
            name: The tool's, in messages.
            class_path: Import path of its class, importable where this process finds its modules.
            config: For its constructor, as JSON.
            tool_schema: For its constructor.
            settings: Of which `max_memory_mb` and `max_processes` are used here.
            start_timeout_s: How long importing and making the class may take.
        """
        self._name = name
        self._class_path = class_path
        self._config = dict(config)
        self._tool_schema = tool_schema
        self._settings = settings
        self._start_timeout_s = start_timeout_s
        self._nursery: NurseryProcess | None = None
        self._starting: asyncio.Task[None] | None = None
        self._connections: set[Connection] = set()
        self._instances: dict[str, Connection] = {}
        self._closed = False
        self._takes_agent_data = False

    @property
    def nursery_pid(self) -> int | None:
        """For monitoring; None while there is none."""
        return None if self._nursery is None or self._nursery.is_gone else self._nursery.pid

    async def start(self) -> None:
        """Make the tool, if that has not been done; `create` does it otherwise. A cancellation does not stop it.

        Raises:
            ConfigError: the class cannot be made.
        """
        if self._closed:
            raise ToolDiedError(f"tool {self._name!r}: its host was closed")
        if self.nursery_pid is not None and self._starting is None:
            return
        if self._starting is None:
            # A task of its own: a tool that loads for minutes is not to begin anew for each caller that gives up.
            self._starting = asyncio.create_task(self._start(), name=f"nursery-{self._name}-start")
            self._starting.add_done_callback(self._started)
        await asyncio.shield(self._starting)

    async def create(self, instance_id: str, kwargs: Mapping[str, Any]) -> str:
        """Fork a process and make the instance in it. Raises ConfigError when the tool's class cannot be made."""
        await self.start()
        assert self._nursery is not None
        connection = await Connection.open(self._name, self._nursery)
        self._connections.add(connection)
        connection.reading.add_done_callback(lambda _: self._connections.discard(connection))
        try:
            created = await connection.call("create", instance_id, kwargs)
            assert isinstance(created, Created)
            self._register(created.instance_id, connection)
        except BaseException:
            await connection.end("was stopped after a create that failed")
            raise
        return created.instance_id

    async def execute(
        self,
        instance_id: str,
        parameters: dict[str, Any],
        kwargs: Mapping[str, Any],
        agent_data: AgentData | None = None,
    ) -> ToolReply:
        """`agent_data` is sent to tools that take it."""
        sent = agent_data.to_json() if agent_data is not None and self._takes_agent_data else None
        reply = await self._connection(instance_id).call("execute", instance_id, kwargs, parameters, sent)
        assert isinstance(reply, Executed)
        return ToolReply(text=reply.text, reward=reply.reward, metrics=reply.metrics, stop=reply.stop)

    async def calc_reward(self, instance_id: str, kwargs: Mapping[str, Any]) -> float:
        """Judge the conversation."""
        reply = await self._connection(instance_id).call("calc_reward", instance_id, kwargs)
        assert isinstance(reply, Judged)
        return reply.reward

    async def snapshot(self, instance_id: str) -> str:
        """See `ToolHost`. One that is cancelled goes on in its process, as long as that lives."""
        reply = await self._connection(instance_id).call("snapshot", instance_id, {})
        assert isinstance(reply, Written)
        return reply.state

    async def restore(self, instance_id: str, state: str) -> None:
        """See `ToolHost`."""
        await self._connection(instance_id).call("restore", instance_id, {}, state=state)

    async def release(self, instance_id: str, kwargs: Mapping[str, Any]) -> None:
        """Free the instance; its process ends by itself, or is killed if it does not in a moment."""
        connection = self._connection(instance_id)
        del self._instances[instance_id]
        try:
            await connection.call("release", instance_id, kwargs)
            await connection.finish()
        finally:
            await connection.end("was stopped after its release")

    def is_alive(self, instance_id: str) -> bool:
        """Whether it may be called."""
        return instance_id in self._instances and self._instances[instance_id].is_alive

    async def look(self, instance_id: str) -> None:
        """The end of a process is heard of when it comes, but the event loop may not have got to hearing it."""
        if (connection := self._instances.get(instance_id)) is not None:
            connection.look()

    def leaks(self) -> HostLeaks:
        """What is still held; nothing is ever left behind, since everything can be killed."""
        live = sum(connection.is_alive for connection in self._instances.values())
        return HostLeaks(live_instances=live, live_processes=len(self._connections))

    async def aclose(self) -> None:
        """End the nursery with everything below it. Safe to call twice."""
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        if self._nursery is not None:
            for connection in self._connections:
                connection.is_alive = False
            await self._nursery.close()
        if self._connections:
            await asyncio.wait({connection.reading for connection in self._connections})

    async def _start(self) -> None:
        if sys.platform != "linux":
            raise ConfigError(f"tool {self._name!r}: `execution: process` needs Linux; use `thread` or `async`")
        if self._class_path.startswith("__main__."):
            raise ConfigError(
                f"tool {self._name!r}: {self._class_path} stands in the script that was started, where another process "
                "cannot import it from; move it into a module"
            )
        if self._nursery is not None:
            await self._nursery.close()  # it died; what is left of it goes first
        schema = self._tool_schema
        self._nursery = NurseryProcess(
            Load(
                name=self._name,
                class_path=self._class_path,
                config=self._config,
                tool_schema=None if schema is None else schema.for_template(),
                sys_path=sys.path,
                max_memory_mb=self._settings.max_memory_mb,
                max_processes=self._settings.max_processes,
            )
        )
        loaded = await self._nursery.loaded(self._start_timeout_s)
        self._takes_agent_data = loaded.takes_agent_data
        if loaded.threads:
            logger.warning(
                "tool %r: its class started threads (%s), which its instances will not have; start them in `create`, "
                "and make sure that what they locked was not locked for ever",
                *(self._name, ", ".join(loaded.threads)),
            )

    def _started(self, task: asyncio.Task[None]) -> None:
        self._starting = None
        if not task.cancelled():
            task.exception()  # whoever still waits for it gets it; nobody may

    def _register(self, instance_id: str, connection: Connection) -> None:
        if self.is_alive(instance_id):
            raise ToolContractError(
                f"{self._name}.create returned {instance_id!r}, which is the id of another living instance"
            )
        self._instances[instance_id] = connection
        connection.reading.add_done_callback(lambda _: self._forget(instance_id, connection))

    def _forget(self, instance_id: str, connection: Connection) -> None:
        if self._instances.get(instance_id) is connection:
            del self._instances[instance_id]

    def _connection(self, instance_id: str) -> Connection:
        connection = self._instances.get(instance_id)
        if connection is None or not connection.is_alive:
            raise ToolDiedError(
                f"tool {self._name!r}: there is no living instance {instance_id!r}; its process ended, or it was never made"
            )
        return connection
