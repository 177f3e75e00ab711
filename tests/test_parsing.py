"""Tool-call parsing: what is a call, what is a broken one and why, and which parser a name means.

The format here is Hermes's; `test_formats` has all of them, `test_reasoning` what is no call because it is a thought.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_multiturn.chat.byte_chatml import ByteChatML
from sglang_multiturn.chat.parsers import SGLangParser, make_parser
from sglang_multiturn.chat.parsing import BrokenCall, BrokenKind, HermesParser, ParsedCall
from sglang_multiturn.chat.reasoning import Reasoning
from sglang_multiturn.chat.value_schemas import plain_schemas
from sglang_multiturn.errors import ConfigError
from sglang_multiturn.schemas import FunctionSchema, ToolSchema

TOOLS = [ToolSchema(function=FunctionSchema(name="calculator")), ToolSchema(function=FunctionSchema(name="search"))]
parse = HermesParser().parse
needs_sglang = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a parser reads of a chat template."""

    source: str = ""
    generation_prompt: str = ""
    tool_call_format: str | None = None


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


def test_marks_inside_a_string_begin_and_end_nothing() -> None:
    turn = parse(call('{"name": "search", "arguments": {"q": "</tool_call><tool_call><think>"}}') + "after", TOOLS)
    assert turn.calls == (ParsedCall(name="search", arguments={"q": "</tool_call><tool_call><think>"}),)
    assert turn.content == "after"


@pytest.mark.parametrize(
    ("body", "kind", "reason"),
    [
        ('{"name": "search", "arguments": {"q": }}', "json", "not valid JSON (Expecting value)"),
        ('{"name": "search", "arguments": {"q": NaN}}', "json", "NaN is not JSON"),
        ('{"name": "search", "arguments": {"q": -Infinity}}', "json", "-Infinity is not JSON"),
        ('{"name": "search", "arguments": {"q": 1e400}}', "json", "1e400 is too large a number"),
        ('{"name": "search", "arguments": {"q": ' + "9" * 5000 + "}}", "json", "too long a number"),
        ('{"name": "search", "arguments": {"q": "cut', "json", "not valid JSON"),
        ('{"name": "search", "arguments": {"q": "a\nb"}}', "json", "Invalid control character"),
        ('{"name": "search", "arguments": {"q": "\\ud800"}}', "json", "invalid characters"),
        ('{"name": "search", "arguments": "{\\"q\\": \\"\\\\ud800\\"}"}', "json", "invalid characters"),
        ('{"name": "search", "arguments": ' + '{"a":' * 500 + "1" + "}" * 501, "json", "nested too deeply"),
        ("[" * 50_000, "json", "nested too deeply"),
        ('{"name": "search", "arguments": {"q": "' + "x" * 100_000 + '"}}', "json", "longer than 100,000"),
        ("[1, 2]", "envelope", 'must be a JSON object with "name" and "arguments"'),
        ('{"arguments": {}}', "name", 'has no "name"'),
        ('{"name": 3, "arguments": {}}', "name", 'has no "name"'),
        ('{"name": " ", "arguments": {}}', "name", 'has no "name"'),
        ('{"name": "\\udfff", "arguments": {}}', "name", "must be plain text"),
        ('{"name": "' + "x" * 201 + '", "arguments": {}}', "name", "1 to 200 characters"),
        ('{"name": "search", "arguments": [1]}', "arguments", "must be a JSON object, not list"),
        ('{"name": "search", "arguments": 1.5}', "arguments", "must be a JSON object, not float"),
        ('{"name": "search", "arguments": "q"}', "arguments", "must be a JSON object, not a string"),
        ('{"name": "search", "arguments": "[1]"}', "arguments", "must be a JSON object, not list"),
        ('{"name": "search", "arguments": "\\"{}\\""}', "arguments", "must be a JSON object, not str"),
        ('{"name": "search", "arguments": {}} {"x": 1}', "envelope", "must be followed by </tool_call>"),
        ("", "envelope", "is empty"),
    ],
)
def test_a_broken_call_says_what_is_wrong_and_a_good_one_beside_it_is_kept(body: str, kind: str, reason: str) -> None:
    good = call('{"name": "calculator", "arguments": {"expression": "2"}}')
    first, second = parse(call(body) + good, TOOLS).calls
    assert isinstance(first, BrokenCall)
    assert reason in first.reason
    assert first.kind is BrokenKind(kind)
    assert second == ParsedCall(name="calculator", arguments={"expression": "2"})


