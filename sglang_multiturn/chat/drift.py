"""Whether a row's tokens are those its chat template renders of the same messages.

At run time a conversation is rendered once and grows by deltas. Here it is rendered whole, and the two are compared:
what the model sampled may be spelt otherwise (splits no tokenizer would choose, JSON without spaces), everything the
template, a tool or a user put around it may not. The final assistant turn takes no part: nothing follows it yet.

    tokens:     prompt | sampled | boundary tool boundary | sampled | boundary tool boundary
    rendering:  ====== | ~~~~~~~ | ====================== | ~~~~~~~ | ======================   ~ may be spelt otherwise

What was not sampled is looked for in the rendering, stretch by stretch; what lies between is cut at control tokens and
compared piece by piece. The cost is linear in the tokens but for small pieces that differ in their control tokens.
"""

from __future__ import annotations

import bisect
import difflib
import functools
import itertools
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from sglang_multiturn.chat.reasoning import MARKS
from sglang_multiturn.chat.template import ChatTemplate
from sglang_multiturn.tokens import Origin, TokenLedger

logger = logging.getLogger(__name__)

_MOST_LOOSE = 4
"""How many control tokens of a generation prompt history may not show."""
_MOST_PAIRS = 250_000
"""`difflib` compares pieces up to this product of lengths; it is quadratic, and model output is hostile."""
_SHOWN_AROUND, _SHOWN_AT_MOST = 8, 40
"""Tokens of an example: before and after the difference, and of the difference itself."""


class DriftKind(StrEnum):
    """How tokens differ from their rendering."""

    SAMPLED_TEXT = "sampled_text"
    """The model spelt its words otherwise than the template would; allowed."""
    OTHER_END = "other_end"
    """The model ended its turn with another stop id than the template's, which was added; allowed."""
    HISTORY = "history"
    """The template renders earlier turns otherwise once something follows (what `history: keep` keeps), or thoughts in
    its own way: empty ones left out, open ones closed; allowed."""
    NOT_COMPARABLE = "not_comparable"
    """The template refuses the messages, or a broken call stands in the tokens and in no message."""
    SPECIAL_TOKEN = "special_token"
    """Control tokens differ: drift."""
    BOUNDARY = "boundary"
    """What the template, a tool or a user put there differs: drift."""


DRIFT = frozenset({DriftKind.SPECIAL_TOKEN, DriftKind.BOUNDARY})
"""The kinds that should never be seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftExample:
    """One difference, with the text around it."""

    kind: DriftKind
    turn: int
    """The assistant turn it stands in or after."""
    position: int
    """Of its first token in the row."""
    tokens: str
    """What the row holds."""
    rendering: str
    """What the template renders."""

    def __str__(self) -> str:
        return (
            f"{self.kind} in turn {self.turn} at token {self.position}: "
            f"{self.tokens!r} where the template renders {self.rendering!r}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftReport:
    """How much of a row differs, and one example of each kind."""

    tokens: Mapping[DriftKind, int] = field(default_factory=dict)
    """Tokens that differ, by kind: those of the row or those of the rendering, whichever are more."""
    examples: tuple[DriftExample, ...] = ()

    @property
    def drift(self) -> DriftExample | None:
        """The first example of what should never be seen."""
        return next((example for example in self.examples if example.kind in DRIFT), None)


class DriftLog:
    """One for many conversations: warns of the 1st, 2nd, 4th, 8th, ... that drifted in a kind."""

    def __init__(self) -> None:
        self._seen: Counter[DriftKind] = Counter()

    def note(self, request_id: str, report: DriftReport) -> None:
        """Count a conversation's drift, and say so when its turn has come."""
        for example in (example for example in report.examples if example.kind in DRIFT):
            self._seen[example.kind] += 1
            if (count := self._seen[example.kind]) & (count - 1) == 0:
                logger.warning("%d conversations drifted; request %s: %s", count, request_id, example)


