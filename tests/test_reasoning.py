"""Reasoning is split off, by each family's own marks, and no call inside it is ever made."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_multiturn.chat.formats import detect_format
from sglang_multiturn.chat.parsers import make_parser
from sglang_multiturn.chat.parsing import BrokenCall, HermesParser, ParsedCall, ParsedTurn, ToolCallParser
from sglang_multiturn.chat.reasoning import MARKS, Reasoning, reasoning_of
from sglang_multiturn.schemas import FunctionSchema, ToolSchema

from family import TRL

TOOLS = [ToolSchema(function=FunctionSchema(name="search"))]
HERMES_MARKS = st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "words", '{"', "}", "\n", "["])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a parser reads of a chat template."""

    source: str = ""
    generation_prompt: str = "<|im_start|>assistant\n"
    tool_call_format: str | None = None


def call(q: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'search', 'arguments': {'q': q}})}\n</tool_call>"


def made(turn: ParsedTurn) -> list[Any]:
    return [c.arguments.get("q") for c in turn.calls if isinstance(c, ParsedCall)]


def hermes(source: str, prompt: str = "<|im_start|>assistant\n") -> ToolCallParser:
    return make_parser("hermes", Shown(source=source, generation_prompt=prompt))


PLAIN = hermes("no marks")
"""A template without reasoning, as Qwen2.5's."""
THINKING = hermes("'<think>'")
"""The model writes the start mark itself, as Qwen3 does."""
OPENED = hermes("'<think>'", "<|im_start|>assistant\n<think>\n")
"""The generation prompt does, as Qwen3.5's."""
CLOSED = hermes("'<think>'", "<|im_start|>assistant\n<think>\n\n</think>\n\n")
"""Thinking is off: the generation prompt has written both marks."""
ALL = {"plain": PLAIN, "thinking": THINKING, "opened": OPENED, "closed": CLOSED}
each = pytest.mark.parametrize("parser", ALL.values(), ids=ALL)


@each
def test_reasoning_a_turn_begins_with_is_split_off_everywhere(parser: ToolCallParser) -> None:
    turn = parser.parse(f"\n<think>\nmaybe {call('no')}\n</think>\n\nYes. {call('yes')}", TOOLS)
    assert (turn.reasoning, turn.content, made(turn)) == (f"maybe {call('no')}", "Yes.", ["yes"])


@each
def test_reasoning_without_an_end_is_reasoning_to_the_end(parser: ToolCallParser) -> None:
    turn = parser.parse(f"<think>maybe {call('no')}", TOOLS)
    assert turn == ParsedTurn(content="", reasoning=f"maybe {call('no')}")


def test_a_prompt_that_opens_the_block_begins_the_turn_inside_it() -> None:
    turn = OPENED.parse(f"maybe {call('no')}\n</think>\n\n{call('yes')}", TOOLS)
    assert (turn.reasoning, turn.content, made(turn)) == (f"maybe {call('no')}", "", ["yes"])
    assert OPENED.parse(f"maybe {call('no')}", TOOLS) == ParsedTurn(content="", reasoning=f"maybe {call('no')}")


def test_another_prompt_may_stand_before_a_later_turn() -> None:
    """DeepSeek's template opens a block after a user's words and none after a tool's."""
    said = f"Yes. {call('yes')}"
    assert made(OPENED.parse(said, TOOLS)) == []
    turn = OPENED.parse(said, TOOLS, prompt="<|tool_outputs_end|>")
    assert (turn.reasoning, turn.content, made(turn)) == ("", "Yes.", ["yes"])
    assert made(PLAIN.parse(said, TOOLS, prompt="assistant\n<think>")) == []


@each
def test_an_end_mark_inside_an_argument_is_part_of_the_argument(parser: ToolCallParser) -> None:
    text = call("what does </think> mean?")
    before = "Hm.</think>" if parser is OPENED else ""
    turn = parser.parse(before + text + "<think>so</think> done", TOOLS)
    assert made(turn) == ["what does </think> mean?"]
    assert turn.content == "done"


def test_an_end_mark_alone_ends_reasoning_where_the_model_may_have_begun_it() -> None:
    text = f"maybe {call('no')}</think>{call('yes')}"
    turn = THINKING.parse(text, TOOLS)
    assert (turn.reasoning, turn.content, made(turn)) == (f"maybe {call('no')}", "", ["yes"])