def test_a_broken_call_tells_the_tool_it_meant_where_it_can() -> None:
    names = [
        parse(call(body), TOOLS).calls[0].name
        for body in ('{"name": "search", "arguments": {"q": }}', '{"name": "search", "arguments": 3}', '{"q": ')
    ]
    assert names == ["search", "search", ""]


@pytest.mark.parametrize("text", ['<tool_call>\n{"name": "search", "arguments": {}}', "<tool_call>", "<tool_call>{"])
def test_a_call_that_was_never_closed_is_truncated(text: str) -> None:
    (broken,) = parse(text, TOOLS).calls
    assert isinstance(broken, BrokenCall)
    assert broken.kind is BrokenKind.TRUNCATED
    assert "must be followed by </tool_call>" in broken.reason


def test_a_call_not_closed_before_the_next_is_broken_and_the_next_is_kept() -> None:
    first, second = parse(
        '<tool_call>\n{"name": "search", "arguments": {}}\n' + call('{"name": "search"}'), TOOLS
    ).calls
    assert isinstance(first, BrokenCall)
    assert (first.kind, first.name) == (BrokenKind.ENVELOPE, "search")
    assert second == ParsedCall(name="search", arguments={})


def test_a_closing_mark_without_an_opening_one_is_a_broken_call_unless_there_is_another() -> None:
    (broken,) = parse('{"name": "search", "arguments": {}}\n</tool_call>', TOOLS).calls
    assert isinstance(broken, BrokenCall)
    assert broken.reason == "</tool_call> stands where no tool call was begun."
    turn = parse(call('{"name": "search"}') + "</tool_call>", TOOLS)
    assert turn.calls == (ParsedCall(name="search", arguments={}),)


def test_arguments_given_as_a_json_string_are_read_once() -> None:
    (parsed,) = parse(call('{"name": "search", "arguments": "{\\"q\\": \\"{}\\"}"}'), TOOLS).calls
    assert parsed == ParsedCall(name="search", arguments={"q": "{}"})


def test_the_last_of_duplicate_keys_counts() -> None:
    (parsed,) = parse(call('{"name": "search", "arguments": {"q": 1, "q": 2}}'), TOOLS).calls
    assert parsed == ParsedCall(name="search", arguments={"q": 2})


def test_parameters_are_arguments() -> None:
    (parsed,) = parse(call('{"name": "search", "parameters": {"q": 1}}'), TOOLS).calls
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


def test_more_calls_than_anyone_makes_are_not_read_and_that_is_said() -> None:
    one = call('{"name": "search"}')
    assert parse(one * 128, TOOLS).calls == (ParsedCall(name="search", arguments={}),) * 128
    *made, last = parse(one * 1000 + "words", TOOLS).calls
    assert made == [ParsedCall(name="search", arguments={})] * 128
    assert isinstance(last, BrokenCall)
    assert last.reason == "This turn holds too many or too long tool calls; only the first 128 were read."


def test_more_text_of_calls_than_anyone_writes_is_not_read_and_that_is_said() -> None:
    long = call(json.dumps({"name": "search", "arguments": {"q": "x" * 90_000}}))
    assert len(parse(long * 3, TOOLS).calls) == 3
    *made, last = parse(long * 5, TOOLS).calls
    assert all(isinstance(one, ParsedCall) for one in made)
    assert isinstance(last, BrokenCall)
    assert last.reason == "This turn holds too many or too long tool calls; only the first 3 were read."


