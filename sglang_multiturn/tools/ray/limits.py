"""The limits of a tool in a Ray job: one queue, in one named actor, for the calls of all worker processes.

A call that may begin holds a lease. It is given back when the call ends; when its process dies; and at the latest when
the time is over that the call can last. The actor itself dies with the process that made it. The next call then makes
another one, which each process tells of the calls it runs before it asks for more. Until all have done so, more calls may
run than the limit says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from uuid import uuid4

from sglang_multiturn.config import ToolSettings
from sglang_multiturn.errors import ToolDiedError
from sglang_multiturn.tools.limits import Limiter, Turnstile, is_limited, make_local
from sglang_multiturn.tools.ray.actors import SharedActor, Tie, is_ray_running, shared_actor

__all__ = ["RayLimiter", "SharedTurnstile", "make_limiter"]

logger = logging.getLogger(__name__)

_PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 5.0, 5.0)
"""Between attempts to reach or to make the actor. The name of a dead one stays taken for a moment."""


def make_limiter(name: str, settings: ToolSettings, *, run_id: str) -> Limiter:
    """The limiter of a tool: shared by all processes of a Ray job, if this process belongs to one."""
    if is_limited(settings) and is_ray_running():
        return RayLimiter(name, settings, run_id=run_id)
    return make_local(settings)


class RayLimiter:
    """This process's access to the queue; reached at the first call."""

    def __init__(self, name: str, settings: ToolSettings, *, run_id: str) -> None:
        self._name = name
        self._limits = (settings.max_concurrent, settings.max_per_s)
        self._actor_name = "-".join(["limits", run_id, name, *map(str, self._limits)])
        self._tie: Tie | None = None
        self._reaching = asyncio.Lock()
        self._held: dict[str, float | None] = {}
        """Leases and how long each can last."""

    @asynccontextmanager
    async def slot(self, longest_s: float | None) -> AsyncIterator[None]:
        """See `Limiter`. Raises ToolDiedError when no actor can be reached or made within some 20 seconds."""
        lease_id = uuid4().hex
        try:
            await self._acquire(lease_id, longest_s)
            self._held[lease_id] = longest_s
            yield
        finally:
            self._held.pop(lease_id, None)
            if self._tie is not None:
                self._tie.actor.give_back.remote(self._tie.client, lease_id)

    async def _acquire(self, lease_id: str, longest_s: float | None) -> None:
        from ray.exceptions import RayActorError

        failure: Exception | None = None
        for pause_s in (0.0, *_PAUSES_S):
            await asyncio.sleep(pause_s)
            tie: Tie | None = None
            try:
                tie = await self._reach()
                if await tie.actor.acquire.remote(tie.client, lease_id, longest_s):
                    return
            except (RayActorError, ValueError) as error:  # ValueError: its name went between two looks at it
                failure = error
            if tie is not None:
                self._cut(tie)
        raise ToolDiedError(
            f"no call of {self._name} can begin: the Ray actor that keeps its limits cannot be reached ({failure}); "
            "look at the state of the Ray cluster"
        ) from failure

    async def _reach(self) -> Tie:
        """The tie to the actor, which has been told of the calls that run: Ray promises no order between calls."""
        async with self._reaching:
            if self._tie is not None:
                return self._tie
            self._tie = tie = Tie(shared_actor(SharedTurnstile, self._actor_name, {}, *self._limits))
            try:
                await tie.actor.adopt.remote(tie.client, dict(self._held))
            except BaseException:
                self._cut(tie)
                raise
            return tie

    def _cut(self, tie: Tie) -> None:
        if self._tie is tie:
            self._tie = None
            tie.cut()


@dataclass(slots=True)
class _Lease:
    place: asyncio.Future[None]
    expiry: asyncio.TimerHandle | None = None


class SharedTurnstile(SharedActor):
    """The actor: a queue, and who holds which place in it."""

    def __init__(self, max_concurrent: int | None, max_per_s: float | None) -> None:
        super().__init__()
        self._turnstile = Turnstile(max_concurrent=max_concurrent, max_per_s=max_per_s)
        self._leases: dict[str, dict[str, _Lease | None]] = {}
        """By client and id. None: given back before it was asked for, as Ray promises no order between calls."""

    async def acquire(self, client: str, lease_id: str, longest_s: float | None) -> bool:
        """True once the call may begin; False if it has been given up, or its process is gone."""
        if self._is_given_up(client, lease_id):
            return False
        lease = self._leases[client][lease_id] = _Lease(self._turnstile.queue())
        await asyncio.wait([lease.place])
        if lease.place.cancelled():
            return False
        self._expire_after(longest_s, client, lease_id)
        return True

    async def adopt(self, client: str, held: dict[str, float | None]) -> None:
        """Count calls that run already, begun by an actor that is no more."""
        for lease_id, longest_s in held.items():
            if not self._is_given_up(client, lease_id):
                self._leases[client][lease_id] = _Lease(self._turnstile.occupy())
                self._expire_after(longest_s, client, lease_id)

    async def give_back(self, client: str, lease_id: str) -> None:
        """The call has ended, or will never begin."""
        if client in self.gone:
            return
        leases = self._leases.setdefault(client, {})
        if lease_id in leases:
            self._end(leases.pop(lease_id))
        else:
            leases[lease_id] = None

    async def free(self, client: str) -> None:
        """Give back everything of a process that is gone."""
        for lease in self._leases.pop(client, {}).values():
            self._end(lease)

    async def counts(self) -> tuple[int, int]:
        """Calls that may run now, and calls that wait."""
        places = [lease.place.done() for own in self._leases.values() for lease in own.values() if lease is not None]
        return sum(places), len(places) - sum(places)

    def _is_given_up(self, client: str, lease_id: str) -> bool:
        if client in self.gone:
            return True
        leases = self._leases.setdefault(client, {})
        if lease_id not in leases:
            return False
        del leases[lease_id]
        return True

    def _expire_after(self, longest_s: float | None, client: str, lease_id: str) -> None:
        lease = self._leases.get(client, {}).get(lease_id)
        if longest_s is not None and lease is not None:
            lease.expiry = asyncio.get_running_loop().call_later(longest_s, self._expire, client, lease_id)

    def _expire(self, client: str, lease_id: str) -> None:
        logger.warning("a call of process %s was never heard of again; its slot is free", client)
        self._end(self._leases.get(client, {}).pop(lease_id, None))

    def _end(self, lease: _Lease | None) -> None:
        if lease is not None:
            if lease.expiry is not None:
                lease.expiry.cancel()
            self._turnstile.leave(lease.place)
