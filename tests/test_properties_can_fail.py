"""The property finds what it is there to find: each fault is put in, and random conversations show it."""

from __future__ import annotations

import dataclasses
import functools
import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("transformers")

from conversations.choices import SIZE
from conversations.evidence import InvariantError
from conversations.invariants import check_conversation
from conversations.worlds import World

from sglang_multiturn import HFChatTemplate, Message, TokenLedger, Trajectory
from sglang_multiturn.chat.encoding import PlainToken
from sglang_multiturn.chat.template import DeltaPiece
from sglang_multiturn.conversation.history import History
from sglang_multiturn.engine.base import Generation
from sglang_multiturn.tokens import Origin

from families import tokenizer

ENOUGH = 400
FAMILY = "tiny"
Delta = list[DeltaPiece]


def is_found(violation: str, template: type[HFChatTemplate] = HFChatTemplate) -> bool:
    """Whether one of many random conversations shows this violation."""
    world, bytes_of = World(FAMILY, template), random.Random(0)
    return any(shown.startswith(violation) for shown in (shown_by(bytes_of, world) for _ in range(ENOUGH)))


def shown_by(bytes_of: random.Random, world: World) -> str:
    """What the next conversation violates."""
    try:
        check_conversation(bytes_of.randbytes(SIZE), world)
    except InvariantError as violation:
        return str(violation)
    return "nothing"


def test_without_a_fault_nothing_is_found() -> None:
    world, bytes_of = World(FAMILY), random.Random(0)
    assert {shown_by(bytes_of, world) for _ in range(ENOUGH)} == {"nothing"}


class AddsNoEnd(HFChatTemplate):
    def encode_delta(self, messages: Sequence[Message], **known: Any) -> Delta:
        first, *rest = super().encode_delta(messages, **known)
        if first.ids[0] in self.end_ids:
            first = dataclasses.replace(first, ids=first.ids[1:])
        return [first, *rest]


class AddsAnEndToAnEnd(HFChatTemplate):
    def encode_delta(self, messages: Sequence[Message], **known: Any) -> Delta:
        return super().encode_delta(messages, **{**known, "last_id": None})


class SaysABlankTooMuch(HFChatTemplate):
    def encode_delta(self, messages: Sequence[Message], **known: Any) -> Delta:
        *pieces, last = super().encode_delta(messages, **known)
        return [*pieces, dataclasses.replace(last, ids=[*last.ids, *self.encode_text(" ")])]


class LosesWords(HFChatTemplate):
    def encode_delta(self, messages: Sequence[Message], **known: Any) -> Delta:
        pieces = super().encode_delta(messages, **known)
        return [p if p.message_index is None else dataclasses.replace(p, ids=p.ids[:-1]) for p in pieces]


class ForgetsToolsInPrompts(HFChatTemplate):
    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        return super().encode_prompt(messages, ())


class CutsPrompts(HFChatTemplate):
    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        return super().encode_prompt(messages, tools)[-40:]


class FindsControlTokensInWords(HFChatTemplate):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.encoder.encode_plain = self._as_a_rendering  # type: ignore[method-assign]

    def _as_a_rendering(self, text: str, *, at_start: bool = False) -> list[PlainToken]:
        return [PlainToken(token.id, token.start, token.end) for token in self.encoder._rendering.encode(text)]


class TakesNothingApart(HFChatTemplate):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.encoder.take_apart = lambda text, mark: text  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (AddsNoEnd, "4: turn"),
        (AddsAnEndToAnEnd, "4 and 13: turn"),
        (SaysABlankTooMuch, "1 to 4: turn"),
        (LosesWords, "13: turn"),
        (ForgetsToolsInPrompts, "1: the prompt is not what the tokenizer makes of it"),
        (CutsPrompts, "1: the prompt is not what the tokenizer makes of it"),
        (FindsControlTokensInWords, "13: what a"),
        (TakesNothingApart, "13: a prompt has the control tokens"),
    ],
)
def test_a_template_at_fault_is_found(template: type[HFChatTemplate], found: str) -> None:
    assert is_found(found, template)


