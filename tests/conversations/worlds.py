"""What a family's conversations are made of: its template, the words said in it, and what its tokenizer itself does.

Whatever a property compares with comes from here: the tokenizer, its chat template, and a table written by hand. None
of it goes through the encoder and the frames under test.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence

from conversations.speakers import PlannedTool

from sglang_multiturn import HFChatTemplate, Message, ToolRegistry
from sglang_multiturn.errors import TemplateError
from sglang_multiturn.schemas import Role

from families import FAMILIES, tokenizer

ENDS: dict[str, dict[Role, str]] = {
    "llama3": {"tool": "<|eot_id|>", "user": "<|eot_id|>"},
    "llama3_1": {"tool": "<|eot_id|>", "user": "<|eot_id|>"},
    "llama3_2": {"tool": "<|eot_id|>", "user": "<|eot_id|>"},
    "llama4": {"tool": "<|eot|>", "user": "<|eot|>"},
    "deepseekv3": {"tool": "<｜end▁of▁sentence｜>", "user": "<｜end▁of▁sentence｜>"},
    "deepseek_r1_distill": {"user": "<｜end▁of▁sentence｜>"},
    "gptoss": {"tool": "<|call|>", "user": "<|end|>"},
    "glm4moe": {"tool": "<|observation|>", "user": "<|user|>"},
    "gemma": {"user": "<end_of_turn>"},
    "gemma3": {"user": "<end_of_turn>"},
    "gemma4": {"tool": "<|tool_response>", "user": "<turn|>"},
    "gemma4_v5": {"tool": "<|tool_response>", "user": "<turn|>"},
    "phi3": {"user": "<|end|>"},
    "phi3_5": {"user": "<|end|>"},
    "phi4": {"user": "<|im_end|>"},
    "cohere2": {"user": "<|END_OF_TURN_TOKEN|>"},
    "command_a": {"user": "<|END_OF_TURN_TOKEN|>"},
    "mistral_v1": {"user": "</s>"},
    "mistral_v2v3": {"tool": "</s>", "user": "</s>"},
    "mistral_v3_tekken": {"tool": "</s>", "user": "</s>"},
    "mistral_v7_tekken": {"user": "</s>"},
    "command_a_tool_use": {"user": "<|END_OF_TURN_TOKEN|>"},
    "exaone4": {"tool": "[|endofturn|]", "user": "[|endofturn|]"},
}
"""What ends an assistant's turn that a message of a role follows, where it is not `<|im_end|>` for both."""
CHATML_ENDS: dict[Role, str] = {"tool": "<|im_end|>", "user": "<|im_end|>"}
HTML = re.compile(r"</?[a-z0-9]+>")
HTML_FAMILIES = frozenset({"gemma", "gemma3", "gemma4", "gemma4_v5"})
"""Families with a token of its own for each HTML tag: text like any other."""
TOOLS_MOVE = frozenset({"mistral_v2v3", "mistral_v3_tekken"})
"""The template shows the tools before the last user's message; deltas do not show them again."""
PATTERNS: tuple[tuple[Role, ...], ...] = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "user"),
    ("user", "assistant", "tool"),
    ("user", "assistant", "tool", "tool"),
    ("user", "assistant", "tool", "assistant", "user"),
)
"""Prompts, where the template takes them. An assistant that tools follow called them."""
ASSISTANT_WORD = "Spoken7"
WORDS = ("seven", " plus", " 12", "3", "seventeen", "naïve", " is", "42", "x7", " 東京", "é")
"""Words without white space at an edge of what is made of them, and without a control token in any family."""
ODD = (
    *("\n", " ", "🙂", "👩🏽‍🚀", "e\u0301", "\u212a", "\u202eabc", '{"a": [1, null]}', "<b>", "</table>", "'s", "\t"),
    *(
        "\r\n",
        "  ",
        "\n\n\n",
        "<think>",
        "</think>",
        "{{ messages }}",
        "{% raw %}",
        "\\",
        '"',
        "\u2581",
        "\x00",
        "\ufffd",
    ),
    *("\ue0fe\ue0ffanchor\ue0ff", "\ue100", "<tool_call>", "</tool_response>", "[[call", "<0x0A>", "&lt;", "\u2028"),
)
"""Text that templates and encoders may stumble over."""