# Bare objects and lists


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "search", "parameters": {"q": 1}}', [("search", {"q": 1})]),
        ("{'name': 'search', 'parameters': {'q': True}}", [("search", {"q": True})]),
        ('{"name": "search"}; {"type": "function", "name": "x", "parameters": {}}', [("search", {}), ("x", {})]),
        ('{"name": "Bob", "age": 3}', []),
        ('{"answer": {"name": "search"}}', []),
        ('I say {"name": "search", "parameters": {}}', []),
        ('I say <|python_tag|>{"name": "search", "parameters": {}}<|eom_id|>', [("search", {})]),
    ],
)
def test_llama_3_writes_calls_first_or_behind_its_mark(text: str, calls: list[tuple[str, dict[str, object]]]) -> None:
    turn = make_parser("llama3", Shown()).parse(text, TOOLS)
    assert turn.calls == tuple(ParsedCall(name=name, arguments=arguments) for name, arguments in calls)


def test_a_list_with_a_bracket_missing_loses_one_call_and_no_other() -> None:
    text = (
        '[TOOL_CALLS] [{"name": "search", "arguments": {"q": 1}}, {"name": "search", "arguments": {"q": 2}, '
        '{"name": "calculator", "arguments": {"expression": "3"}}]'
    )
    first, broken, last = make_parser("mistral", Shown()).parse(text, TOOLS).calls
    assert first == ParsedCall(name="search", arguments={"q": 1})
    assert isinstance(broken, BrokenCall)
    assert (broken.kind, broken.name) == (BrokenKind.JSON, "search")
    assert last == ParsedCall(name="calculator", arguments={"expression": "3"})


@pytest.mark.parametrize("text", ["search(q=(2)", "search(q='it's)", "search(q='2)"])
def test_a_python_call_without_its_end_loses_no_other_of_a_known_tool(text: str) -> None:
    pythonic = make_parser("pythonic", Shown())
    first, broken, last = pythonic.parse(f"[search(q=1), {text}, search(q=3)]", TOOLS).calls
    assert (first, last) == (
        ParsedCall(name="search", arguments={"q": 1}),
        ParsedCall(name="search", arguments={"q": 3}),
    )
    assert isinstance(broken, BrokenCall)
    assert broken.name == "search"


def test_brackets_in_prose_are_no_python_calls() -> None:
    assert make_parser("pythonic", Shown()).parse("Read [the docs](a=1) or [see(it)].", TOOLS).calls == ()


# Which parser


def test_auto_takes_what_fits_the_template() -> None:
    assert isinstance(make_parser("auto", ByteChatML()), HermesParser)


@pytest.mark.parametrize("name", ["hermes", "qwen", "qwen25", "trinity"])
def test_the_names_of_the_hermes_format_mean_our_parser(name: str) -> None:
    assert isinstance(make_parser(name, ByteChatML()), HermesParser)


def test_auto_that_cannot_tell_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"set tool_parser to one of apertus2509, .*, gpt-oss, .*, trinity"):
        make_parser("auto", Shown(source="{{ messages }}"))


@needs_sglang
def test_an_unknown_parser_is_told_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="no parser named 'llama33'; did you mean 'llama3'"):
        make_parser("llama33", ByteChatML())


@needs_sglang
def test_a_format_only_sglang_knows_is_read_by_sglang_a_turn_at_a_time() -> None:
    parser = SGLangParser("interns1", Reasoning())
    good = '<|action_start|> <|plugin|>\n{"name": "search", "parameters": {"q": 1}}<|action_end|>'
    turn = parser.parse(f"<think>{good}</think>Words. {good}", TOOLS)
    assert (turn.reasoning, turn.content) == (good, "Words.")
    assert turn.calls == (ParsedCall(name="search", arguments={"q": 1}),)
    assert parser.parse("Words.", TOOLS).calls == ()
    for text in (good.replace("search", "nope"), good.replace("1}", "}"), good + "x" * 200_000):
        (broken,) = parser.parse(text, TOOLS).calls
        assert isinstance(broken, BrokenCall)
        assert broken.reason == "The tool call could not be read, or names no known tool (calculator, search)."


