"""A Hugging Face model's own chat template: prompt ids, and the ids of messages appended later, proved.

A prompt is rendered by the template. What is appended is put into a frame (`frames`, `appending`), made once for each
pattern of roles; no turn renders the conversation again. When a model is loaded, `proof` shows that frames are what the
template itself would render, and what cannot be shown is refused with the reason.

What tools and users say never becomes a control token, in prompts and in deltas (`encoding`).
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_multiturn.chat import proof
from sglang_multiturn.chat.appending import APPENDABLE, Appender
from sglang_multiturn.chat.dialect import find_dialect
from sglang_multiturn.chat.encoding import TextEncoder
from sglang_multiturn.chat.formats import detect_format
from sglang_multiturn.chat.frames import QUESTION
from sglang_multiturn.chat.template import DeltaPiece
from sglang_multiturn.errors import ConfigError, MissingDependencyError, TemplateError
from sglang_multiturn.schemas import Message, Role, ToolSchema

_PLAIN_ROLES = ("tool", "user")
"""Whose words are not trusted with control tokens."""


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
            TemplateError: there is no template, or nothing can be appended to what it renders.
        """
        self.tokenizer = tokenizer
        self.name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        if not getattr(tokenizer, "is_fast", False):
            raise TemplateError(f"{self.name}: a fast tokenizer is needed, got {type(tokenizer).__name__}")
        if not isinstance(getattr(tokenizer, "chat_template", None), str):
            raise TemplateError(f"{self.name}: the tokenizer has no chat template; this package needs a chat model")
        self.encoder = TextEncoder(tokenizer)
        self.dialect = find_dialect(self.render)
        eos = tokenizer.eos_token_id
        own_stops = dict.fromkeys([*([] if eos is None else [eos]), *stop_token_ids])
        self._appender = Appender(self.render, self.encoder, self.dialect, tuple(own_stops))
        self._keeps: dict[Role, bool] = {}
        try:
            proof.prove(self._appender)
            self._stop_token_ids = proof.find_stops(self._appender)
        except TemplateError as error:
            raise TemplateError(self._named(error)) from error

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

    # What a template is

    @property
    def source(self) -> str:
        """The template's own text."""
        return str(self.tokenizer.chat_template)

    @property
    def generation_prompt(self) -> str:
        """The text right before an assistant's words."""
        asked, asking = (list(self.encoder.split(self.render([QUESTION], generation_prompt=g))) for g in (False, True))
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(asked, asking, strict=False)))
        return "".join(piece if isinstance(piece, str) else piece.text for piece in asking[same:])

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn; the one the template puts after an answer comes first."""
        return self._stop_token_ids

    @property
    def end_ids(self) -> frozenset[int]:
        """The template's own ends of an assistant turn."""
        return self._appender.end_ids

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids of the tokenizer's added tokens."""
        return self.encoder.control_ids

    @functools.cached_property
    def vocab_size(self) -> int:
        """Ids are below this (the model's embedding may be larger). Counting takes a tenth of a second."""
        return len(self.tokenizer)

    @property
    def tool_call_format(self) -> str | None:
        """The parser whose format the template shows."""
        return detect_format(self.source)

    def refusal(self, role: Role) -> str | None:
        """Why messages of a role cannot be appended; None when they can."""
        if role not in APPENDABLE:
            return f"{self.name}: only tools and users speak after an assistant, not {role!r}"
        reason = self._appender.refusals.get(role)
        return None if reason is None else self._named(reason)

    def keeps_history(self, role: Role) -> bool:
        """Whether earlier turns are still rendered as they were sampled once a message of `role` follows."""
        if role not in self._keeps:
            self._keeps[role] = role in APPENDABLE and proof.keeps_history(self._appender, role)
        return self._keeps[role]

    # What a conversation asks of it

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Ids of a conversation up to and with the generation prompt. Raises TemplateError."""
        shown = [tool.for_template() for tool in tools]
        said = [message.text for message in messages if message.role in _PLAIN_ROLES]
        if not any(map(self.encoder.holds_control, said)):
            return self.encoder.encode_rendering(self.render([self.dialect.spell(m) for m in messages], shown))
        mark = self.encoder.unused_mark([message.text for message in messages])
        apart = [self._taken_apart(message, mark) if message.role in _PLAIN_ROLES else message for message in messages]
        return self.encoder.encode_marked(self.render([self.dialect.spell(m) for m in apart], shown), mark)

    def encode_delta(
        self, messages: Sequence[Message], *, last_id: int | None, answered_before: bool = False
    ) -> list[DeltaPiece]:
        """What follows an assistant turn; see `ChatTemplate.encode_delta`."""
        try:
            return self._appender.encode(messages, last_id=last_id, answered_before=answered_before)
        except TemplateError as error:
            raise TemplateError(self._named(error)) from error

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, a final end-of-turn id left out and every other token kept."""
        kept = list(ids[:-1]) if ids and ids[-1] in self._stop_token_ids else list(ids)
        return str(self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text, in which nothing becomes a control token."""
        return [token.id for token in self.encoder.encode_plain(text)]

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        *,
        generation_prompt: bool = True,
    ) -> str:
        """A conversation as the template writes it. Raises TemplateError when the template refuses."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(tools) or None,
                    add_generation_prompt=generation_prompt,
                    tokenize=False,
                    **self.chat_template_kwargs,
                )
            )
        except Exception as error:  # jinja templates raise anything, TypeError included
            raise TemplateError(f"{self.name}: the chat template refused the conversation: {error}") from error

    def _named(self, error: object) -> str:
        return f"{self.name}: {str(error).removeprefix(f'{self.name}: ')}"

    def _taken_apart(self, message: Message, mark: str) -> Message:
        content: Any = message.content
        if isinstance(content, list):
            content = [
                {**part, "text": self.encoder.take_apart(part["text"], mark)}
                if isinstance(part.get("text"), str)
                else part
                for part in content
            ]
        elif content is not None:
            content = self.encoder.take_apart(content, mark)
        return message.model_copy(update={"content": content})


def _looks_local(path: str | Path) -> bool:
    """Whether a model name can only be meant as a folder."""
    text = str(path)
    return isinstance(path, Path) or text.startswith(("/", ".", "~")) or text.count("/") > 1


def _generation_eos(path: str | Path) -> list[int]:
    """End-of-turn ids of the model's generation config, which it need not have."""
    from transformers.utils.hub import cached_file

    file = cached_file(str(path), "generation_config.json", _raise_exceptions_for_missing_entries=False)
    if file is None:
        return []
    eos = json.loads(Path(file).read_text(encoding="utf-8")).get("eos_token_id")
    return [eos] if isinstance(eos, int) else list(eos or [])