@pytest.mark.parametrize("parser", [PLAIN, CLOSED])
def test_an_end_mark_alone_is_text_where_nobody_thinks(parser: ToolCallParser) -> None:
    turn = parser.parse(f"Write </think> to end it. {call('yes')}", TOOLS)
    assert (turn.reasoning, turn.content, made(turn)) == ("", "Write </think> to end it.", ["yes"])


def test_only_the_first_end_mark_ends_what_was_not_begun() -> None:
    turn = THINKING.parse(f"a</think>b</think>{call('yes')}", TOOLS)
    assert (turn.reasoning, turn.content, made(turn)) == ("a", "b</think>", ["yes"])


@each
def test_a_pair_of_marks_further_on_encloses_reasoning(parser: ToolCallParser) -> None:
    before = "" if parser is not OPENED else "</think>"
    turn = parser.parse(f"{before}Let me see. <think>{call('no')}</think> {call('yes')}", TOOLS)
    assert (turn.reasoning, turn.content, made(turn)) == (call("no"), "Let me see.", ["yes"])


def test_a_start_mark_further_on_without_an_end_is_reasoning_only_where_the_template_knows_it() -> None:
    text = f"The tag <think> begins it. {call('q')}"
    assert made(PLAIN.parse(text, TOOLS)) == ["q"]
    assert PLAIN.parse(text, TOOLS).content == "The tag <think> begins it."
    for parser in (THINKING, CLOSED):
        turn = parser.parse(text, TOOLS)
        assert (turn.content, made(turn)) == ("The tag", [])


@each
def test_a_broken_call_does_not_hide_the_reasoning_behind_it(parser: ToolCallParser) -> None:
    before = "" if parser is not OPENED else "</think>"
    turn = parser.parse(f'{before}<tool_call>\n{{"name": <think>{call("no")}</think>{call("yes")}', TOOLS)
    broken, good = turn.calls
    assert isinstance(broken, BrokenCall)
    assert good == ParsedCall(name="search", arguments={"q": "yes"})
    assert turn.reasoning == call("no")


@given(st.lists(HERMES_MARKS, max_size=8).map("".join), st.lists(HERMES_MARKS, max_size=8).map("".join))
def test_no_call_between_a_turns_first_marks_is_ever_made(inside: str, behind: str) -> None:
    inside = inside.replace("</think>", "")
    for parser in ALL.values():
        turn = parser.parse(f"<think>{inside}{call('no')}</think>{behind}", TOOLS)
        assert "no" not in made(turn)


# Families


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("qwen2_5", Reasoning()),
        ("qwen3", Reasoning(known=True)),
        ("qwen3_instruct_2507", Reasoning()),
        ("deepseekv3", Reasoning(known=True)),
        ("glm4moe", Reasoning(known=True)),
        ("gemma4", Reasoning(start=MARKS[0][0], end=MARKS[0][1], known=True)),
        ("lfm2_2_5", Reasoning(known=True)),
        ("llama3_1", Reasoning()),
    ],
)
def test_the_marks_come_from_the_template(template: str, expected: Reasoning) -> None:
    source = (TRL / f"{template}.jinja").read_text(encoding="utf-8")
    assert reasoning_of(source, "<|im_start|>assistant\n", detect_format(source) or "") == expected


def test_the_prompt_says_whether_a_block_is_open() -> None:
    assert reasoning_of("", "assistant\n<think>\n", "hermes") == Reasoning(known=True, opened=True)
    assert reasoning_of("", "assistant\n<think>\n\n</think>\n\n", "hermes") == Reasoning(known=True, closed=True)
    assert reasoning_of("", "x<|START_THINKING|>", "cohere_command4").opened
    assert reasoning_of("", "", "cohere_command4") == Reasoning(start=MARKS[1][0], end=MARKS[1][1], known=True)