def compared_tokens(ledger: TokenLedger) -> int:
    """How many of a row's tokens have a rendering: all up to the last that was not sampled."""
    ends = itertools.accumulate(len(segment.ids) for segment in ledger.segments)
    given = [end for end, segment in zip(ends, ledger.segments, strict=True) if segment.origin is not Origin.SAMPLED]
    return given[-1] if given else 0


def compare(
    ledger: TokenLedger,
    canonical_ids: Sequence[int],
    template: ChatTemplate,
    *,
    history_kept: bool = True,
    broken_turns: Collection[int] = (),
) -> DriftReport:
    """Compare a row with the rendering of its messages.

    Args:
        ledger: the row.
        canonical_ids: `encode_prompt` of the messages up to the last one that was appended to the row.
        template: tells control tokens and ends, and decodes the examples.
        history_kept: `keeps_history` of every role that was appended.
        broken_turns: turns with a broken call, which no message holds.
    """
    return _Comparison(ledger, canonical_ids, template, history_kept, frozenset(broken_turns)).report()


def refused(ledger: TokenLedger, reason: str) -> DriftReport:
    """The report of a row whose messages the template does not render."""
    tokens = compared_tokens(ledger) - ledger.num_prompt_tokens
    example = DriftExample(
        kind=DriftKind.NOT_COMPARABLE, turn=0, position=ledger.num_prompt_tokens, tokens="", rendering=reason
    )
    return DriftReport(tokens={DriftKind.NOT_COMPARABLE: tokens}, examples=(example,))


class _Part(NamedTuple):
    """A segment's place among the compared tokens, and where they came from."""

    start: int
    position: int
    """Of its first token in the row."""
    turn: int
    origin: Origin


class _Difference(NamedTuple):
    """Tokens `[start, end)` of the row and `[other_start, other_end)` of the rendering that differ."""

    start: int
    end: int
    other_start: int
    other_end: int


