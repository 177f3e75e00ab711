"""Prompt ids, and the ids of messages appended later, from the model's own chat template.

A conversation is rendered once, when it starts. What is appended later is a *delta*: the text the template would put
after the assistant's last word, tokenised alone. For that the template is rendered once per pattern of roles with
place-holders, which gives a frame into which the real contents go; `prove` shows on load that this is what the
template does, and refuses a model for which it is not.

What tools and users say never becomes a control token: where it holds the text of one (`<|im_end|>`), that text is
encoded in pieces that cannot match it.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_multiturn.chat.template import DeltaPiece
from sglang_multiturn.errors import ConfigError, MissingDependencyError, TemplateError
from sglang_multiturn.schemas import Message, Role, ToolSchema
from sglang_multiturn.tokens import Origin


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where the content of an appended message goes."""

    index: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Plain text and slots between two control tokens; encoded as one, so that tokens merge across a content's edges."""

    parts: tuple[str | _Slot, ...]


@dataclass(frozen=True, slots=True)
class _Frame:
    """What the template puts after an assistant's last word, for one pattern of roles."""

    text: tuple[str, ...]
    """Cut at the slots; one more than there are messages. The first begins with the end-of-turn token."""
    steps: tuple[list[int] | _Run, ...]
    """The same as ids of what never changes, and runs around slots."""


_ANSWER = "\ue000answer\ue001"
_PROBE = 'a "quoted" word, <b>tag</b>, 12 + 7,\nnew line, é, 猫'


def _slot(index: int) -> str:
    return f"\ue000{index}\ue001"


