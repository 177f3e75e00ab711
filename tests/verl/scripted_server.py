"""This package's CPU server with a scripted engine in it, so that tests need no model: the same server in all else."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from verl.workers.rollout.router import GlobalRequestLoadBalancer

from sglang_multiturn.cpu.verl_replica import CpuServer
from sglang_multiturn.engine.base import GenerationId
from sglang_multiturn.engine.scripted import ScriptedEngine, ScriptedTurn
from sglang_multiturn.verl_plugin.flights import Flights

HANG_AFTER = 3
TURN = tuple(range(100, 110))


class Letters:
    """What the engine asks of a template: one id a character."""

    stop_token_ids = (0,)
    vocab_size = 256


class ScriptedServer(CpuServer):
    """Two replicas of it are two Ray actors."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._started: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._engine: Any = ScriptedEngine(Letters(), self._script)  # type: ignore[arg-type]
        self._response_length = 64
        self._global_steps = 0
        self._flights = Flights()
        self.asked: list[str] = []

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        self.asked.append(str(kwargs.get("rid")))
        return await super().generate(*args, **kwargs)

    def _script(self, generation_id: GenerationId, input_ids: Sequence[int]) -> ScriptedTurn:
        """Ten tokens; a request called `endless...` hangs after three of them until someone ends it."""
        self._started[generation_id.request_id].set()
        hangs = generation_id.request_id.startswith("endless")
        return ScriptedTurn(token_ids=TURN, end=False, hang_after=HANG_AFTER if hangs else None)

    async def wait_until_started(self, request_id: str) -> None:
        """Return once it is being sampled, also where it was before."""
        await self._started[request_id].wait()

    async def forget(self) -> None:
        """As new."""
        self.asked.clear()
        self._global_steps = 0
        await self.resume_generation()

    async def get_asked(self) -> list[str]:
        return self.asked

    async def get_in_flight(self) -> list[str]:
        return self._flights.rids


class PlainServer:
    """A server as verl knows it, which takes no `rid` and ends nothing before its time."""

    def __init__(self) -> None:
        self._inner = ScriptedServer("plain")
        self._versions: list[int] = []
        self._go = asyncio.Event()
        self._asked = False

    async def start(self) -> str:
        return await self._inner.start()

    async def behave(self, versions: Sequence[int]) -> None:
        """Answer with two tokens and `abort` for each version but the last, as if verl paused for an update."""
        self._versions, self._asked = list(versions), False
        self._go.clear()

    async def let_go(self) -> None:
        """Answer what waits, and everything from now on."""
        self._go.set()

    async def is_asked(self) -> bool:
        return self._asked

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
    ) -> Any:
        self._asked = True
        await self._go.wait()
        output = await self._inner.generate(prompt_ids, sampling_params, request_id)
        output.extra_fields["global_steps"] = self._versions.pop(0)
        if self._versions:
            output.stop_reason, output.token_ids, output.log_probs = "abort", output.token_ids[:2], output.log_probs[:2]
        return output


class CountingBalancer(GlobalRequestLoadBalancer):  # type: ignore[misc]
    """verl's, which remembers how often a server was taken and given back."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._taken = self._given_back = 0

    def acquire_server(self, *args: Any, **kwargs: Any) -> Any:
        acquired = super().acquire_server(*args, **kwargs)
        self._taken += 1
        return acquired

    def release_server(self, *args: Any, **kwargs: Any) -> None:
        super().release_server(*args, **kwargs)
        self._given_back += 1

    def counts(self) -> tuple[int, int]:
        return self._taken, self._given_back