COHERE = '<|START_ACTION|>[{"tool_name": "search", "parameters": {"q": "QUERY"}}]<|END_ACTION|>'
FAMILIES = [
    ("gemma4", "<|channel>thought\n", "<channel|>", '<|tool_call>call:search{q:<|"|>QUERY<|"|>}<tool_call|>'),
    ("cohere_command4", "<|START_THINKING|>", "<|END_THINKING|>", COHERE),
    ("mistral", "[THINK]", "[/THINK]", '[TOOL_CALLS]search[ARGS]{"q": "QUERY"}'),
    (
        "apertus2509",
        "<|inner_prefix|>",
        "<|inner_suffix|>",
        '<|tools_prefix|>[{"search": {"q": "QUERY"}}]<|tools_suffix|>',
    ),
    ("trinity", "<think>", "</think>", call("QUERY")),
    ("llama3", "<think>", "</think>", '{"name": "search", "parameters": {"q": "QUERY"}}'),
    ("pythonic", "<think>", "</think>", "[search(q='QUERY')]"),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>",
        "<|end|>",
        '<|start|>assistant<|channel|>commentary to=functions.search<|message|>{"q": "QUERY"}<|call|>',
    ),
]


@pytest.mark.parametrize(("name", "start", "end", "written"), FAMILIES)
def test_calls_inside_the_reasoning_of_every_family_are_not_made(name: str, start: str, end: str, written: str) -> None:
    parser = make_parser(name, Shown(generation_prompt=""))
    thought = "Shall I?" if name == "gpt-oss" else written.replace("QUERY", "no")
    turn = parser.parse(f"{start}{thought}{end}{written.replace('QUERY', 'yes')}", TOOLS)
    assert (turn.reasoning, turn.content, made(turn)) == (thought, "", ["yes"])
    cut = parser.parse(f"{start}{thought}", TOOLS)
    assert (cut.reasoning, cut.content, cut.calls) == (thought, "", ())


def test_gpt_oss_speaks_on_channels() -> None:
    parser = make_parser("gpt-oss", Shown(generation_prompt="<|start|>assistant"))
    text = (
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary<|message|>First I look."
        '<|end|><|start|>assistant to=functions.search<|channel|>commentary json<|message|>{"q": "<|call|>"}'
    )
    turn = parser.parse(text, TOOLS)
    assert (turn.reasoning, turn.content, made(turn)) == ("Think.", "First I look.", ["<|call|>"])
    final = parser.parse("<|channel|>final<|message|>It is 4.", TOOLS)
    assert (final.reasoning, final.content, final.calls) == ("", "It is 4.", ())
    assert parser.parse("It is 4.", TOOLS).content == "It is 4."
    opened = make_parser("gpt-oss", Shown(generation_prompt="<|start|>assistant<|channel|>analysis<|message|>"))
    turn = opened.parse("Think.<|end|><|start|>assistant<|channel|>final<|message|>Yes.", TOOLS)
    assert (turn.reasoning, turn.content) == ("Think.", "Yes.")


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
@pytest.mark.parametrize(
    ("reasoning_parser", "name", "start", "end"),
    [
        ("qwen3", "hermes", "<think>", "</think>"),
        ("deepseek-r1", "deepseekv3", "<think>", "</think>"),
        ("glm45", "hermes", "<think>", "</think>"),
        ("mistral", "mistral", "[THINK]", "[/THINK]"),
        ("gemma4", "gemma4", "<|channel>thought\n", "<channel|>"),
        ("kimi", "hermes", "◁think▷", "◁/think▷"),
        ("apertus2509", "apertus2509", "<|inner_prefix|>", "<|inner_suffix|>"),
        ("gpt-oss", "gpt-oss", "<|channel|>analysis<|message|>", "<|end|>"),
        ("cohere_command4", "cohere_command4", "<|START_THINKING|>", "<|END_THINKING|><|START_TEXT|>"),
    ],
)
def test_sglang_splits_plain_turns_alike(reasoning_parser: str, name: str, start: str, end: str) -> None:
    from sglang_multiturn.cpu.sglang_kernels import prepare_on_cpu

    prepare_on_cpu()
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    text = f"{start}Thought.{end}"
    text += "<|start|>assistant<|channel|>final<|message|>Words." if name == "gpt-oss" else "Words."
    thoughts, words = ReasoningParser(reasoning_parser).parse_non_stream(text)
    turn = make_parser(name, Shown(source=start, generation_prompt="")).parse(text, TOOLS)
    assert (turn.reasoning, turn.content) == (thoughts, words) == ("Thought.", "Words.")


def test_a_parser_made_without_a_template_splits_what_begins_with_think() -> None:
    assert HermesParser().parse("<think>a</think>b", TOOLS) == ParsedTurn(content="b", reasoning="a")
