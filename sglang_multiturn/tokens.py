"""The token ledger: every token of a row, in order, with where it came from.

Append-only. What the engine sampled goes in as the engine's own ids and is never tokenised again; everything else is
appended under the origin it has. Mask, log-probabilities and weight versions are *derived* from the segments, so they
cannot have another length than the ids, and this is the only module that writes a mask.

    prompt | sampled (turn 0) | boundary | tool | boundary | sampled (turn 1) | ...
    mask:     1 1 1 ... 1        0 ... 0   0 .. 0   0 .. 0    1 1 ... 1

A conversation is one row, or several where `history: split` rendered it anew: each prompt segment starts a row
(`rows_of`). Ids and log-probabilities are kept once, in the segments, as 4 bytes each: log-probabilities are float32,
which is what engines compute and trainers train with, so an engine's own values are kept exactly.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import sys
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import PlainSerializer, PlainValidator

from sglang_multiturn.engine.base import FinishReason, Generation
from sglang_multiturn.errors import LedgerError

NOT_SAMPLED_LOGPROB = 0.0
"""What stands at positions that were not sampled; verl's convention too (`align_response_metadata`)."""


class Origin(StrEnum):
    """Where tokens came from."""

    PROMPT = "prompt"
    """The dataset row, rendered by the chat template."""
    SAMPLED = "sampled"
    """The engine's own ids; the only tokens that can be trained."""
    TOOL = "tool"
    """What a tool answered."""
    USER = "user"
    """What a user or an environment said."""
    BOUNDARY = "boundary"
    """What the template puts around all these, an end-of-turn token the model did not sample included."""


def _read(typecode: str, values: Any) -> Any:
    """Numbers of a file as an array; null is a log-probability that was no number. Raises ValueError."""
    try:
        return array(typecode, [math.nan if value is None else value for value in values])
    except (TypeError, OverflowError) as error:
        raise ValueError(f"a list of numbers is needed: {error}") from error


def _write_logprobs(values: Iterable[float]) -> list[float]:
    """Nine digits tell a float32 from its neighbours; its double would be written with seventeen."""
    return [float(f"{value:.9g}") for value in values]


if TYPE_CHECKING:
    TokenIds = array[int]
    Logprobs = array[float]
