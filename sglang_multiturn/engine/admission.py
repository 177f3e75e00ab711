"""Generations enter the engine only while its KV cache has room for them.

An engine that is given more than fits puts running generations back and computes them again. So each one waits here, first
come first served, until its tokens fit beside those in flight: its input, and as many new ones as are to be expected.

* What several inputs begin with is held once, so the samples of a group do not pay for their prompt again and again.
* Reserving `max_new_tokens` would leave most of the cache empty: it is a whole conversation's budget, of which a turn
  uses little. Reserving the mean of recent turns would be too little where their lengths have a tail: long turns stay
  in flight longest, so on average each one in flight holds E[L²]/2E[L]. Reserved is `MARGIN` times that, or times the
  mean where that is more, since many may have begun together. Simulated with the cache always asked for more, inputs of
  100 to 2,000 tokens and lengths from equal to log-normal with σ = 1, it is 80 to 94 percent full on average (54 for equal
  lengths and short inputs) and asked for more than it has in at most 5 percent of the time.
* Too loose a guess costs a generation computed again, and corrects itself as turns end.

Invariants: what is reserved is given back exactly once, however a generation ends; one that waits can be aborted and
cancelled like one that runs; one that is too big for the cache alone runs alone.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_multiturn.engine.base import FinishReason, Generation, GenerationId, Generator, SamplingParams

MARGIN = 1.2
"""Reserved for a generation's tokens, as a part of what those in flight hold on average."""
FIRST_GUESS_TOKENS = 2867
"""Reserved before turns have ended: SGLang's own first guess, 0.7 of at most 4096 (`schedule_policy.py`)."""
MIN_TURNS, MAX_TURNS = 16, 512
"""From how many ended turns on their lengths count, and how many of the latest are looked at."""
BLOCK_TOKENS = 128
"""Inputs are compared in blocks of so many."""


def admitted(generator: Generator, max_tokens: int | None) -> Generator:
    """`generator` with at most `max_tokens` in flight; itself where None says that there is no limit."""
    return generator if max_tokens is None else TokenAdmission(generator, max_tokens)


@dataclass(slots=True, kw_only=True, eq=False)
class _Ticket:
    """One generation, from its arrival to its end."""

    request_id: str
    blocks: tuple[int, ...]
    """A name for each whole block of its input, the same where everything up to the block's end is the same."""
    rest_tokens: int
    """Input tokens after the last whole block."""
    max_new_tokens: int
    new_tokens: int = 0
    """Reserved for what it samples; set when it is admitted."""
    admitted: bool = False
    handed_over: bool = False
    """Whether the engine knows it."""
    aborted: bool = False
    called: asyncio.Event = field(default_factory=asyncio.Event)
    """It has been admitted, or aborted."""


