"""What a conversation needs of a model's tokenizer and chat template.

A conversation is rendered once, when it starts. What is appended later is a *delta*: the ids the template puts after
the assistant's last word. `hf_template.HFChatTemplate` is the real thing, proved against the model's own template;
`byte_chatml.ByteChatML` needs no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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
    def source(self) -> str:
        """The template's own text (Jinja), "" where it has none."""
        ...

    @property
    def generation_prompt(self) -> str:
        """The text right before an assistant's words; it may open a thinking block."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn; the one the template puts after an answer comes first."""
        ...

    @property
    def end_ids(self) -> frozenset[int]:
        """The template's own ends of an assistant turn: what a delta can begin with."""
        ...

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids that structure a conversation and that plain text never becomes."""
        ...

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        ...

    @property
    def tool_call_format(self) -> str | None:
        """Name of the parser that fits the template, when that can be told."""
        ...

    def refusal(self, role: Role) -> str | None:
        """Why messages of a role cannot be appended to a conversation; None when they can."""
        ...

    def keeps_history(self, role: Role) -> bool:
        """Whether the template, once a message of `role` follows, still renders earlier turns as they were sampled.

        False for templates that strip earlier thinking, or move the tools: what is kept at run time then differs from
        what a deployment, which renders anew each turn, would see.
        """
        ...

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Ids of a conversation up to and with the generation prompt.

        What tools and users say in it never becomes a control token. Raises TemplateError.
        """
        ...

    def encode_delta(
        self, messages: Sequence[Message], *, last_id: int | None, answered_before: bool = False
    ) -> list[DeltaPiece]:
        """What follows an assistant turn whose last sampled id was `last_id` (None: it sampled nothing).

        `answered_before` tells that a tool's answer stands earlier in the conversation (DeepSeek's template opens its
        list of answers only once).

        The pieces hold the template's end-of-turn token only when `last_id` is another one, then the appended
        messages, then the generation prompt. `name` and `tool_call_id` of tool messages are shown where the template
        shows them. Raises TemplateError.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, a final end-of-turn id left out and every other token kept."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text, in which nothing becomes a control token."""
        ...
