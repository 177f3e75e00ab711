"""Named Ray actors that all processes of a job share, and how each end learns that the other is gone.

Such an actor is found by its name or made by whoever asks first, and lives as long as that process. A process ties itself
to it by a call that never returns, its lifeline. When the actor is gone, the call fails. When the process is gone, so is
the owner of the call's result: the actor, which waits for that result as well, is told so by Ray within seconds.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

__all__ = ["SharedActor", "Tie", "is_ray_running", "shared_actor"]

_MOST_CALLS = 100_000
"""Calls in flight that an actor takes; beyond it even those that free something would wait."""
_kept: set[Any] = set()
"""Handles of this process: an actor ends when the one goes that it was made with. An equal one does not replace it."""


def is_ray_running() -> bool:
    """Whether this process belongs to a Ray job. Imports nothing."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def shared_actor(actor_class: type[SharedActor], name: str, options: Mapping[str, Any], *args: Any) -> Any:
    """The handle of this job's actor of that name, which is made now if there is none.

    It needs no CPU by default: a job that has reserved every CPU could otherwise never start it.
    """
    import ray

    full_name = f"sglang_multiturn-{ray.get_runtime_context().get_job_id()}-{name}"
    remote = ray.remote(actor_class).options(
        **{"num_cpus": 0, **options}, name=full_name, get_if_exists=True, max_concurrency=_MOST_CALLS
    )
    handle = remote.remote(*args)
    _kept.add(handle)
    return handle


class SharedActor:
    """Base of those actors: knows the processes that are tied to it. Runs inside Ray."""

    def __init__(self) -> None:
        self._ends: dict[str, asyncio.Event] = {}
        self.gone: set[str] = set()
        """Processes that have left: what comes of them still must be refused, as nobody would free it."""

    async def lifeline(self, client: str) -> None:
        """Returns once that client is none any more."""
        await self._end_of(client).wait()

    async def watch(self, client: str, lifeline: list[Any]) -> None:
        """Wait for the end of a client, however it ends; in a list, a result travels as the promise that it is."""
        from ray.exceptions import RayError

        try:
            await lifeline[0]
        except RayError:  # the client died, or can no longer reach this actor
            pass
        finally:
            await self.leave(client)

    async def leave(self, client: str) -> None:
        """Free what the client holds."""
        self.gone.add(client)
        self._end_of(client).set()
        await self.free(client)

    async def free(self, client: str) -> None:
        """What `leave` means to the actor; may be called again for the same client."""
        raise NotImplementedError

    def _end_of(self, client: str) -> asyncio.Event:
        return self._ends.setdefault(client, asyncio.Event())


class Tie:
    """This process's end of the tie to a shared actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.client = uuid4().hex
        self._lifeline = actor.lifeline.remote(self.client)
        actor.watch.remote(self.client, [self._lifeline])

    def cut(self) -> None:
        """Let the actor free what this process holds there, if it is still alive to hear it."""
        self.actor.leave.remote(self.client)