class _Comparison:
    """One row against one rendering. Ids are compared as characters: strings are searched fast."""

    def __init__(
        self,
        ledger: TokenLedger,
        canonical_ids: Sequence[int],
        template: ChatTemplate,
        history_kept: bool,
        broken_turns: frozenset[int],
    ) -> None:
        self._template = template
        self._history_kept = history_kept
        self._broken_turns = broken_turns
        self._ends = {*template.end_ids, *template.stop_token_ids}
        self._controls = _any_of(template.control_ids)
        self._counts: Counter[DriftKind] = Counter()
        self._examples: dict[DriftKind, DriftExample] = {}
        self._loose: set[int] = set()
        self._other = _characters(canonical_ids)
        self._parts: list[_Part] = []
        self._runs: list[tuple[int, int]] = []
        """Stretches that were not sampled: they should stand in the rendering as they are."""
        self._said: list[int] = []
        """Where the model spoke; nothing stands there when it sampled nothing."""
        self._text = self._read(ledger)

    def report(self) -> DriftReport:
        if self._text != self._other:
            for stretch in self._stretches():
                for difference in self._differences(stretch):
                    self._note(self._kind(difference), difference)
        return DriftReport(tokens=dict(self._counts), examples=tuple(self._examples.values()))

    def _read(self, ledger: TokenLedger) -> str:
        """The row up to its last given token, without the model's own ends beside which the template's was added."""
        last = compared_tokens(ledger)
        parts: list[str] = []
        position = kept = 0
        for segment, following in itertools.pairwise([*ledger.segments, None]):
            if segment is None or position >= last:
                break
            ids = segment.ids
            sampled = segment.origin is Origin.SAMPLED
            if sampled and following is not None and self._is_other_end(ids, following.ids):
                ids = ids[:-1]
                self._note_other_end(segment.turn, position + len(ids), segment.ids[-1])
            if len(ids):
                self._parts.append(_Part(kept, position, segment.turn, segment.origin))
            if sampled:
                self._said.append(kept)
            elif self._runs and self._runs[-1][1] == kept and kept not in self._said[-1:]:
                self._runs[-1] = (self._runs[-1][0], kept + len(ids))
            else:
                self._runs.append((kept, kept + len(ids)))
            parts.append(_characters(ids))
            kept += len(ids)
            position += len(segment.ids)
        return "".join(parts)

    def _is_other_end(self, ids: Sequence[int], following: Sequence[int]) -> bool:
        if not len(ids) or not len(following):
            return False
        return ids[-1] in self._ends and following[0] in self._template.end_ids and ids[-1] != following[0]

    def _note_other_end(self, turn: int, position: int, end_id: int) -> None:
        self._counts[DriftKind.OTHER_END] += 1
        example = DriftExample(
            kind=DriftKind.OTHER_END, turn=turn, position=position, tokens=self._decode([end_id]), rendering=""
        )
        self._examples.setdefault(DriftKind.OTHER_END, example)

    def _stretches(self) -> Iterator[_Difference]:
        """What lies between the runs that stand in the rendering, and the runs that do not."""
        start = other_start = 0
        for run_start, run_end in self._runs:
            # The shortest is looked for: what is whole further on may be a later turn that was answered alike.
            ends = list(self._less_and_less(run_start, run_end))
            found = self._other.find(self._text[run_start : ends[-1]], other_start)
            if found >= 0:
                yield _Difference(start, run_start, other_start, found)
                end = next(end for end in ends if self._other.startswith(self._text[run_start:end], found))
                self._loose.update(range(end, run_end))
                start, other_start = end, found + end - run_start
        yield _Difference(start, len(self._text), other_start, len(self._other))

    def _less_and_less(self, start: int, end: int) -> Iterator[int]:
        """Ends of a run: whole, then without more and more of the generation prompt, which history may not show."""
        yield end
        prompt = _without_space(self._template.generation_prompt)
        controls = [match.start() for match in self._controls.finditer(self._text, start + 1, end)]
        for control in reversed(controls[-_MOST_LOOSE:]):
            left_out = _without_space(self._decode([ord(character) for character in self._text[control:end]]))
            if not prompt.endswith(left_out):
                return
            yield control

    def _differences(self, stretch: _Difference) -> Iterator[_Difference]:
        start, end, other_start, other_end = self._trimmed(stretch)
        if start == end and other_start == other_end:
            return
        pieces, other_pieces = self._pieces(self._text, start, end), self._pieces(self._other, other_start, other_end)
        if self._controls_of(self._text, start, end) == self._controls_of(self._other, other_start, other_end):
            for (a, b), (c, d) in zip(pieces, other_pieces, strict=True):
                smaller = self._trimmed(_Difference(a, b, c, d))
                if smaller.start < smaller.end or smaller.other_start < smaller.other_end:
                    yield smaller
        elif (end - start) * (other_end - other_start) > _MOST_PAIRS:
            yield _Difference(start, end, other_start, other_end)
        else:
            matcher = difflib.SequenceMatcher(
                None, self._text[start:end], self._other[other_start:other_end], autojunk=False
            )
            for tag, a, b, c, d in matcher.get_opcodes():
                if tag != "equal":
                    yield _Difference(start + a, start + b, other_start + c, other_start + d)

    def _trimmed(self, part: _Difference) -> _Difference:
        """Without what both begin and end with."""
        start, end, other_start, other_end = part
        while start < end and other_start < other_end and self._text[start] == self._other[other_start]:
            start, other_start = start + 1, other_start + 1
        while start < end and other_start < other_end and self._text[end - 1] == self._other[other_end - 1]:
            end, other_end = end - 1, other_end - 1
        return _Difference(start, end, other_start, other_end)

    def _pieces(self, text: str, start: int, end: int) -> list[tuple[int, int]]:
        """A stretch cut before each control token; the first piece begins with none and may be empty."""
        cuts = [start, *(match.start() for match in self._controls.finditer(text, start, end)), end]
        return list(itertools.pairwise(cuts))

    def _controls_of(self, text: str, start: int, end: int) -> list[str]:
        return self._controls.findall(text, start, end)

    def _kind(self, difference: _Difference) -> DriftKind:
        start, end, other_start, other_end = difference
        if self._part_at(start).turn in self._broken_turns:
            return DriftKind.NOT_COMPARABLE
        own, rendered = (
            self._controls_of(self._text, start, end),
            self._controls_of(self._other, other_start, other_end),
        )
        same_controls = own == rendered
        models = self._is_the_models(start, end)
        if models and not same_controls and self._without_thoughts(own) == self._without_thoughts(rendered):
            return DriftKind.HISTORY  # empty thoughts left out, open ones closed: the template's own way with them
        if not self._history_kept and (self._may_change(start, end) or (start == end and not same_controls) or models):
            spelt = same_controls and start < end and other_start < other_end and models
            return DriftKind.SAMPLED_TEXT if spelt else DriftKind.HISTORY
        if not same_controls:
            return DriftKind.SPECIAL_TOKEN
        return DriftKind.SAMPLED_TEXT if models else DriftKind.BOUNDARY

    def _without_thoughts(self, controls: list[str]) -> list[str]:
        marks = {control for control in set(controls) if self._marks_thoughts(self._decode([ord(control)]).strip())}
        return [control for control in controls if control not in marks]

    @staticmethod
    def _marks_thoughts(text: str) -> bool:
        return text != "" and any(mark.startswith(text) for marks in MARKS for mark in marks)

    def _may_change(self, start: int, end: int) -> bool:
        """Whether a template that does not keep history may render these otherwise: turns and prompt, not answers."""
        changing = (Origin.PROMPT, Origin.SAMPLED)
        return start < end and all(self._part_at(i).origin in changing or i in self._loose for i in range(start, end))

    def _is_the_models(self, start: int, end: int) -> bool:
        """Whether a difference lies in what the model said, or in a generation prompt that tokens merge with."""
        if start < end:
            return all(self._part_at(i).origin is Origin.SAMPLED or i in self._loose for i in range(start, end))
        if start in self._said:
            return True
        if start and self._part_at(start - 1).origin is Origin.SAMPLED:
            return ord(self._text[start - 1]) not in self._ends
        return start < len(self._text) and self._part_at(start).origin is Origin.SAMPLED

    def _part_at(self, index: int) -> _Part:
        """The part that holds a token; beyond the last one, the last."""
        return self._parts[bisect.bisect_right(self._parts, index, key=lambda part: part.start) - 1]

    def _note(self, kind: DriftKind, difference: _Difference) -> None:
        start, end, other_start, other_end = difference
        self._counts[kind] += max(end - start, other_end - other_start)
        if kind not in self._examples:
            part = self._part_at(start)
            self._examples[kind] = DriftExample(
                kind=kind,
                turn=part.turn,
                position=part.position + start - part.start,
                tokens=self._around(self._text, start, end),
                rendering=self._around(self._other, other_start, other_end),
            )

    def _around(self, text: str, start: int, end: int) -> str:
        shown = text[max(0, start - _SHOWN_AROUND) : min(end, start + _SHOWN_AT_MOST) + _SHOWN_AROUND]
        return self._decode([ord(character) for character in shown])

    def _decode(self, ids: list[int]) -> str:
        # `decode` leaves a final end out: it is given one to leave out.
        return self._template.decode([*ids, self._template.stop_token_ids[0]])


def _without_space(text: str) -> str:
    return "".join(text.split())


def _characters(ids: Iterable[int]) -> str:
    return "".join(map(chr, ids))


@functools.lru_cache(maxsize=32)
def _any_of(control_ids: frozenset[int]) -> re.Pattern[str]:
    return re.compile(f"[{re.escape(_characters(sorted(control_ids)))}]" if control_ids else r"(?!)")