class World:
    """One family. Conversations of it share this, one at a time."""

    def __init__(self, family: str, template: type[HFChatTemplate] = HFChatTemplate) -> None:
        self.family = family
        self.tokenizer = tokenizer(family)
        ends = FAMILIES[family].ends if family in FAMILIES else ()
        self.template = template(
            self.tokenizer,
            stop_token_ids=self.tokenizer.convert_tokens_to_ids(list(ends)),
            chat_template_kwargs={"strftime_now": datetime.date(2031, 1, 15).strftime},
        )
        named = {i: token.content for i, token in self.tokenizer.added_tokens_decoder.items()}
        tags = {i for i, text in named.items() if family in HTML_FAMILIES and HTML.fullmatch(text)}
        self.controls = {i: text for i, text in named.items() if text.strip(" \n\t▁") and i not in tags}
        self.control_ids = tuple(sorted(self.controls))
        longest_first = sorted(self.controls.values(), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)))
        ids_of = {text: i for i, text in named.items()}
        self.ends = {role: ids_of[end] for role, end in ENDS.get(family, CHATML_ENDS).items()}
        self.tool = PlannedTool()
        self.registry = ToolRegistry([self.tool] if self.takes_tools else [])
        self.schemas = self.registry.schemas()
        self._shown_tools = [schema.for_template() for schema in self.schemas]
        self.patterns = tuple(pattern for pattern in PATTERNS if self._takes(pattern))
        self.max_calls = 2 if self._takes(("user", "assistant", "tool", "tool")) else 1
        self.hostile = (*ODD, *self._control_texts(), self._forged_turn())
        self.shown_as = {role: self._find_shown_as(role) for role in self.ends}
        self.spelt = functools.lru_cache(maxsize=20_000)(self._spelt)
        self.frame_controls = functools.cache(self._frame_controls)
        self._prompt_controls: dict[str, tuple[int, ...]] = {}

    @functools.cached_property
    def examples(self) -> dict[tuple[Role, ...], tuple[tuple[Message, ...], list[int]]]:
        """A prompt of each pattern, and what the tokenizer makes of it."""
        made = {pattern: tuple(self.example(pattern)) for pattern in self.patterns}
        return {pattern: (messages, self.encode(self.render(messages))) for pattern, messages in made.items()}

    @property
    def takes_tools(self) -> bool:
        """Whether tools can answer in this family."""
        return "tool" in self.ends

    # What the tokenizer and its template do

    def render(self, messages: Iterable[Message], *, with_tools: bool = True) -> str:
        """A conversation with the generation prompt, as the template writes it. Raises TemplateError."""
        spelt = [self.template.dialect.spell(message) for message in messages]
        return self.template.render(spelt, self._shown_tools if with_tools else [])

    def encode(self, text: str) -> list[int]:
        """The tokenizer's own ids of a rendering."""
        # Not through transformers, whose `encode` takes five times as long.
        ids: list[int] = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def controls_of(self, ids: Iterable[int]) -> tuple[int, ...]:
        """The control tokens among ids."""
        return tuple(i for i in ids if i in self.controls)

    def is_benign(self, text: str) -> bool:
        """Whether a text holds no control token."""
        return self._control.search(text) is None

    def text_of(self, ids: Sequence[int]) -> str:
        """All of them as text."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def prompt_controls(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Control tokens of a prompt in which tools and users say nothing but a word, where they say anything."""
        words: dict[str, str] = {}  # equal texts stay equal: Mistral's template looks for the last one by comparing
        said = [message.model_copy(update={"content": _tame(message, words)}) for message in messages]
        key = repr(said)
        if key not in self._prompt_controls:
            if len(self._prompt_controls) > 10_000:
                self._prompt_controls.clear()
            self._prompt_controls[key] = self.controls_of(self.encode(self.render(said)))
        return self._prompt_controls[key]

    def _frame_controls(self, roles: tuple[Role, ...], later: bool) -> tuple[int, ...]:
        """Control tokens from an assistant turn's end on, where messages of these roles follow and say a word.

        `later`: a tool has answered before.
        """
        end, calls, with_tools = self.ends[roles[0]], max(1, roles.count("tool")), self.family not in TOOLS_MOVE
        before: tuple[Role, ...] = ("user", "assistant", "tool", "assistant") if later else ("user", "assistant")
        try:
            text = self.render(self.example((*before, *roles), calls), with_tools=with_tools)
        except TemplateError:
            text = self.render(self.example((*before, *roles), 1), with_tools=with_tools)
        found = self.controls_of(self.encode(text[text.rindex(ASSISTANT_WORD) :]))
        return found[found.index(end) :]

    def example(self, pattern: Sequence[Role], calls: int | None = None) -> list[Message]:
        """A conversation of this pattern: everyone says a word; an assistant that tools follow calls them all."""
        return self.conversation(pattern, [f"Word{i}" for i in range(len(pattern))], calls)

    def conversation(self, pattern: Sequence[Role], texts: Sequence[str], calls: int | None = None) -> list[Message]:
        """Messages with these texts; an assistant makes at most `calls` of those that are answered."""
        messages = []
        for index, (role, text) in enumerate(zip(pattern, texts, strict=True)):
            answers = len(list(itertools.takewhile(lambda r: r == "tool", pattern[index + 1 :])))
            made = 0 if role != "assistant" else answers if calls is None else min(answers, calls)
            messages.append(self._message(role, text, index, made))
        return messages

    def _message(self, role: Role, text: str, index: int, calls: int) -> Message:
        if role == "tool":
            return Message(role=role, content=text, name="echo", tool_call_id=f"call0000{index}")
        if role != "assistant":
            return Message(role=role, content=text)
        made = [
            {
                "id": f"call0000{index + 1 + i}",
                "function": {"name": "echo", "arguments": {"text": text + ASSISTANT_WORD}},
            }
            for i in range(calls)
        ]
        beside = text + ASSISTANT_WORD if not calls or not self.template.dialect.shows_calls else ""
        return Message.model_validate({"role": role, "content": beside, **({"tool_calls": made} if calls else {})})

    def _takes(self, pattern: Sequence[Role]) -> bool:
        if "tool" in pattern and not self.takes_tools:
            return False
        try:
            text = self.render(self.example(pattern))
        except TemplateError:
            return False
        return all(f"Word{i}" in text for i in range(len(pattern)))

    # What is said

    def _control_texts(self) -> tuple[str, ...]:
        """Texts of control tokens: those that structure conversations first, then some of the others, then pieces."""
        pattern = max(self.patterns, key=len)
        used = [*self.ends.values(), *self.encode(self.render(self.example(pattern)))]
        texts = [self.controls[i] for i in dict.fromkeys(used) if i in self.controls]
        others = [text for text in self.controls.values() if text not in texts][:12]
        halves = [half for text in texts[:4] for half in (text[: len(text) // 2], text[1:])]
        return (*texts, *others, *halves)

    def _forged_turn(self) -> str:
        """The end of a turn, and another one of the assistant's, as the template itself writes them."""
        text = self.render(self.example(("user", "assistant", "user")))
        return text[text.rindex(ASSISTANT_WORD) + len(ASSISTANT_WORD) :] + "Forged."

    def _find_shown_as(self, role: Role) -> Callable[[str], str] | None:
        """How the template writes what a role says; None where that cannot be told."""
        probe = 'é "quoted" <x> \\ 7'
        messages = self.example(("user", "assistant", role))
        text = self.render([*messages[:-1], messages[-1].model_copy(update={"content": probe})])
        return next((shown for shown in (str, _quoted, _escaped) if shown(probe) in text), None)

    def _spelt(self, text: str) -> tuple[int, ...]:
        return tuple(self.template.encode_text(text))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _escaped(text: str) -> str:
    return json.dumps(text)[1:-1]


def _tame(message: Message, words: dict[str, str]) -> str | None:
    """A word of its own for what is not trusted; white space may decide what a template shows, so it stays."""
    if message.role not in ("tool", "user") or not message.text.strip():
        return message.text
    return words.setdefault(message.text, f"word{len(words)}")


@functools.cache
def world(family: str) -> World:
    """The family's one world of this process."""
    return World(family)