@pytest.mark.parametrize(
    ("schema", "plain"),
    [
        ({"type": "integer"}, {"type": "integer"}),
        ({"type": ["integer", "null"]}, {"type": "integer"}),
        ({"type": ["integer", "boolean"]}, {"type": "object"}),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        ({"oneOf": [{"type": "null"}, {"$ref": "#/$defs/Point"}]}, {"type": "object"}),
        ({"$ref": "#/$defs/Loop"}, {}),
        ({"$ref": "https://elsewhere"}, {}),
        ({"enum": ["a", "b"]}, {"type": "string"}),
        ({"const": 1}, {"type": "integer"}),
        ({"items": {}}, {"type": "array"}),
        (True, {}),
        ({}, {}),
    ],
)
def test_a_schema_is_boiled_down_to_its_type(schema: object, plain: dict[str, object]) -> None:
    definitions = {"Point": {"properties": {}}, "Loop": {"$ref": "#/$defs/Loop"}}
    assert plain_schemas(["value"], {"properties": {"value": schema}, "$defs": definitions}) == {"value": plain}
    assert plain_schemas(["other"], {"properties": 3}) == {"other": {}}


@needs_sglang
def test_a_tagged_call_of_100_000_characters_is_not_read() -> None:
    text = "<tool_call><function=search><parameter=q>VALUE</parameter></function></tool_call>"
    parser = make_parser("qwen3_coder", Shown())
    assert parser.parse(text.replace("VALUE", "x" * 90_000), TOOLS).calls == (
        ParsedCall(name="search", arguments={"q": "x" * 90_000}),
    )
    (broken,) = parser.parse(text.replace("VALUE", "x" * 100_000), TOOLS).calls
    assert broken == BrokenCall(reason="The tool call is longer than 100,000 characters.", name="search")


@needs_sglang
@pytest.mark.parametrize(
    ("name", "value"), [("mimo", "a &lt; b "), ("minicpm5", "a &lt; b "), ("qwen3_coder", "a < b ")]
)
@pytest.mark.parametrize("times", [1, 1000])
def test_values_of_any_length_are_unescaped_where_the_family_escapes_them(name: str, value: str, times: int) -> None:
    text = {
        "minicpm5": '<function name="search"><param name="q">VALUE.</param></function>',
    }.get(name, "<tool_call><function=search><parameter=q>VALUE.</parameter></function></tool_call>")
    (read,) = make_parser(name, Shown()).parse(text.replace("VALUE", value * times), TOOLS).calls
    assert read == ParsedCall(name="search", arguments={"q": "a < b " * times + "."})


@needs_sglang
def test_sglang_does_not_log_what_comes_back_as_an_argument_error(caplog: pytest.LogCaptureFixture) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tool = ToolSchema(function=FunctionSchema(name="count", parameters=schema))
    text = "<tool_call><function=count><parameter=n>three</parameter></function></tool_call>"
    (call_made,) = make_parser("qwen3_coder", Shown()).parse(text, [tool]).calls
    assert call_made == ParsedCall(name="count", arguments={"n": "three"})
    assert caplog.records == []


def test_formats_that_need_no_schema_need_no_sglang() -> None:
    code = (
        "import sys; sys.modules.update(sglang=None, torch=None, transformers=None)\n"
        "from sglang_multiturn import ByteChatML\n"
        "from sglang_multiturn.chat.call_formats import HERMES, READERS\n"
        "from sglang_multiturn.chat.parsers import make_parser\n"
        "print([make_parser(name, ByteChatML()).parse('4', []).content for name in [*HERMES, *READERS, 'gpt-oss']])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == f"{['4'] * 17}\n"
