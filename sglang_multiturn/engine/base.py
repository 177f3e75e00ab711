"""The seam between conversations and whatever generates tokens.

A conversation needs a `Generator`: generate and abort. A standalone run also needs lifetime, weights and pausing:
an `Engine`. verl keeps those for itself, so its side of the seam is a `Generator` only.

Log-probabilities are those of the temperature-scaled, untruncated distribution (SGLang's convention:
`srt/layers/sampler.py` takes them after the temperature and before top_p, top_k and min_p).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, Self, runtime_checkable

from sglang_multiturn.errors import InvalidRequestError

if TYPE_CHECKING:
    import numpy as np

PauseMode = Literal["abort", "retract", "in_place"]
"""What happens to running generations when the engine pauses: ended with `abort`, put back to the queue, or frozen."""


class FinishReason(StrEnum):
    """Why one generation ended."""

    STOP = "stop"
    """An end-of-turn id or a stop string was sampled."""
    LENGTH = "length"
    """`max_new_tokens` or the model's context was used up."""
    ABORT = "abort"
    """It was aborted; the tokens sampled so far are kept."""


class GenerationId(NamedTuple):
    """Names one generation of one conversation."""

    request_id: str
    turn: int
    attempt: int = 0

    @property
    def rid(self) -> str:
        """The id the engine sees: unique for every attempt, and readable in its logs."""
        return f"{self.request_id}:t{self.turn}:a{self.attempt}"

    @classmethod
    def of_rid(cls, rid: str) -> GenerationId:
        """The id that has this `rid`. Raises ValueError: there is none."""
        request_id, turn, attempt = rid.rsplit(":", 2)
        return cls(request_id, int(turn.removeprefix("t")), int(attempt.removeprefix("a")))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one turn is decoded. Immutable, so that no two requests can ever share a changing one."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 is off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None
    """Set by the rollout from what is left of the budget; an engine refuses None and anything below 1."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    @property
    def truncates(self) -> bool:
        """Whether sampling leaves the distribution whose log-probabilities are reported."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0 or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What one generation sampled."""

    token_ids: Sequence[int]
    """The engine's own ids, the end-of-turn id included when it was sampled."""
    logprobs: Sequence[float] | None
    """One a token; None when the engine was told not to keep them."""
    finish_reason: FinishReason
    weight_version: int | None = None
    """Version of the weights that sampled the tokens; None when the engine does not say."""
    min_weight_version: int | None = None
    """Set where weights changed in the middle and nobody can say at which token: the oldest; `weight_version` is the newest."""
    paused: bool = False
    """Aborted because the whole engine was paused, for no reason of this request's: asked again, it goes on."""
    cached_tokens: int = 0
    """How many input tokens came out of the prefix cache."""
    queue_s: float = 0.0
    """How long it was held back before the engine saw it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What a started engine says of itself."""

    name: str
    vocab_size: int
    max_model_len: int
    kv_capacity_tokens: int | None = None
    """Tokens whose keys and values it can hold at once; None where it does not say."""
    device: str = "cpu"
    notice: str | None = None
    """One line a user should see, such as what stands in for a GPU."""


@runtime_checkable
class Generator(Protocol):
    """All a conversation asks of an engine."""

    async def generate(
        self, generation_id: GenerationId, input_ids: Sequence[int], params: SamplingParams
    ) -> Generation:
        """Sample one turn.

        Raises:
            InvalidRequestError: the ids or parameters must not reach the engine.
            EngineDiedError: the engine went away.
            EngineError: anything else the engine refused.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End what is in flight for one request; its `generate` returns with finish_reason `abort`."""
        ...

    async def serving(self, request_id: str) -> None:
        """Return when the next generation of this request need not wait for the end of a pause; at once without a pause."""
        ...


@runtime_checkable
class Engine(Generator, Protocol):
    """A generator with a lifetime, weights and a pause button."""

    @property
    def info(self) -> EngineInfo:
        """What the engine is; only after `start`."""
        ...

    @property
    def weight_version(self) -> int:
        """Version of the weights now serving; 0 for those it was started with."""
        ...

    async def start(self) -> None:
        """Bring it up. Raises EngineStartError."""
        ...

    async def close(self) -> None:
        """Shut it down and free everything; safe to call twice."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...

    async def abort_all(self) -> None:
        """End everything in flight."""
        ...

    async def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Stop sampling; new generations wait until `continue_generation`."""
        ...

    async def continue_generation(self) -> None:
        """Sample again."""
        ...

    async def flush_cache(self) -> None:
        """Forget all cached prefixes."""
        ...

    async def update_weights(self, named_tensors: Iterable[tuple[str, np.ndarray]], *, weight_version: int) -> None:
        """Replace weights by name. Raises WeightUpdateError; the old weights then still serve."""
        ...

    async def update_weights_from_disk(self, model_path: str, *, weight_version: int) -> None:
        """Replace all weights by those of a Hugging Face folder. Raises WeightUpdateError."""
        ...


def check_generation(
    generation_id: GenerationId,
    input_ids: Sequence[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    max_model_len: int,
) -> None:
    """Refuse what would harm an engine: SGLang 0.5.14 kills its process tree on an id outside the vocabulary.

    Raises:
        InvalidRequestError: naming the generation, the value and what is allowed.
    """
    rid = generation_id.rid
    if not input_ids:
        raise InvalidRequestError(f"generation {rid}: input_ids is empty; at least one token is needed")
    low, high = min(input_ids), max(input_ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise InvalidRequestError(
            f"generation {rid}: token id {bad} is outside the vocabulary (0 to {vocab_size - 1}); "
            "does the tokenizer belong to this model?"
        )
    if params.max_new_tokens is None or params.max_new_tokens < 1:
        raise InvalidRequestError(f"generation {rid}: max_new_tokens must be at least 1, got {params.max_new_tokens}")
    if len(input_ids) + params.max_new_tokens > max_model_len:
        raise InvalidRequestError(
            f"generation {rid}: {len(input_ids)} input tokens and {params.max_new_tokens} new ones exceed "
            f"max_model_len {max_model_len}"
        )
