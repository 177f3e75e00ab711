"""Which server a generation went to, so that an abort can follow it there.

verl's client asks its balancer for a server at every call and keeps the answer to itself (llm_server.py:120). A copy of
the client, whose `_acquire_server` notes the answer, learns it exactly: with any number of replicas, any balancer, and
servers that come and go. verl's own client, which other loops use too, stays as it is.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from verl.workers.rollout.replica import TokenOutput

from sglang_multiturn.verl_plugin.flights import Ending

Acquire = Callable[..., Coroutine[Any, Any, tuple[str, Any]]]


class AbortedBeforeServerError(Exception):
    """Ended before verl had a server for it: nothing was asked."""


@dataclass(slots=True)
class Route:
    """One generation's way to its server."""

    rid: str
    handle: Any = None
    """The server's Ray actor, once verl's balancer has named it."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def takes_rid(self) -> bool:
        """Whether the server is one of ours; a handle knows its actor's methods."""
        return self.handle is not None and hasattr(self.handle, "abort_rids")

    async def abort(self) -> None:
        """End the generation as far as the server can, and return once it has."""
        self.aborted.set()
        if self.takes_rid:
            await self.handle.abort_rids.remote([self.rid])


class _Server:
    """A server as verl's client uses it: `server.generate.remote(...)`."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self.generate = self

    def remote(self, *, rid: str, **call: Any) -> Awaitable[TokenOutput]:
        """Ask the server, unless the generation has ended meanwhile: verl's async client asks again and again."""
        if self._route.aborted.is_set():
            return _nothing()
        named = {"rid": rid} if self._route.takes_rid else {}
        answer: Awaitable[TokenOutput] = self._route.handle.generate.remote(**named, **call)
        return answer


async def _nothing() -> TokenOutput:
    return TokenOutput(token_ids=[], log_probs=[], stop_reason=Ending.ABORTED.value)


class RoutedClient:
    """verl's client, with a `Route` a call."""

    def __init__(self, client: Any) -> None:
        """Wrap `client`; one that does not say for what it needs a server is used as it is: no generation can be aborted."""
        self._routes: dict[str, Route] = {}
        self._is_routed = _says_for_what(client)
        self._client = copy.copy(client) if self._is_routed else client
        if self._is_routed:
            self._verls_acquire: Acquire = self._client._acquire_server
            self._client._acquire_server = self._acquire

    async def generate(self, route: Route, **call: Any) -> TokenOutput:
        """Ask verl for one generation.

        Raises:
            AbortedBeforeServerError: it was aborted while verl had no server for it.
            Exception: whatever the server or Ray raises.
        """
        if not self._is_routed:
            plain: TokenOutput = await self._client.generate(**call)
            return plain
        self._routes[route.rid] = route
        try:
            output: TokenOutput = await self._client.generate(**call, rid=route.rid)
            return output
        finally:
            del self._routes[route.rid]

    async def _acquire(self, request_id: str, *, rid: str, **extra: Any) -> tuple[str, _Server]:
        route = self._routes[rid]
        # Never cancelled: verl's balancer counts a server as busy from here until it is released.
        acquiring = asyncio.create_task(self._verls_acquire(request_id, **extra))
        aborted = asyncio.create_task(route.aborted.wait())
        try:
            await asyncio.wait({acquiring, aborted}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            aborted.cancel()
            if not acquiring.done():
                acquiring.add_done_callback(lambda acquired: self._release(acquired, request_id))
        if not acquiring.done():
            raise AbortedBeforeServerError
        server_id, route.handle = acquiring.result()
        return server_id, _Server(route)

    def _release(self, acquired: asyncio.Future[tuple[str, Any]], request_id: str) -> None:
        """Nobody wants this server any more."""
        if not acquired.cancelled() and acquired.exception() is None:
            self._client._release_server(acquired.result()[0], request_id=request_id)


def _says_for_what(client: Any) -> bool:
    """Whether the client hands on to `_acquire_server` what it was asked with, as verl's does from 0.9.1 on."""
    acquire = getattr(client, "_acquire_server", None)
    if acquire is None:
        return False
    return any(taken.kind is taken.VAR_KEYWORD for taken in inspect.signature(acquire).parameters.values())
