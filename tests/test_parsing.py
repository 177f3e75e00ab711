"""Tool-call parsing: what is a call, what is a broken one, and that SGLang's own parser agrees."""

from __future__ import annotations

import importlib.util
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_multiturn.chat.byte_chatml import ByteChatML
from sglang_multiturn.chat.parsers import make_parser
from sglang_multiturn.chat.parsing import BrokenCall, HermesParser, ParsedCall, ToolCallParser
from sglang_multiturn.errors import ConfigError
from sglang_multiturn.schemas import FunctionSchema, ToolSchema

TOOLS = [ToolSchema(function=FunctionSchema(name="calculator")), ToolSchema(function=FunctionSchema(name="search"))]
parse = HermesParser().parse


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def test_two_calls_with_words_around_them_come_in_order() -> None:
    text = (
        "Let me see. "
        + call('{"name": "calculator", "arguments": {"expression": "1+1"}}')
        + " and "
        + call('{"name":"search","arguments":{"q":"é"}}')
        + " done"
    )
    turn = parse(text, TOOLS)
    assert turn.content == "Let me see.  and  done"
    assert turn.calls == (
        ParsedCall(name="calculator", arguments={"expression": "1+1"}),
        ParsedCall(name="search", arguments={"q": "é"}),
    )


def test_no_call_is_no_call() -> None:
    turn = parse("The answer is 4.", TOOLS)
    assert (turn.content, turn.calls) == ("The answer is 4.", ())


def test_a_closing_tag_inside_a_string_ends_nothing() -> None:
    turn = parse(call('{"name": "search", "arguments": {"q": "</tool_call>"}}') + "after", TOOLS)
    assert turn.calls == (ParsedCall(name="search", arguments={"q": "</tool_call>"}),)
    assert turn.content == "after"


def test_calls_inside_reasoning_are_not_calls() -> None:
    inner = call('{"name": "search", "arguments": {}}')
    turn = parse(f"<think>maybe {inner}</think>\n\nNo.", TOOLS)
    assert (turn.calls, turn.content, turn.reasoning) == ((), "No.", f"maybe {inner}")
    assert parse(f"<think>never closed {inner}", TOOLS).calls == ()
    both = parse(f"<think>{inner}</think>" + call('{"name": "search", "arguments": {"q": "1"}}'), TOOLS)
    assert both.calls == (ParsedCall(name="search", arguments={"q": "1"}),)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"name": "search", "arguments": {"q": }}', "not valid JSON"),
        ('{"name": "search", "arguments": {"q": NaN}}', "not valid JSON"),
        ('{"name": "search", "arguments": {"q": "cut', "not valid JSON"),
        ("[1, 2]", 'must be a JSON object with "name" and "arguments"'),
        ('{"arguments": {}}', 'has no "name"'),
        ('{"name": 3, "arguments": {}}', 'has no "name"'),
        ('{"name": "search", "arguments": [1]}', "must be a JSON object, not list"),
        ('{"name": "search", "arguments": "q"}', "must be a JSON object, not a string"),
        ('{"name": "search", "arguments": {}} {"x": 1}', "must be followed by </tool_call>"),
        ("", "is empty"),
        ("[" * 50_000, "nested too deeply"),
    ],
)
def test_a_broken_call_says_what_is_wrong_and_a_good_one_beside_it_is_kept(body: str, reason: str) -> None:
    good = call('{"name": "calculator", "arguments": {"expression": "2"}}')
    first, second = parse(call(body) + good, TOOLS).calls
    assert isinstance(first, BrokenCall)
    assert reason in first.reason
    assert second == ParsedCall(name="calculator", arguments={"expression": "2"})


def test_a_call_that_was_never_closed_is_broken() -> None:
    (broken,) = parse('<tool_call>\n{"name": "search", "arguments": {}}', TOOLS).calls
    assert isinstance(broken, BrokenCall)
    assert "must be followed by </tool_call>" in broken.reason


def test_arguments_given_as_a_json_string_are_read() -> None:
    (parsed,) = parse(call('{"name": "search", "arguments": "{\\"q\\": 1}"}'), TOOLS).calls
    assert parsed == ParsedCall(name="search", arguments={"q": 1})


@given(st.text(alphabet='<>/tool_call{}[]":,name argumets\n01é\\', max_size=200))
def test_nothing_a_model_writes_makes_the_parser_raise(text: str) -> None:
    parse(text, TOOLS)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.dictionaries(st.text(min_size=1, max_size=5), json_values, min_size=1, max_size=3), max_size=3))
def test_well_formed_calls_round_trip(all_arguments: list[dict[str, object]]) -> None:
    text = "\n".join(call(json.dumps({"name": "search", "arguments": a})) for a in all_arguments)
    assert [c.arguments for c in parse(text, TOOLS).calls if isinstance(c, ParsedCall)] == all_arguments


def test_auto_takes_what_fits_the_template() -> None:
    assert isinstance(make_parser("auto", ByteChatML()), HermesParser)


@pytest.fixture(scope="module")
def sglang_parser() -> ToolCallParser:
    return make_parser("qwen25", ByteChatML())


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
class TestAgainstSGLang:
    """Where SGLang is installed its `FunctionCallParser` serves every other format, and agrees on this one."""

    @pytest.mark.parametrize(
        "text",
        [
            "The answer is 4.",
            call('{"name": "calculator", "arguments": {"expression": "1+1"}}'),
            "Hm. " + call('{"name": "search", "arguments": {"q": "x", "n": [1, {"a": null}]}}'),
            call('{"name": "calculator", "arguments": {"expression": "1"}}')
            + "\n"
            + call('{"name": "search", "arguments": {"q": "2"}}'),
        ],
    )
    def test_both_read_well_formed_text_alike(self, sglang_parser: ToolCallParser, text: str) -> None:
        ours, theirs = parse(text, TOOLS), sglang_parser.parse(text, TOOLS)
        assert ours.calls == theirs.calls
        assert ours.content == theirs.content

    def test_what_sglang_drops_comes_back_as_a_broken_call(self, sglang_parser: ToolCallParser) -> None:
        for text in (call('{"name": "nope", "arguments": {}}'), call('{"name": "search", "arguments": ')):
            (broken,) = sglang_parser.parse(text, TOOLS).calls
            assert isinstance(broken, BrokenCall)
            assert "calculator, search" in broken.reason

    def test_another_format_is_read_by_sglangs_own_parser(self) -> None:
        llama = make_parser("llama3", ByteChatML())
        turn = llama.parse('<|python_tag|>{"name": "search", "parameters": {"q": "x"}}', TOOLS)
        assert turn.calls == (ParsedCall(name="search", arguments={"q": "x"}),)

    def test_an_unknown_parser_is_told_with_a_suggestion(self) -> None:
        with pytest.raises(ConfigError, match="no parser named 'llama33'; did you mean 'llama3'"):
            make_parser("llama33", ByteChatML())
