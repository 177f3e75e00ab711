"""Prompt ids, and the ids of messages appended later, from the model's own chat template.

A conversation is rendered once, when it starts. What is appended later is a *delta*: the text the template would put
after the assistant's last word, tokenised alone. For that the template is rendered once per pattern of roles with
place-holders, which gives a frame into which the real contents go; `prove` shows on load that this is what the
template does, and refuses a model for which it is not.

What tools and users say never becomes a control token: where it holds the text of one (`<|im_end|>`), that text is
encoded in pieces that cannot match it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sglang_multiturn.errors import ConfigError, MissingDependencyError, TemplateError
from sglang_multiturn.schemas import Message, Role, ToolSchema
from sglang_multiturn.tokens import Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaPiece:
    """Consecutive ids of one origin in a delta."""

    ids: list[int]
    origin: Origin
    message_index: int | None = None
    """Which of the appended messages these ids are the content of; None for boundaries."""


class ChatTemplate(Protocol):
    """What a conversation needs of a tokenizer and its template."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn; the template's own comes first."""
        ...

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        ...

    @property
    def tool_call_format(self) -> str | None:
        """Name of the parser that fits the template, when that can be told."""
        ...

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Ids of a conversation up to and with the generation prompt. Raises TemplateError."""
        ...

    def encode_delta(self, messages: Sequence[Message], *, last_id: int | None) -> list[DeltaPiece]:
        """What follows an assistant turn whose last sampled id was `last_id` (None: it sampled nothing).

        The pieces hold the template's end-of-turn token only when `last_id` is another one, then the appended
        messages, then the generation prompt. Raises TemplateError.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, a final end-of-turn id left out and every other token kept."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text, in which nothing becomes a control token."""
        ...


@dataclass(frozen=True, slots=True)
class _Frame:
    """The rendered text after an assistant's last word, cut at the places where contents go."""

    parts: tuple[str, ...]
    """One more than there are messages; `parts[0]` begins with the end-of-turn token."""


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
    def vocab_size(self) -> int:
        """Ids are below this (the model's embedding may be larger)."""
        return len(self.tokenizer)

    @property
    def tool_call_format(self) -> str | None:
        """`hermes` for templates that show calls as JSON between `<tool_call>` tags."""
        text = str(self.tokenizer.chat_template)
        return "hermes" if "<tool_call>" in text and "<function=" not in text else None

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Ids of a conversation up to and with the generation prompt. Raises TemplateError."""
        text = self._render([m.for_template() for m in messages], [t.for_template() for t in tools])
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def encode_delta(self, messages: Sequence[Message], *, last_id: int | None) -> list[DeltaPiece]:
        """What follows an assistant turn; see `ChatTemplate.encode_delta`."""
        frame = self._frame(tuple(message.role for message in messages))
        contents = [message.text for message in messages]
        spans = [(part, None) for part in frame.parts]
        woven: list[tuple[str, int | None]] = [spans[0]]
        for index, content in enumerate(contents):
            woven += [(content, index), spans[index + 1]]
        pieces = list(self._encode_woven(woven))
        if last_id == self._stop_token_ids[0]:
            end = pieces[0]
            pieces[0] = DeltaPiece(ids=end.ids[1:], origin=end.origin)
        return [self._with_role(piece, messages) for piece in pieces if piece.ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, a final end-of-turn id left out and every other token kept."""
        kept = list(ids[:-1]) if ids and ids[-1] in self._stop_token_ids else list(ids)
        return str(self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text, in which nothing becomes a control token."""
        return [token for token, _ in self._encode_plain(text)]

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
            frame = self._frame(tuple(message.role for message in answers))
            delta = frame.parts[0] + "".join(
                message.text + part for message, part in zip(answers, frame.parts[1:], strict=True)
            )
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
            parts = re.split("|".join(re.escape(_slot(i)) for i in range(len(roles))), rest)
            self._frames[roles] = _Frame(tuple(parts))
        return self._frames[roles]

    def _find_end_text(self) -> str:
        closing = self._frame(("tool",)).parts[0]
        match = self._added.match(closing) if self._added else None
        if match is None:
            raise TemplateError(
                f"{self._name}: the template puts {closing[:40]!r} after an assistant turn, which begins with no "
                "special token; such templates are not supported yet"
            )
        return match.group()

    # Encoding

    def _encode_woven(self, woven: Sequence[tuple[str, int | None]]) -> Iterator[DeltaPiece]:
        """Encode template text (index None) and contents as one text, keeping apart what comes from where.

        As the tokenizer does with the whole text: control tokens of the *template* split it, and each plain run
        between them is encoded as one, so that tokens merge across the edge of a content exactly as they would.
        """
        run: list[tuple[str, int | None]] = []
        ids: list[tuple[int, int | None]] = []
        for text, owner in woven:
            if owner is not None or self._added is None:
                run.append((text, owner))
                continue
            position = 0
            for match in self._added.finditer(text):
                run.append((text[position : match.start()], None))
                ids += self._encode_run(run)
                run = []
                ids.append((self._added_ids[match.group()], None))
                position = match.end()
            run.append((text[position:], None))
        ids += self._encode_run(run)
        current: list[int] = []
        owner = None
        for token, token_owner in ids:
            if token_owner != owner and current:
                yield DeltaPiece(ids=current, origin=Origin.BOUNDARY, message_index=owner)
                current = []
            owner = token_owner
            current.append(token)
        if current:
            yield DeltaPiece(ids=current, origin=Origin.BOUNDARY, message_index=owner)

    def _encode_run(self, run: Sequence[tuple[str, int | None]]) -> list[tuple[int, int | None]]:
        """Encode a plain run; a token that holds any character of a content belongs to that content."""
        text = "".join(part for part, _ in run)
        owners: list[tuple[int, int, int]] = []
        position = 0
        for part, owner in run:
            if owner is not None:
                owners.append((position, position + len(part), owner))
            position += len(part)
        encoded: list[tuple[int, int | None]] = []
        for token, (start, end) in self._encode_plain(text):
            owner = next((o for low, high, o in owners if start < high and max(end, start + 1) > low), None)
            encoded.append((token, owner))
        return encoded

    def _encode_plain(self, text: str) -> list[tuple[int, tuple[int, int]]]:
        """Ids and character offsets of text in which no added token may match."""
        encoded: list[tuple[int, tuple[int, int]]] = []
        for start, piece in self._without_added(text, 0):
            batch = self.tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True)
            encoded += [
                (token, (low + start, high + start))
                for token, (low, high) in zip(batch["input_ids"], batch["offset_mapping"], strict=True)
            ]
        return encoded

    def _without_added(self, text: str, start: int) -> Iterator[tuple[int, str]]:
        """Cut text so that no piece holds an added token: after the first character of each occurrence."""
        position = 0
        while self._added is not None and (match := self._added.search(text, position)):
            cut = match.start() + 1
            yield start + position, text[position:cut]
            position = cut
        if position < len(text):
            yield start + position, text[position:]

    @staticmethod
    def _with_role(piece: DeltaPiece, messages: Sequence[Message]) -> DeltaPiece:
        if piece.message_index is None:
            return piece
        origin = Origin.TOOL if messages[piece.message_index].role == "tool" else Origin.USER
        return DeltaPiece(ids=piece.ids, origin=origin, message_index=piece.message_index)


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