else:  # `array` cannot be subscripted at run time, and pydantic has to be told how to read one
    TokenIds = Annotated[array, PlainValidator(lambda ids: _read("i", ids)), PlainSerializer(list)]
    Logprobs = Annotated[array, PlainValidator(lambda values: _read("f", values)), PlainSerializer(_write_logprobs)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive tokens of one origin."""

    origin: Origin
    turn: int
    """The assistant turn (from 0) that sampled them or that they follow; 0 for the prompt."""
    ids: TokenIds
    logprobs: Logprobs | None = None
    """One a token (float32) for sampled ones when the engine kept them; None for every other origin."""
    weight_version: int | None = None
    min_weight_version: int | None = None
    """Set where the weights changed somewhere in these tokens: the oldest; `weight_version` is the newest."""
    call_id: str | None = None
    """The tool call these tokens answer."""

    def __post_init__(self) -> None:
        if self.logprobs is not None and len(self.logprobs) != len(self.ids):
            raise LedgerError(f"turn {self.turn}: {len(self.ids)} token ids but {len(self.logprobs)} log-probabilities")

    @property
    def oldest_weight_version(self) -> int | None:
        """Of all weights that may have sampled these tokens."""
        return self.weight_version if self.min_weight_version is None else self.min_weight_version

    def is_older_than(self, weight_version: int | None) -> bool:
        """Whether some of it may have been sampled by weights before `weight_version`; None is before all."""
        oldest = self.oldest_weight_version
        return weight_version is not None and oldest is not None and oldest < weight_version


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """What one generation was given and how it ended. A turn that was suspended has several, one after the other."""

    turn: int
    input_tokens: int
    """How many ids the engine was given."""
    input_digest: str
    """`digest_ids` of exactly the ids the engine was given."""
    sampled_tokens: int
    finish_reason: FinishReason
    weight_version: int | None = None
    attempt: int = 0


def digest_ids(ids: Iterable[int]) -> str:
    """A short digest of token ids, to compare what an engine saw with what a ledger holds."""
    digest = _digest()
    digest.update(array("i", ids))
    return digest.hexdigest()


def _digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=8)


class TokenLedger:
    """All tokens of one row. Shapes: every `response_*` list has `num_response_tokens` entries."""

    __slots__ = ("_prompt_tokens", "_segments", "_tokens", "_turns")

    def __init__(self, segments: Iterable[Segment] = (), turns: Iterable[TurnRecord] = ()) -> None:
        self._tokens = 0
        self._prompt_tokens = 0
        self._segments: list[Segment] = []
        self._turns: list[TurnRecord] = list(turns)
        for segment in segments:
            self._append(segment)

    # What may be appended

    def append_prompt(self, ids: Sequence[int]) -> None:
        """The rendered prompt; only while the ledger is empty."""
        if self._segments:
            raise LedgerError("the prompt comes first and once; this ledger already holds tokens")
        self._append(Segment(origin=Origin.PROMPT, turn=0, ids=array("i", ids)))

    def append_sampled(self, generation: Generation, *, turn: int, given: Sequence[int], attempt: int = 0) -> None:
        """One generation's tokens, and a record of the ids the engine was `given` for it."""
        logprobs = None if generation.logprobs is None else array("f", generation.logprobs)
        segment = Segment(
            origin=Origin.SAMPLED,
            turn=turn,
            ids=array("i", generation.token_ids),
            logprobs=logprobs,
            weight_version=generation.weight_version,
            min_weight_version=generation.min_weight_version,
        )
        record = TurnRecord(
            turn=turn,
            input_tokens=len(given),
            input_digest=digest_ids(given),
            sampled_tokens=len(segment.ids),
            finish_reason=generation.finish_reason,
            weight_version=generation.weight_version,
            attempt=attempt,
        )
        self._turns.append(record)
        self._append(segment)

    def append_observation(self, ids: Sequence[int], *, origin: Origin, turn: int, call_id: str | None = None) -> None:
        """Tokens nobody sampled: a tool's or user's words, or the template's boundary."""
        if origin in (Origin.PROMPT, Origin.SAMPLED):
            raise LedgerError(f"turn {turn}: an observation cannot have origin {origin.value!r}")
        if ids:
            self._append(Segment(origin=origin, turn=turn, ids=array("i", ids), call_id=call_id))

    def _append(self, segment: Segment) -> None:
        if segment.origin is Origin.PROMPT:
            self._prompt_tokens += len(segment.ids)
        self._segments.append(segment)
        self._tokens += len(segment.ids)

    # What is derived

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Everything, in order."""
        return tuple(self._segments)

    @property
    def turns(self) -> tuple[TurnRecord, ...]:
        """One record a generation, in order."""
        return tuple(self._turns)

    @property
    def input_ids(self) -> list[int]:
        """All tokens so far: what the next generation is given."""
        return _ids_of(self._segments)

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt's ids."""
        return _ids_of(segment for segment in self._segments if segment.origin is Origin.PROMPT)

    @property
    def response_ids(self) -> list[int]:
        """All ids after the prompt."""
        return _ids_of(self._response_segments())

    def response_mask(self, *, cleared: bool = False, stale_before: int | None = None) -> list[int]:
        """1 on sampled tokens, 0 elsewhere.

        Args:
            cleared: a policy cleared all of it.
            stale_before: 0 too on what weights older than this version sampled.
        """
        mask: list[int] = []
        for segment in self._response_segments():
            trained = segment.origin is Origin.SAMPLED and not cleared and not segment.is_older_than(stale_before)
            mask.extend([int(trained)] * len(segment.ids))
        return mask

    @property
    def response_logprobs(self) -> list[float] | None:
        """Log-probabilities, 0.0 where not sampled; None when the engine kept none for some sampled token."""
        values: list[float] = []
        for segment in self._response_segments():
            if segment.logprobs is not None:
                values.extend(segment.logprobs)
            elif segment.origin is Origin.SAMPLED and len(segment.ids):
                return None
            else:
                values.extend([NOT_SAMPLED_LOGPROB] * len(segment.ids))
        return values

    @property
    def response_weight_versions(self) -> list[int | None]:
        """Version of the weights that sampled each token; None where not sampled or not known."""
        return [segment.weight_version for segment in self._response_segments() for _ in segment.ids]

    @property
    def response_origins(self) -> list[Origin]:
        """Origin of each response token."""
        return [segment.origin for segment in self._response_segments() for _ in segment.ids]

    @property
    def num_tokens(self) -> int:
        """Prompt and response."""
        return self._tokens

    @property
    def num_prompt_tokens(self) -> int:
        """The prompt alone."""
        return self._prompt_tokens

    @property
    def num_response_tokens(self) -> int:
        """Everything after the prompt."""
        return self._tokens - self._prompt_tokens

    @property
    def num_sampled_tokens(self) -> int:
        """What the model itself produced."""
        return sum(len(segment.ids) for segment in self._segments if segment.origin is Origin.SAMPLED)

    @property
    def num_tokens_to_last_sampled(self) -> int:
        """Response tokens up to and with the last sampled one: where a training row ends."""
        end = position = 0
        for segment in self._response_segments():
            position += len(segment.ids)
            if segment.origin is Origin.SAMPLED and len(segment.ids):
                end = position
        return end

    @property
    def oldest_weight_version(self) -> int | None:
        """Of all weights that sampled for this row; None where none is known."""
        versions = [segment.oldest_weight_version for segment in self._segments if len(segment.ids)]
        return min((version for version in versions if version is not None), default=None)

    def has_turn(self, turn: int) -> bool:
        """Whether something of this turn was sampled here already."""
        return bool(self._turns) and self._turns[-1].turn == turn

    def turn_end(self, turn: int) -> int | None:
        """Response index of the last token sampled in `turn`; None when it sampled none."""
        end, position = None, 0
        for segment in self._response_segments():
            position += len(segment.ids)
            if segment.origin is Origin.SAMPLED and segment.turn == turn and len(segment.ids):
                end = position - 1
        return end

    @property
    def last_sampled_id(self) -> int | None:
        """The very last token when it was sampled; None when something else follows or nothing was sampled."""
        last = self._segments[-1] if self._segments else None
        sampled = last is not None and last.origin is Origin.SAMPLED and len(last.ids) > 0
        return last.ids[-1] if last is not None and sampled else None

    def _response_segments(self) -> Iterator[Segment]:
        return (segment for segment in self._segments if segment.origin is not Origin.PROMPT)

    def check(self, *, end_ids: Collection[int] | None = None) -> None:
        """Prove that this ledger is what the engine saw and said: invariants 1 to 3 of docs/architecture.md, and 4.

        Args:
            end_ids: the template's own ends of a turn (`ChatTemplate.end_ids`); None leaves invariant 4 out.

        Raises:
            LedgerError: naming the turn and what disagrees.
        """
        if any(segment.origin is Origin.PROMPT for segment in self._segments[1:]):
            raise LedgerError("a prompt segment stands after the start")
        self._check_turns()
        if end_ids is not None:
            self._check_ends(end_ids)
        sizes = {len(self.response_ids), len(self.response_mask()), len(self.response_weight_versions)}
        if (logprobs := self.response_logprobs) is not None:
            sizes.add(len(logprobs))
        if len(sizes) != 1:
            raise LedgerError(f"ids, mask, log-probabilities and versions have different lengths: {sorted(sizes)}")

    def _check_turns(self) -> None:
        """What each generation was given is what stands before it, and what it sampled is what stands here."""
        sampled = sum(segment.origin is Origin.SAMPLED for segment in self._segments)
        if sampled != len(self._turns):
            raise LedgerError(f"{len(self._turns)} generations were recorded but {sampled} sampled segments stand")
        records = iter(self._turns)
        before, seen, last = 0, _digest(), self._segments[0] if self._segments else None
        for segment in self._segments:
            if segment.origin is Origin.SAMPLED:
                record = next(records)
                if last is not None and last.origin is Origin.SAMPLED and last.turn != segment.turn:
                    raise LedgerError(f"turn {segment.turn}: nothing stands between it and turn {last.turn}")
                if record.input_tokens != before or record.input_digest != seen.hexdigest():
                    raise LedgerError(f"turn {record.turn}: the engine was not given the tokens that stand before it")
                if record.sampled_tokens != len(segment.ids) or record.turn != segment.turn:
                    raise LedgerError(f"turn {record.turn}: the sampled segment is not the one that was recorded")
            before, last = before + len(segment.ids), segment
            seen.update(segment.ids)

    def _check_ends(self, end_ids: Collection[int]) -> None:
        """A sampled turn that something follows has an end of the template's, once, whoever said it."""
        for segment, following in itertools.pairwise(self._segments):
            if segment.origin is not Origin.SAMPLED:
                continue
            if following.origin is Origin.SAMPLED:
                continue  # one turn in two generations: it had not ended there
            last = segment.ids[-1] if len(segment.ids) else None
            first = following.ids[0] if following.origin is Origin.BOUNDARY else None
            if last in end_ids and last == first:
                raise LedgerError(f"turn {segment.turn}: the end-of-turn id {last} stands twice")
            if last not in end_ids and first not in end_ids:
                raise LedgerError(
                    f"turn {segment.turn}: an end-of-turn id {sorted(end_ids)} stands nowhere, "
                    f"neither as its last id {last} nor as the first that follows, {first}"
                )


def rows_of(segments: Iterable[Segment], turns: Iterable[TurnRecord]) -> tuple[TokenLedger, ...]:
    """The rows of a whole conversation, at least one: each prompt starts one, and turns go with what they sampled."""
    rows: list[list[Segment]] = [[]]
    for segment in segments:
        if segment.origin is Origin.PROMPT and rows[-1]:
            rows.append([])
        rows[-1].append(segment)
    records = iter(turns)
    sampled = [sum(segment.origin is Origin.SAMPLED for segment in row) for row in rows]
    sampled[-1] = sys.maxsize  # a record too many stays, to be found by `check`
    return tuple(TokenLedger(row, itertools.islice(records, n)) for row, n in zip(rows, sampled, strict=True))


def _ids_of(segments: Iterable[Segment]) -> list[int]:
    ids = array("i")
    for segment in segments:
        ids.extend(segment.ids)
    return ids.tolist()