class HFChatTemplate:
    """The template and tokenizer of a Hugging Face model (a fast tokenizer is needed: offsets tell origins)."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop_token_ids: Iterable[int] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Wrap a tokenizer and prove its template.

        Args:
            tokenizer: a `PreTrainedTokenizerFast` with a chat template.
            stop_token_ids: further ids that end a turn, such as those of the model's generation config.
            chat_template_kwargs: handed to every rendering (`enable_thinking=False`, ...).

        Raises:
            TemplateError: the template is missing, or is not append-only in the way deltas need.
        """
        self.tokenizer = tokenizer
        self._kwargs = dict(chat_template_kwargs or {})
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        self._name = str(name)
        if not getattr(tokenizer, "is_fast", False):
            raise TemplateError(f"{self._name}: a fast tokenizer is needed, got {type(tokenizer).__name__}")
        if not getattr(tokenizer, "chat_template", None):
            raise TemplateError(f"{self._name}: the tokenizer has no chat template; this package needs a chat model")
        # A copy: transformers keeps truncation and padding of other callers' last call in the backend.
        self._fast = copy.deepcopy(tokenizer.backend_tokenizer)
        self._fast.no_truncation()
        self._fast.no_padding()
        self._vocab_size = len(tokenizer)
        added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items()}
        self._added_ids: dict[str, int] = added
        longest_first = sorted(added, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, longest_first))) if added else None
        self._frames: dict[tuple[Role, ...], _Frame] = {}
        self._end_text = self._find_end_text()
        end_id = added[self._end_text]
        extra = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        self._stop_token_ids = tuple(dict.fromkeys([end_id, *extra, *stop_token_ids]))
        self.prove()

    @classmethod
    def from_pretrained(cls, path: str | Path, chat_template_kwargs: Mapping[str, Any] | None = None) -> HFChatTemplate:
        """Tokenizer, template and end-of-turn ids of a model folder or hub name.

        Raises:
            ConfigError: the folder is missing or holds no tokenizer.
        """
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise MissingDependencyError.for_extra("a model's chat template", "transformers", "chat") from error
        if _looks_local(path) and not Path(path).is_dir():
            raise ConfigError(f"model folder {str(path)!r} does not exist; give a folder or a hub name")
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(path))
        except (OSError, ValueError) as error:
            raise ConfigError(f"model {str(path)!r} has no tokenizer that can be loaded: {error}") from error
        return cls(tokenizer, stop_token_ids=_generation_eos(path), chat_template_kwargs=chat_template_kwargs)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn; the template's own comes first."""
        return self._stop_token_ids

    @property
    def source(self) -> str:
        """The Jinja text."""
        return str(self.tokenizer.chat_template)

    @property
    def generation_prompt(self) -> str:
        """Text right before an assistant's words."""
        return "<|im_start|>assistant\n"

    @property
    def end_ids(self) -> frozenset[int]:
        """The template's own ends."""
        return frozenset(self._stop_token_ids[:1])

    @property
    def control_ids(self) -> frozenset[int]:
        """Added tokens."""
        return frozenset(self._added_ids.values())

    def refusal(self, role: Role) -> str | None:
        """None."""
        return None

    def keeps_history(self, role: Role) -> bool:
        """True."""
        return True

    @property
    def vocab_size(self) -> int:
        """Ids are below this (the model's embedding may be larger)."""
        return self._vocab_size

    @property
    def tool_call_format(self) -> str | None:
        """`hermes` for templates that show calls as JSON between `<tool_call>` tags."""
        text = str(self.tokenizer.chat_template)
        return "hermes" if "<tool_call>" in text and "<function=" not in text else None

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Ids of a conversation up to and with the generation prompt. Raises TemplateError."""
        text = self._render([m.for_template() for m in messages], [t.for_template() for t in tools])
        return list(self._encode(text).ids)

    def encode_delta(self, messages: Sequence[Message], *, last_id: int | None) -> list[DeltaPiece]:
        """What follows an assistant turn; see `ChatTemplate.encode_delta`."""
        frame = self._frame(tuple(message.role for message in messages))
        owned: list[tuple[int, int | None]] = []
        for step in frame.steps:
            owned += self._encode_run(step, messages) if isinstance(step, _Run) else [(token, None) for token in step]
        if last_id == self._stop_token_ids[0]:
            del owned[0]
        pieces = itertools.groupby(owned, key=lambda token: token[1])
        return [_piece([token for token, _ in tokens], index, messages) for index, tokens in pieces]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, a final end-of-turn id left out and every other token kept."""
        kept = list(ids[:-1]) if ids and ids[-1] in self._stop_token_ids else list(ids)
        return str(self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text, in which nothing becomes a control token."""
        return [token for _, piece in self._without_added(text, 0) for token in self._encode(piece).ids]

    def prove(self) -> None:
        """Show on small conversations that deltas are what the template itself would render.

        Raises:
            TemplateError: saying which property fails.
        """
        question: dict[str, Any] = {"role": "user", "content": "question"}
        call = {"type": "function", "function": {"name": "f", "arguments": {"x": "1"}}}
        asked = {"role": "assistant", "content": "", "tool_calls": [call]}
        for count in (1, 2):
            answers = [Message(role="tool", content=f"{_PROBE} {i}") for i in range(count)]
            text = self._frame(tuple(message.role for message in answers)).text
            delta = text[0] + "".join(m.text + part for m, part in zip(answers, text[1:], strict=True))
            whole = self._render([question, asked, *(m.for_template() for m in answers)], [])
            if not whole.endswith(delta):
                raise TemplateError(
                    f"{self._name}: the template changes what tools say or does not append it "
                    f"({count} tool message(s)); such templates are not supported yet"
                )
            pieces = self.encode_delta(answers, last_id=None)
            if [i for piece in pieces for i in piece.ids] != self.tokenizer.encode(delta, add_special_tokens=False):
                raise TemplateError(f"{self._name}: appended messages would be tokenised otherwise than alone")

    # Rendering and frames

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, tools=tools or None, add_generation_prompt=True, tokenize=False, **self._kwargs
                )
            )
        except Exception as error:  # jinja templates raise anything, TypeError included
            raise TemplateError(f"{self._name}: the chat template refused the conversation: {error}") from error

    def _frame(self, roles: tuple[Role, ...]) -> _Frame:
        if roles not in self._frames:
            appended = [{"role": role, "content": _slot(i)} for i, role in enumerate(roles)]
            before = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}]
            text = self._render(before + appended, [])
            if text.count(_ANSWER) != 1 or any(text.count(_slot(i)) != 1 for i in range(len(roles))):
                raise TemplateError(f"{self._name}: the template drops or repeats messages of roles {list(roles)}")
            rest = text.partition(_ANSWER)[2]
            parts = tuple(re.split("|".join(re.escape(_slot(i)) for i in range(len(roles))), rest))
            self._frames[roles] = _Frame(parts, tuple(self._compile(parts)))
        return self._frames[roles]

    def _compile(self, parts: Sequence[str]) -> Iterator[list[int] | _Run]:
        """Cut template text at its control tokens, as the tokenizer would, and encode what holds no slot."""
        run: list[str | _Slot] = []
        for index, part in enumerate(parts):
            position = 0
            for match in self._added.finditer(part) if self._added else ():
                yield self._settle([*run, part[position : match.start()]])
                yield [self._added_ids[match.group()]]
                run, position = [], match.end()
            run.append(part[position:])
            if index + 1 < len(parts):
                run.append(_Slot(index))
        yield self._settle(run)

    def _settle(self, run: Sequence[str | _Slot]) -> list[int] | _Run:
        plain = [part for part in run if isinstance(part, str)]
        return self.encode_text("".join(plain)) if len(plain) == len(run) else _Run(tuple(run))

    def _find_end_text(self) -> str:
        closing = self._frame(("tool",)).text[0]
        match = self._added.match(closing) if self._added else None
        if match is None:
            raise TemplateError(
                f"{self._name}: the template puts {closing[:40]!r} after an assistant turn, which begins with no "
                "special token; such templates are not supported yet"
            )
        return match.group()

    # Encoding

    def _encode_run(self, run: _Run, messages: Sequence[Message]) -> list[tuple[int, int | None]]:
        """Ids of a run with whose content they are; a token that holds any character of a content belongs to it."""
        text = ""
        contents: list[tuple[int, int, int]] = []
        for part in run.parts:
            if isinstance(part, _Slot):
                said = messages[part.index].text
                contents.append((len(text), len(text) + len(said), part.index))
                text += said
            else:
                text += part
        return [
            (token, next((i for low, high, i in contents if start < high and max(end, start + 1) > low), None))
            for token, (start, end) in self._encode_plain(text)
        ]

    def _encode_plain(self, text: str) -> list[tuple[int, tuple[int, int]]]:
        """Ids and character offsets of text in which no added token may match."""
        encoded: list[tuple[int, tuple[int, int]]] = []
        for start, piece in self._without_added(text, 0):
            batch = self._encode(piece)
            encoded += [
                (token, (low + start, high + start))
                for token, (low, high) in zip(batch.ids, batch.offsets, strict=True)
            ]
        return encoded

    def _encode(self, text: str) -> Any:
        return self._fast.encode(text, add_special_tokens=False)

    def _without_added(self, text: str, start: int) -> Iterator[tuple[int, str]]:
        """Cut text so that no piece holds an added token: after the first character of each occurrence."""
        position = 0
        while self._added is not None and (match := self._added.search(text, position)):
            cut = match.start() + 1
            yield start + position, text[position:cut]
            position = cut
        if position < len(text):
            yield start + position, text[position:]


def _piece(ids: list[int], index: int | None, messages: Sequence[Message]) -> DeltaPiece:
    if index is None:
        return DeltaPiece(ids=ids, origin=Origin.BOUNDARY)
    origin = Origin.TOOL if messages[index].role == "tool" else Origin.USER
    return DeltaPiece(ids=ids, origin=origin, message_index=index)


def _looks_local(path: str | Path) -> bool:
    """Whether a model name can only be meant as a folder."""
    text = str(path)
    return isinstance(path, Path) or text.startswith(("/", ".", "~")) or text.count("/") > 1


def _generation_eos(path: str | Path) -> list[int]:
    """End-of-turn ids of a local model's generation config; a hub model's come through its tokenizer."""
    file = Path(path) / "generation_config.json"
    if not file.is_file():
        return []
    eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    return [eos] if isinstance(eos, int) else list(eos or [])
