"""A Hugging Face model's own chat template: prompt ids, and the ids of messages appended later, proved.

A prompt is rendered by the template. What is appended is put into a frame (`frames`), made once for each pattern of
roles; no turn renders the conversation again. Where a template changes what tools say (quotes it as JSON, trims it),
that one message is rendered alone to see what it becomes. When a model is loaded, `prove` shows that frames are what
the template itself would render, and what cannot be shown is refused with the reason.

What tools and users say never becomes a control token, in prompts and in deltas (`encoding`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_multiturn.chat.dialect import find_dialect
from sglang_multiturn.chat.encoding import ControlToken, TextEncoder
from sglang_multiturn.chat.formats import detect_format
from sglang_multiturn.chat.frames import (
    QUESTION,
    Alone,
    Frame,
    Run,
    Shown,
    Slot,
    make_frame,
    opening,
    placeholder,
    render_after,
)
from sglang_multiturn.chat.template import DeltaPiece
from sglang_multiturn.errors import ConfigError, MissingDependencyError, TemplateError
from sglang_multiturn.schemas import Message, Role, ToolSchema
from sglang_multiturn.tokens import Origin

_APPENDABLE: tuple[Role, ...] = ("tool", "user")
_PLAIN_ROLES = ("tool", "user")
"""Whose words are not trusted with control tokens."""
_PROBES = (
    'a "quoted" word, <b>tag</b>, 12 + 7,\nnew line, é, 猫',
    "\n leading and trailing \n",
    '{"json": [1, "x", null]}',
    "back\\slash 'single' {{ braces }}",
    "17",
    "<think>x</think>y",
    "",
)
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Probes.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "x"}},
            "required": ["x"],
        },
    },
}


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
        self._kwargs = dict(chat_template_kwargs or {})
        if not getattr(tokenizer, "is_fast", False):
            raise TemplateError(f"{self.name}: a fast tokenizer is needed, got {type(tokenizer).__name__}")
        if not isinstance(getattr(tokenizer, "chat_template", None), str):
            raise TemplateError(f"{self.name}: the tokenizer has no chat template; this package needs a chat model")
        self.encoder = TextEncoder(tokenizer)
        self.dialect = find_dialect(self.render)
        self._frames: dict[tuple[Role, ...], Frame] = {}
        self._alone: dict[Role, Alone] = {}
        self._verbatim: dict[Role, bool] = {}
        self._keeps: dict[Role, bool] = {}
        eos = tokenizer.eos_token_id
        self._own_stops = tuple(dict.fromkeys([*([] if eos is None else [eos]), *stop_token_ids]))
        self._refusals: dict[Role, str] = {}
        for role in _APPENDABLE:
            if (reason := self._refuse(role)) is not None:
                self._refusals[role] = reason
        if len(self._refusals) == len(_APPENDABLE):
            raise TemplateError("; ".join(self._refusals.values()))
        self._stop_token_ids = self._find_stops()

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
        return frozenset(frame.end_id for frame in self._frames.values())

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids of the tokenizer's added tokens."""
        return self.encoder.control_ids

    @property
    def vocab_size(self) -> int:
        """Ids are below this (the model's embedding may be larger)."""
        return len(self.tokenizer)

    @property
    def tool_call_format(self) -> str | None:
        """The parser whose format the template shows."""
        return detect_format(self.source)

    def refusal(self, role: Role) -> str | None:
        """Why messages of a role cannot be appended; None when they can."""
        if role not in _APPENDABLE:
            return f"{self.name}: only tools and users speak after an assistant, not {role!r}"
        return self._refusals.get(role)

    def keeps_history(self, role: Role) -> bool:
        """Whether earlier turns are still rendered as they were sampled once a message of `role` follows."""
        if role not in self._keeps:
            self._keeps[role] = self.refusal(role) is None and self._find_keeping(role)
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

    def encode_delta(self, messages: Sequence[Message], *, last_id: int | None) -> list[DeltaPiece]:
        """What follows an assistant turn; see `ChatTemplate.encode_delta`."""
        if refusal := next(filter(None, (self.refusal(message.role) for message in messages)), None):
            raise TemplateError(refusal)
        frame = self._frame(tuple(message.role for message in messages))
        shown = self._fill(frame, messages)
        owned: list[tuple[int, int | None]] = []
        for step in frame.steps:
            owned += self._encode_run(step, shown) if isinstance(step, Run) else [(step, None)]
        if last_id == frame.end_id:
            del owned[0]
        pieces = itertools.groupby(owned, key=lambda token: token[1])
        return [_piece([token for token, _ in tokens], index, messages) for index, tokens in pieces]

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
                    **self._kwargs,
                )
            )
        except Exception as error:  # jinja templates raise anything, TypeError included
            raise TemplateError(f"{self.name}: the chat template refused the conversation: {error}") from error

    # Frames and what fills them

    def _frame(self, roles: tuple[Role, ...]) -> Frame:
        if roles not in self._frames:
            try:
                self._frames[roles] = make_frame(roles, self.render, self.encoder, self.dialect, self._own_stops)
            except TemplateError as error:
                raise TemplateError(f"{self.name}: {str(error).removeprefix(f'{self.name}: ')}") from error
        return self._frames[roles]

    def _fill(self, frame: Frame, messages: Sequence[Message]) -> dict[Slot, str]:
        shown: dict[Slot, str] = {}
        for slot in (part for part in frame.parts if isinstance(part, Slot)):
            message = messages[slot.index]
            if slot.shown is Shown.CONTENT:
                shown[slot] = self._shown(message.role, message.text)
            else:
                shown[slot] = (message.name if slot.shown is Shown.NAME else message.tool_call_id) or "unknown"
        return shown

    def _shown(self, role: Role, text: str) -> str:
        """What the template makes of a message's text: mostly the text itself, else it is rendered alone."""
        return text if self._verbatim.get(role, False) else self._alone[role].shown(text)

    def _taken_apart(self, message: Message, mark: str) -> Message:
        content: Any = message.content
        if isinstance(content, list):
            content = [
                {**part, "text": self.encoder.take_apart(part["text"], mark)} if "text" in part else part
                for part in content
            ]
        elif content is not None:
            content = self.encoder.take_apart(content, mark)
        return message.model_copy(update={"content": content})

    def _encode_run(self, run: Run, shown: Mapping[Slot, str]) -> list[tuple[int, int | None]]:
        """Ids of a run with whose content they are; a token that holds any character of a content belongs to it."""
        text = ""
        contents: list[tuple[int, int, int]] = []
        for part in run.parts:
            said = part if isinstance(part, str) else shown[part]
            if isinstance(part, Slot) and part.shown is Shown.CONTENT:
                contents.append((len(text), len(text) + len(said), part.index))
            text += said
        low = len(text) - len(text.lstrip()) if run.strips_left else 0
        high = len(text.rstrip()) if run.strips_right else len(text)
        return [
            (token, next((i for a, b, i in contents if start + low < b and max(end, start + 1) + low > a), None))
            for token, start, end in (self.encoder.encode_plain(text[low:high]) if low < high else ())
        ]

    # Proof

    def _refuse(self, role: Role) -> str | None:
        """Prove that messages of a role can be appended; the reason why not, where they cannot."""
        try:
            self._frame((role,))
            self._alone[role] = Alone.of(role, self.render, self.dialect)
            self._verbatim[role] = all(self._alone[role].shown(probe) == probe for probe in _PROBES)
            for probe in _PROBES:
                self._prove((role,), [probe])
            for pair in itertools.pairwise(_PROBES) if role == "tool" else ():
                self._prove((role, role), pair)
        except TemplateError as error:
            return str(error)
        return None

    def _prove(self, roles: tuple[Role, ...], probes: Sequence[str]) -> None:
        """Show that a delta is what the template would append. Raises TemplateError with what it does instead."""
        frame = self._frame(roles)
        said = [
            {**placeholder(role, i), "content": probe}
            for i, (role, probe) in enumerate(zip(roles, probes, strict=True))
        ]
        messages = [Message.model_validate(message) for message in said]
        delta = frame.text(self._fill(frame, messages))
        _, whole = render_after(roles, said, self.render, self.dialect)
        if not whole.endswith(delta):
            raise TemplateError(f"{self.name}: the template does not append what {list(roles)} say: {probes!r}")
        ids = [token for piece in self.encode_delta(messages, last_id=None) for token in piece.ids]
        if not any(map(self.encoder.holds_control, probes)) and ids != self.encoder.encode_rendering(delta):
            raise TemplateError(f"{self.name}: appended messages are tokenised otherwise than alone: {probes!r}")

    def _find_stops(self) -> tuple[int, ...]:
        """What ends a turn: the model's own stop ids, and the template's ends where a model samples them.

        A template's end is not sampled when a turn alone ends with another of the model's own (gpt-oss says `<|return|>`
        where its history shows `<|end|>`, which ends only one of its channels).
        """
        ends: dict[Role, list[int]] = {}
        for role in (role for role in _APPENDABLE if role not in self._refusals):
            start = opening(self.render, self.dialect, calls=1 if role == "tool" else 0)
            alone = [t.id for t in self.encoder.split(start.after(start.text)) if isinstance(t, ControlToken)]
            end = self._frame((role,)).end_id
            ends[role] = [end] if end in alone or not set(alone) & set(self._own_stops) else []
        return tuple(dict.fromkeys([*ends.get("user", []), *self._own_stops, *ends.get("tool", [])]))

    def _fails(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> bool:
        try:
            self.render(messages, tools)
        except TemplateError:
            return True
        return False

    def _find_keeping(self, role: Role) -> bool:
        """Compare how the template renders a thinking turn alone, and once a message of `role` follows."""
        tools = [] if self._fails([QUESTION], [_PROBE_TOOL]) else [_PROBE_TOOL]
        prompt = self.render([QUESTION], tools)
        for thoughts in ("thoughts", ""):
            calls = 1 if role == "tool" else 0
            start = opening(self.render, self.dialect, calls=calls, thoughts=thoughts, tools=tools)
            alone = start.up_to(start.text)
            if alone.startswith(prompt):
                later = self.render([*start.messages, placeholder(role, 0)], tools)
                return later.startswith(alone)
        return False


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
    """End-of-turn ids of the model's generation config, which it need not have."""
    from transformers.utils.hub import cached_file

    file = cached_file(str(path), "generation_config.json", _raise_exceptions_for_missing_entries=False)
    if file is None:
        return []
    eos = json.loads(Path(file).read_text(encoding="utf-8")).get("eos_token_id")
    return [eos] if isinstance(eos, int) else list(eos or [])
