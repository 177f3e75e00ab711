"""A chat template and tokenizer that need no model: ChatML over bytes.

One token a byte (0 to 255) and three control tokens. For dry runs, tests of tools and the light installation; it
keeps every property of a real template, in particular that no text can become a control token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from sglang_multiturn.chat.template import DeltaPiece
from sglang_multiturn.schemas import Message, Role, ToolSchema
from sglang_multiturn.tokens import Origin

END_OF_TEXT, IM_START, IM_END = 256, 257, 258
_CONTROL_TEXT = {END_OF_TEXT: "<|endoftext|>", IM_START: "<|im_start|>", IM_END: "<|im_end|>"}


class ByteChatML:
    """ChatML in Qwen's layout, tools and calls included, over bytes."""

    tool_call_format: str | None = "hermes"
    stop_token_ids: tuple[int, ...] = (IM_END, END_OF_TEXT)
    end_ids: frozenset[int] = frozenset({IM_END})
    control_ids: frozenset[int] = frozenset(_CONTROL_TEXT)
    vocab_size: int = 259
    source: str = ""
    generation_prompt: str = "<|im_start|>assistant\n"

    def refusal(self, role: Role) -> str | None:
        """None: messages of every role can be appended."""
        return None

    def keeps_history(self, role: Role) -> bool:
        """True: earlier turns are never rendered otherwise."""
        return True

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Ids of a conversation up to and with the generation prompt."""
        rest = list(messages)
        system = rest.pop(0).text if rest and rest[0].role == "system" else ""
        if tools:
            shown = "\n".join(json.dumps(tool.for_template(), ensure_ascii=False) for tool in tools)
            system += f"\n<tools>\n{shown}\n</tools>"
        ids = [*self._turn("system", system)] if system else []
        while rest:
            merged = 1
            if rest[0].role == "tool":
                merged = next((i for i, m in enumerate(rest) if m.role != "tool"), len(rest))
                ids += self._turn("user", "\n".join(_tool_text(m.text) for m in rest[:merged]))
            else:
                ids += self._turn(rest[0].role, _text_with_calls(rest[0]))
            del rest[:merged]
        return [*ids, *self._opening("assistant")]

    def encode_delta(
        self, messages: Sequence[Message], *, last_id: int | None, answered_before: bool = False
    ) -> list[DeltaPiece]:
        """What follows an assistant turn; consecutive tool messages share one user turn."""
        pieces: list[DeltaPiece] = []
        boundary = [] if last_id == IM_END else [IM_END]
        boundary += self.encode_text("\n")
        for index, message in enumerate(messages):
            tool = message.role == "tool"
            before = index > 0 and messages[index - 1].role == "tool" and tool
            boundary += self.encode_text("\n") if before else self._opening("user" if tool else message.role)
            boundary += self.encode_text("<tool_response>\n") if tool else []
            pieces.append(DeltaPiece(ids=boundary, origin=Origin.BOUNDARY))
            origin = Origin.TOOL if tool else Origin.USER
            pieces.append(DeltaPiece(ids=self.encode_text(message.text), origin=origin, message_index=index))
            boundary = self.encode_text("\n</tool_response>") if tool else []
            if not (tool and index + 1 < len(messages) and messages[index + 1].role == "tool"):
                boundary += [IM_END, *self.encode_text("\n")]
        pieces.append(DeltaPiece(ids=boundary + self._opening("assistant"), origin=Origin.BOUNDARY))
        return [piece for piece in pieces if piece.ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, a final end-of-turn id left out; broken UTF-8 becomes U+FFFD."""
        kept = ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids
        raw = b"".join(_CONTROL_TEXT[i].encode() if i in _CONTROL_TEXT else bytes([i]) for i in kept)
        return raw.decode("utf-8", errors="replace")

    def encode_text(self, text: str) -> list[int]:
        """One id a byte."""
        return list(text.encode("utf-8"))

    def _opening(self, role: str) -> list[int]:
        return [IM_START, *self.encode_text(f"{role}\n")]

    def _turn(self, role: str, text: str) -> list[int]:
        return [*self._opening(role), *self.encode_text(text), IM_END, *self.encode_text("\n")]


def _tool_text(text: str) -> str:
    return f"<tool_response>\n{text}\n</tool_response>"


def _text_with_calls(message: Message) -> str:
    calls = [
        "<tool_call>\n"
        + json.dumps({"name": call.function.name, "arguments": call.function.arguments}, ensure_ascii=False)
        + "\n</tool_call>"
        for call in message.tool_calls or ()
    ]
    return "\n".join([message.text, *calls] if message.text else calls)