def test_a_shifted_mask_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TokenLedger.response_mask
    monkeypatch.setattr(TokenLedger, "response_mask", lambda ledger, **how: [0, *right(ledger, **how)][:-1])
    assert is_found("1: mask")


def test_sampled_ids_that_are_tokenised_again_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right, tokens = TokenLedger.append_sampled, tokenizer(FAMILY)

    def again(ledger: TokenLedger, generation: Generation, **known: Any) -> None:
        ids = tokens.encode(tokens.decode(generation.token_ids), add_special_tokens=False)
        logprobs = generation.logprobs and [*generation.logprobs, *[0.0] * len(ids)][: len(ids)]
        right(ledger, dataclasses.replace(generation, token_ids=ids, logprobs=logprobs), **known)

    monkeypatch.setattr(TokenLedger, "append_sampled", again)
    assert is_found("1: turn")


def test_an_end_that_loses_its_logprob_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TokenLedger.append_sampled

    def forgetting(ledger: TokenLedger, generation: Generation, **known: Any) -> None:
        logprobs = generation.logprobs and [*generation.logprobs[:-1], 0.0]
        right(ledger, dataclasses.replace(generation, logprobs=logprobs), **known)

    monkeypatch.setattr(TokenLedger, "append_sampled", forgetting)
    assert is_found("3: log-probabilities")


def test_versions_of_another_turn_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TokenLedger.append_sampled

    def older(ledger: TokenLedger, generation: Generation, **known: Any) -> None:
        right(ledger, dataclasses.replace(generation, weight_version=1), **known)

    monkeypatch.setattr(TokenLedger, "append_sampled", older)
    assert is_found("3: weight versions")


def test_a_turn_that_is_given_other_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def lossy(ledger: TokenLedger) -> list[int]:
        ids = array("i")
        for segment in ledger.segments:
            whole = segment.origin is Origin.PROMPT or segment is ledger.segments[-1]
            ids.extend(segment.ids if whole else segment.ids[-3:])
        return ids.tolist()

    monkeypatch.setattr(TokenLedger, "input_ids", property(lossy))
    assert is_found("2: turn")


@pytest.mark.parametrize("off", [1, -1])
def test_a_budget_that_is_off_by_one_is_found(monkeypatch: pytest.MonkeyPatch, off: int) -> None:
    right = History.max_turn_tokens
    assert isinstance(right, property)
    assert right.fget is not None
    left = right.fget
    monkeypatch.setattr(History, "max_turn_tokens", property(lambda history: left(history) + off))
    assert is_found("7: turn")


def test_a_cut_that_is_not_marked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def unmarked(text: str, template: HFChatTemplate, *, max_tokens: int, side: str) -> str | None:
        return text[: 2 * max_tokens] if len(template.encode_text(text)) > max_tokens else None

    monkeypatch.setattr("sglang_multiturn.conversation.answers.cut_text", unmarked)
    assert is_found("7: an answer was changed without a mark")


def test_answers_out_of_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = History.observe

    def reordered(history: History, messages: Sequence[Message], *, turn: int, call_ids: Sequence[str | None]) -> Any:
        return right(history, list(messages)[::-1], turn=turn, call_ids=list(call_ids)[::-1])

    monkeypatch.setattr(History, "observe", reordered)
    assert is_found("5: answers")


def test_a_row_cut_in_the_wrong_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TokenLedger.num_tokens_to_last_sampled
    assert isinstance(right, property)
    assert right.fget is not None
    end = right.fget
    monkeypatch.setattr(TokenLedger, "num_tokens_to_last_sampled", property(lambda ledger: max(0, end(ledger) - 1)))
    assert is_found("3: a row is cut at")


def test_what_a_trajectory_loses_in_json_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Trajectory.from_json
    lossy = functools.partial(dataclasses.replace, tool_calls=(), messages=())
    monkeypatch.setattr(Trajectory, "from_json", lambda line: lossy(right(line)))
    assert is_found("5: JSON")
