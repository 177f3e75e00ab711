"""verl's SGLang server, with one thing more: a generation that carries our `rid` can be aborted by it.

    VerlGenerator ─► verl's client ─► verl's balancer ─► SglangServer.generate(..., rid) ─► SGLang, under that very rid
         └──────────────── abort_rids([rid]), straight to the same server ────────┘

Requests of other loops carry no rid and are served by verl's own code alone. Invariants: an abort is never lost, whether
its generation has not arrived yet, was caught by SGLang's pause, is on its way to the scheduler or runs; it returns once
SGLang has let go of it; and before memory is given back the scheduler is idle, which SGLang asserts.

A generation has exactly one weight version: either verl pauses before it updates, and then nothing is in flight, or
SGLang's update waits for what is (tokenizer_control_mixin.py:425, the writer's side of `model_update_lock`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.sglang_rollout import async_sglang_server

from sglang_multiturn.verl_plugin.flights import Ending, Flight, Flights

logger = logging.getLogger(__name__)

verls: Any = async_sglang_server  # verl's types say less than its code does

_ABORT_REPEAT_S = 0.25
_IDLE_POLL_S = 0.05
_IDLE_TIMEOUT_S = 30.0
_DETERMINISTIC = "enable_deterministic_inference"


class SglangServer(verls.SGLangHttpServer):  # type: ignore[misc]
    """The Ray actor around one SGLang, as verl starts it."""

    # Not in an __init__ of ours, whose arguments would be verl's to change.
    _paused = False
    """verl's pause is complete: what was in flight has ended, and what slipped in waits in SGLang."""
    _pauses = 0
    """How often verl paused this server."""

    async def launch_server(self, master_address: str | None = None, master_port: int | None = None) -> None:
        """As verl does, with `rollout.full_determinism` made to mean something: verl knows it for vLLM only."""
        if self.config.full_determinism:
            given = self.config.engine_kwargs.get("sglang") or {}
            self.config.engine_kwargs["sglang"] = {_DETERMINISTIC: True, **given}
        await super().launch_server(master_address, master_port)

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        rid: str | None = None,
        **more: Any,
    ) -> TokenOutput:
        """One generation.

        Args:
            prompt_ids: all tokens so far.
            sampling_params: SGLang's, as verl writes them.
            request_id: verl's name for it; SGLang's too where there is no `rid`.
            image_data: verl's.
            video_data: verl's.
            rid: our name for it, unique for every attempt. Its `stop_reason` is then never `abort` (see `Ending`).
            more: whatever else verl's own method takes.

        Raises:
            EngineError: a generation of that rid is in flight.
        """
        media = {"image_data": image_data, "video_data": video_data}
        if rid is None:
            output: TokenOutput = await super().generate(prompt_ids, sampling_params, request_id, **media, **more)
            return output
        with self._flights.flight(rid) as flight:
            if flight.aborted or flight.turned_away:
                return self._nothing(flight)
            pauses = self._pauses
            output = await self._ask(flight, super().generate(prompt_ids, sampling_params, rid, **media, **more))
            if output.stop_reason == "abort":
                paused = self._pauses != pauses or self.tokenizer_manager.is_pause
                output.stop_reason = Ending.of(flight, paused=paused).value
            return output

    async def abort_rids(self, rids: list[str]) -> None:
        """End these generations, and return once SGLang has let go of them. One that has not arrived will end at once."""
        flights = [flight for rid in rids if (flight := self._flights.abort(rid)) is not None]
        while left := {flight.rid: flight.call for flight in flights if flight.call and not flight.call.done()}:
            for rid, call in left.items():
                self._end(rid, call)
            # SGLang forgets an abort that overtakes its request on the way to the scheduler, hence again and again.
            await asyncio.wait(left.values(), timeout=_ABORT_REPEAT_S)

    async def abort_all_requests(self) -> None:
        """verl's pause: what is in flight ends, what comes is turned away until `resume_generation`."""
        self._pauses += 1
        self._flights.pause()
        await super().abort_all_requests()
        self._paused = True

    async def resume_generation(self) -> None:
        """Sample again."""
        self._paused = False
        await super().resume_generation()
        self._flights.go_on()

    async def serving(self) -> None:
        """Return when verl's pause is over; at once where there is none."""
        await self._flights.serving()

    async def sleep(self) -> None:
        """Give memory back, once SGLang is idle."""
        await self._until_idle()
        await super().sleep()

    async def release_kv_cache(self) -> None:
        """Give the cache's memory back, once SGLang is idle."""
        await self._until_idle()
        await super().release_kv_cache()

    @property
    def _flights(self) -> Flights:
        flights: Flights = self.__dict__.setdefault("_flights_by_rid", Flights())
        return flights

    async def _ask(self, flight: Flight, call: Coroutine[Any, Any, TokenOutput]) -> TokenOutput:
        # A task of its own, so that an abort can take it out of SGLang's pause without ending verl's request.
        flight.call = asyncio.create_task(call, name=flight.rid)
        try:
            output: TokenOutput = await flight.call
        except asyncio.CancelledError:
            if not flight.aborted:
                raise  # someone cancelled verl's request itself
            self.tokenizer_manager.rid_to_state.pop(flight.rid, None)
            return self._nothing(flight)
        return output

    def _end(self, rid: str, call: asyncio.Task[Any]) -> None:
        manager = self.tokenizer_manager
        if self._paused:  # it has not reached the scheduler, where alone SGLang looks for it
            call.cancel()
            return
        state = manager.rid_to_state.get(rid)
        if getattr(state, "abort_sent", False):
            state.abort_sent = False  # else newer versions send no second abort after one that overtook its request
        manager.abort_request(rid=rid)

    def _nothing(self, flight: Flight) -> TokenOutput:
        return TokenOutput(
            token_ids=[],
            log_probs=[],
            stop_reason=Ending.of(flight, paused=False).value,
            extra_fields={"global_steps": self.global_steps},
        )

    async def _until_idle(self) -> None:
        """The scheduler is a step behind what it has already answered, and releasing memory ends it when it is not idle."""
        if self.node_rank != 0 or not self.config.free_cache_engine:
            return
        try:
            async with asyncio.timeout(_IDLE_TIMEOUT_S):
                while not (await self.tokenizer_manager.flush_cache()).success:  # noqa: ASYNC110 - SGLang's, in a process of its own
                    await asyncio.sleep(_IDLE_POLL_S)
        except TimeoutError:
            logger.error(
                "SGLang is not idle after %g s, and will not release memory; in flight of ours: %s",
                _IDLE_TIMEOUT_S,
                ", ".join(self._flights.rids) or "nothing",
            )


class SglangReplica(verls.SGLangReplica):  # type: ignore[misc]
    """verl's replica, which starts servers of ours."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(SglangServer)
