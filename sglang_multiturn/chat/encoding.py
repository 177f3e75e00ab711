"""Text to ids with control tokens in hand: which ids structure a conversation, and plain text that never becomes one.

A tokenizer looks for its added tokens in any text it is given. Here every piece of text is either a *rendering*, in
which they are found as the tokenizer finds them, or *plain*, in which they are not looked for at all: plain text goes
through a second tokenizer on the same vocabulary that knows none of them. So a tool that prints `<|im_end|>` is
encoded as the characters of that word.

Text that stands right after a control token is not encoded like text at the start (SentencePiece vocabularies put a
space there). Plain text is therefore encoded behind an anchor, a control token of our own that is taken off again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from sglang_multiturn.errors import TemplateError

_ANCHOR = "\ue0fe\ue0ffanchor\ue0ff"
_MARK = re.compile(r"[<>\[\]{}|｜]")
_HTML = re.compile(
    "</?(?:a|b|blockquote|body|br|caption|code|div|em|h[1-6]|hr|html|i|img|li|ol|p|pre|s|span|strong|sub|sup"
    "|table|tbody|td|tfoot|th|thead|tr|u|ul)>"
)
_MARKS = [chr(code) for code in range(0xE100, 0xE120)]


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A token that structures conversations, as the tokenizer declares it."""

    id: int
    text: str
    special: bool
    strips_left: bool
    """White space before it belongs to it."""
    strips_right: bool
    """White space after it belongs to it (Phi-3)."""


class PlainToken(NamedTuple):
    """A token of plain text and the characters `[start, end)` it stands for."""

    id: int
    start: int
    end: int