class TokenAdmission:
    """A `Generator` in front of another one."""

    def __init__(self, generator: Generator, max_tokens: int) -> None:
        """Keep the tokens in flight on `generator` at or below `max_tokens`."""
        self._generator = generator
        self._max_tokens = max_tokens
        self._expected = ExpectedTokens()
        self._waiting: collections.deque[_Ticket] = collections.deque()
        self._inside: dict[int, _Ticket] = {}
        self._blocks: collections.Counter[int] = collections.Counter()
        self._tokens = 0

    @property
    def tokens_in_flight(self) -> int:
        """Reserved at this moment: inputs, shared beginnings once, and expected tokens."""
        return self._tokens

    @property
    def num_waiting(self) -> int:
        """Generations that wait for room."""
        return len(self._waiting)

    async def generate(
        self, generation_id: GenerationId, input_ids: Sequence[int], params: SamplingParams
    ) -> Generation:
        """Sample one turn, once there is room for it."""
        ticket = _ticket(generation_id, input_ids, params)
        arrived_s = asyncio.get_running_loop().time()
        self._waiting.append(ticket)
        self._admit()
        try:
            if not ticket.called.is_set():  # which would let others run in between
                await ticket.called.wait()
            queue_s = asyncio.get_running_loop().time() - arrived_s
            if ticket.aborted:
                return Generation(token_ids=(), logprobs=(), finish_reason=FinishReason.ABORT, queue_s=queue_s)
            ticket.handed_over = True
            generation = await self._generator.generate(generation_id, input_ids, params)
            if generation.finish_reason is not FinishReason.ABORT:
                self._expected.note(len(generation.token_ids))
            return dataclasses.replace(generation, queue_s=queue_s)
        finally:
            self._leave(ticket)

    async def abort(self, request_id: str) -> None:
        """End what waits and what is in flight for one request."""
        for ticket in [*self._waiting, *self._inside.values()]:
            # One that was admitted a moment ago and has not run since is not known to the engine either.
            if ticket.request_id == request_id and not ticket.handed_over:
                ticket.aborted = True
                ticket.called.set()
        await self._generator.abort(request_id)

    async def serving(self, request_id: str) -> None:
        """The generator's."""
        await self._generator.serving(request_id)

    def _admit(self) -> None:
        """Let in whoever is first in the line while there is room."""
        while self._waiting:
            ticket = self._waiting[0]
            if not ticket.aborted:
                new_tokens = min(ticket.max_new_tokens, self._expected.tokens)
                needed = new_tokens + ticket.rest_tokens
                needed += BLOCK_TOKENS * sum(block not in self._blocks for block in ticket.blocks)
                if self._inside and self._tokens + needed > self._max_tokens:
                    return
                self._enter(ticket, new_tokens, needed)
            self._waiting.popleft()
            ticket.called.set()

    def _enter(self, ticket: _Ticket, new_tokens: int, needed: int) -> None:
        ticket.admitted, ticket.new_tokens = True, new_tokens
        self._tokens += needed
        self._blocks.update(ticket.blocks)
        self._inside[id(ticket)] = ticket

    def _leave(self, ticket: _Ticket) -> None:
        """Give back what was reserved, and the place in the line."""
        if ticket.admitted:
            del self._inside[id(ticket)]
            self._tokens -= ticket.new_tokens + ticket.rest_tokens
            for block in ticket.blocks:
                self._blocks[block] -= 1
                if not self._blocks[block]:
                    del self._blocks[block]
                    self._tokens -= BLOCK_TOKENS
        elif ticket in self._waiting:
            self._waiting.remove(ticket)
        self._admit()


class ExpectedTokens:
    """How many tokens to reserve for a generation, by the turns that ended lately."""

    def __init__(self) -> None:
        self._lengths: collections.deque[int] = collections.deque()
        self._sum = self._sum_of_squares = 0
        self.tokens = FIRST_GUESS_TOKENS
        """The present guess."""

    def note(self, tokens: int) -> None:
        """A turn has ended by itself after so many tokens."""
        self._count(tokens, 1)
        self._lengths.append(tokens)
        if len(self._lengths) > MAX_TURNS:
            self._count(self._lengths.popleft(), -1)
        if len(self._lengths) >= MIN_TURNS and self._sum:
            in_flight = max(self._sum / len(self._lengths), self._sum_of_squares / self._sum / 2)
            self.tokens = math.ceil(MARGIN * in_flight)

    def _count(self, tokens: int, times: int) -> None:
        self._sum += times * tokens
        self._sum_of_squares += times * tokens * tokens


def _ticket(generation_id: GenerationId, input_ids: Sequence[int], params: SamplingParams) -> _Ticket:
    blocks: list[int] = []
    name = 0
    for end in range(BLOCK_TOKENS, len(input_ids) + 1, BLOCK_TOKENS):
        name = hash((name, *input_ids[end - BLOCK_TOKENS : end]))
        blocks.append(name)
    return _Ticket(
        request_id=generation_id.request_id,
        blocks=tuple(blocks),
        rest_tokens=len(input_ids) - BLOCK_TOKENS * len(blocks),
        max_new_tokens=params.max_new_tokens or 0,
    )