class TextEncoder:
    """Encodes for one fast tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        # Tokenizers of our own on the same model: transformers keeps truncation and padding of its last call in its own.
        added = tokenizer.added_tokens_decoder
        source = str(tokenizer.chat_template)
        structural = {index for index, token in added.items() if _is_control(token, source)}
        controls = [_control(index, added[index]) for index in structural]
        self.controls = {control.text: control for control in controls}
        self.control_ids = frozenset(control.id for control in controls)
        self._rendering = _Backend(tokenizer.backend_tokenizer, added)
        self._plain = _Backend(
            tokenizer.backend_tokenizer, {index: token for index, token in added.items() if index not in structural}
        )
        self._anchor_id = self._plain.add_special(_ANCHOR)
        self._control = _any_of(self.controls)
        self._starts = re.compile("[" + re.escape("".join(sorted({text[0] for text in self.controls}))) + "]")
        self._uncut = _any_of([_ANCHOR, *self._leaking()])

    def encode_rendering(self, text: str) -> list[int]:
        """Ids of a rendered conversation, exactly as the tokenizer gives them."""
        return self._rendering.ids(text)

    def encode_plain(self, text: str, *, at_start: bool = False) -> list[PlainToken]:
        """Tokens of text in which nothing becomes a control token; `at_start` when no token stands before it.

        Raises:
            TemplateError: the vocabulary makes a control token all the same.
        """
        tokens: list[PlainToken] = []
        for offset, piece in self._cut(text):
            tokens += self._encode_piece(piece, offset, at_start=at_start and offset == 0)
        if leaked := self.control_ids.intersection(token.id for token in tokens):
            raise TemplateError(f"plain text became the control tokens {sorted(leaked)}: {text[:80]!r}")
        return tokens

    def split(self, text: str) -> Iterator[str | ControlToken]:
        """A rendering cut at its control tokens, as the tokenizer cuts it. Pieces of text may be empty."""
        position = 0
        for match in self._control.finditer(text):
            yield text[position : match.start()]
            yield self.controls[match.group()]
            position = match.end()
        yield text[position:]

    def holds_control(self, text: str) -> bool:
        """Whether the text of a control token stands in this text."""
        return self._control.search(text) is not None

    def unused_mark(self, texts: list[str]) -> str:
        """A character that stands in none of the texts, to mark places with."""
        return next((mark for mark in _MARKS if not any(mark in text for text in texts)), _MARKS[0])

    def take_apart(self, text: str, mark: str) -> str:
        """Text with a mark wherever a control token could begin, so that a rendering of it holds none."""
        return self._starts.sub(lambda match: match.group() + mark, text)

    def encode_marked(self, rendering: str, mark: str) -> list[int]:
        """Ids of a rendering some of whose contents were taken apart."""
        ids: list[int] = []
        before: ControlToken | None = None
        pieces = list(self.split(rendering))
        for index, piece in enumerate(pieces):
            if isinstance(piece, ControlToken):
                ids.append(piece.id)
                before = piece
                continue
            after = pieces[index + 1] if index + 1 < len(pieces) else None
            strips_right = isinstance(after, ControlToken) and after.strips_left
            plain = piece.replace(mark, "")
            plain = plain.lstrip() if before is not None and before.strips_right else plain
            plain = plain.rstrip() if strips_right else plain
            ids += [token.id for token in self.encode_plain(plain, at_start=before is None)] if plain else []
        return ids

    def _encode_piece(self, piece: str, offset: int, *, at_start: bool) -> list[PlainToken]:
        lead = "" if at_start else _ANCHOR
        shift = offset - len(lead)
        return [
            PlainToken(token.id, token.start + shift, token.end + shift)
            for token in self._plain.encode(lead + piece)
            if token.id != self._anchor_id
        ]

    def _cut(self, text: str) -> Iterator[tuple[int, str]]:
        """Text cut inside the few words that cannot be encoded whole: after their first character."""
        position = 0
        for match in self._uncut.finditer(text):
            yield position, text[position : match.start() + 1]
            position = match.start() + 1
        yield position, text[position:]

    def _leaking(self) -> list[str]:
        """Control tokens that the vocabulary itself makes out of their text."""
        return [
            text
            for text in self.controls
            if self.control_ids.intersection(token.id for token in self._encode_piece(text, 0, at_start=False))
        ]


class _Backend:
    """A tokenizer on another's model, with some of its added tokens. They keep their ids."""

    def __init__(self, backend: Any, added: dict[int, Any]) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer(backend.model)
        if backend.normalizer is not None:
            self._tokenizer.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._tokenizer.pre_tokenizer = backend.pre_tokenizer
        tokens = [token for _, token in sorted(added.items())]
        self._tokenizer.add_special_tokens([token for token in tokens if token.special])
        self._tokenizer.add_tokens([token for token in tokens if not token.special])
        ids = ((self._tokenizer.token_to_id(token.content), index) for index, token in added.items())
        self._renamed = {ours: theirs for ours, theirs in ids if ours != theirs}

    def add_special(self, text: str) -> int:
        """Add a control token; its id, which is none of the model's."""
        from tokenizers import AddedToken

        self._tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True)])
        token = -1
        self._renamed[int(self._tokenizer.token_to_id(text))] = token
        return token

    def encode(self, text: str) -> list[PlainToken]:
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        ids = self._named(encoded.ids)
        return [PlainToken(token, start, end) for token, (start, end) in zip(ids, encoded.offsets, strict=True)]

    def ids(self, text: str) -> list[int]:
        """As `encode`; offsets take as long as everything else."""
        return self._named(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _named(self, ids: list[int]) -> list[int]:
        renamed = self._renamed
        return [renamed.get(token, token) for token in ids] if renamed else ids


def _is_control(token: Any, source: str) -> bool:
    """Special tokens, what the template writes, and what looks like a mark (`<|fim|>`, `[IMG]`, `<think>`, `<dsml:`).

    Vocabularies also add runs of white space, for code, HTML tags (Gemma) and words: text like any other.
    """
    text = token.content
    if len(text) < 2 or not text.replace("▁", " ").strip():
        return False
    return bool(token.special) or text in source or bool(_MARK.search(text) and not _HTML.fullmatch(text))


def _control(index: int, token: Any) -> ControlToken:
    return ControlToken(index, token.content, bool(token.special), bool(token.lstrip), bool(token.rstrip))


def _any_of(texts: Any) -> re.Pattern[str]:
    """A pattern for any of the texts, the longest first, as tokenizers match; one that never matches for none."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
