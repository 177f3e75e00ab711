"""Every format of tool calls: chosen from the template, read call by call, held to SGLang's own detectors."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_multiturn.chat.call_formats import HERMES, READERS, TAGGED
from sglang_multiturn.chat.formats import detect_format
from sglang_multiturn.chat.parsers import SGLangParser, make_parser
from sglang_multiturn.chat.parsing import BrokenCall, BrokenKind, ParsedCall, ToolCallParser
from sglang_multiturn.chat.reasoning import MARKS
from sglang_multiturn.cpu.sglang_kernels import prepare_on_cpu
from sglang_multiturn.schemas import FunctionSchema, ToolSchema

from family import AXOLOTL, TRL
from written_calls import FORMATS, Format

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")

PROPERTIES = {
    "q": {"type": "string"},
    "n": {"type": "integer"},
    "deep": {"type": "object"},
    "ok": {"type": "boolean"},
    "some": {"type": "array"},
}
TOOLS = [
    ToolSchema(
        function=FunctionSchema(
            name="search", description="Looks.", parameters={"type": "object", "properties": PROPERTIES}
        )
    ),
    ToolSchema(
        function=FunctionSchema(
            name="calculator",
            description="Counts.",
            parameters={"type": "object", "properties": {"expression": {"type": "string"}}},
        )
    ),
]
SEARCH: tuple[str, dict[str, Any]] = (
    "search",
    {"q": 'a "quoted" é', "n": 3, "deep": {"k": [1, True, None]}, "ok": False, "some": ["a", 1.5]},
)
COUNT: tuple[str, dict[str, Any]] = ("calculator", {"expression": "1+1"})
JSON_FORMATS = [name for name in FORMATS if name not in TAGGED and name not in ("pythonic", "lfm2", "gemma4")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a parser reads of a chat template."""

    source: str = ""
    generation_prompt: str = ""
    tool_call_format: str | None = None


@functools.cache
def parser(name: str) -> ToolCallParser:
    return make_parser(name, Shown())


@functools.cache
def sglang_parser_class() -> Any:
    prepare_on_cpu()
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    return FunctionCallParser


def read_by_sglang(name: str, text: str) -> list[tuple[str, Any]]:
    parser_class = sglang_parser_class()
    from sglang.srt.entrypoints.openai.protocol import Tool

    tools = [Tool.model_validate(tool.for_template()) for tool in TOOLS]
    _, items = parser_class(tools, name).parse_non_stream(text)
    return [(item.name, json.loads(item.parameters)) for item in items]


def parsed(*calls: tuple[str, dict[str, Any]]) -> tuple[ParsedCall, ...]:
    return tuple(ParsedCall(name=name, arguments=arguments) for name, arguments in calls)


each_format = pytest.mark.parametrize("name", FORMATS)


def test_every_parser_of_sglang_is_one_of_ours() -> None:
    ours = {*HERMES, *READERS, *TAGGED, "gpt-oss"}
    assert ours == set(sglang_parser_class().ToolCallParserEnum) == set(FORMATS)
    assert not any(isinstance(parser(name), SGLangParser) for name in ours)


@each_format
def test_calls_come_in_order_and_unknown_tools_with_their_names(name: str) -> None:
    calls = (SEARCH, COUNT, ("nope", {}), ("nope", {"a": "b"}), COUNT)
    turn = parser(name).parse(FORMATS[name].write(*calls), TOOLS)
    assert turn.calls == parsed(*calls)
    assert turn.content == ""


@each_format
def test_sglang_reads_well_formed_calls_alike(name: str) -> None:
    calls = [SEARCH, COUNT]
    if name == "gigachat3":
        calls = [SEARCH]  # SGLang reads one
    if name == "gemma4":
        calls = [("search", {**SEARCH[1], "deep": {"k": [1, True]}}), COUNT]  # SGLang reads null as "null"
    text = FORMATS[name].write(*calls)
    assert read_by_sglang(name, text) == calls
    assert parser(name).parse(text, TOOLS).calls == parsed(*calls)


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [(name, text, kind) for name, form in FORMATS.items() for text, kind in form.broken],
)
def test_a_broken_call_is_classified_and_the_good_ones_beside_it_are_kept(
    name: str, text: str, kind: BrokenKind
) -> None:
    form = FORMATS[name]
    turn = form.turn([form.call("search", {"q": "x"}), text, form.call("calculator", {"expression": "2"})])
    first, broken, last = parser(name).parse(turn, TOOLS).calls
    assert (first, last) == parsed(("search", {"q": "x"}), ("calculator", {"expression": "2"}))
    assert isinstance(broken, BrokenCall)
    assert broken.kind is kind
    assert broken.reason.endswith(".")


@each_format
def test_a_turn_that_ends_inside_a_call_is_truncated(name: str) -> None:
    form = FORMATS[name]
    whole = form.write(SEARCH, ("search", {"q": "some words"}))
    *before, last = parser(name).parse(whole[: -form.ends], TOOLS).calls
    assert tuple(before) == parsed(SEARCH)
    assert isinstance(last, BrokenCall)
    assert last.kind is BrokenKind.TRUNCATED


@each_format
def test_no_cut_of_a_turn_gives_a_call_that_was_not_made(name: str) -> None:
    form = FORMATS[name]
    whole = form.write(SEARCH, ("search", {"q": "some words"}))
    complete = parsed(SEARCH, ("search", {"q": "some words"}))
    for end in range(len(whole)):
        made = [call for call in parser(name).parse(whole[:end], TOOLS).calls if isinstance(call, ParsedCall)]
        assert tuple(made) == complete[: len(made)]


@each_format
def test_words_alone_are_no_call(name: str) -> None:
    for text in ("", "The answer is 4.", "f(x) = [1, 2] and {} or <b>", '{"answer": 4}', "search", "[see (1)]"):
        turn = parser(name).parse(text, TOOLS)
        assert (turn.content, turn.calls) == (text, ())


@each_format
def test_calls_without_any_tool_offered_are_still_calls(name: str) -> None:
    assert parser(name).parse(FORMATS[name].write(COUNT), []).calls == parsed(COUNT)


# Chosen from the template


def templates() -> Iterator[tuple[str, str]]:
    for package, folder in (("trl", TRL), ("axolotl", AXOLOTL)):
        for file in sorted(folder.glob("*.jinja")):
            yield f"{package}/{file.stem}", file.read_text(encoding="utf-8")


TEMPLATES = dict(templates())
CHOSEN = {
    "hermes": "qwen2_5 qwen3 qwen3_instruct_2507 qwen3_vl",
    "qwen3_coder": "qwen3_5_think qwen3_5_nothink qwen3_6 qwen3_8 nemotron_3_nano nemotron_3_super nemotron_3_ultra "
    "nemotron_3_5_lightning",
    "llama3": "llama3_1 llama3_2",
    "deepseekv3": "deepseekv3 deepseek_r1_distill",
    "glm45": "glm4moe",
    "gpt-oss": "gptoss",
    "gemma4": "gemma4 gemma4_v2 gemma4_v3 gemma4_v4 gemma4_v5 diffusion_gemma",
    "lfm2": "lfm2 lfm2_v2 lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl",
}
NONE = "cohere cohere2 gemma gemma3 idefics3 llama3 llava_next muse_glimmer phi3 phi3_5 qwen2_5_vl smolvlm"


def test_every_template_of_trl_is_told_apart() -> None:
    expected: dict[str, str | None] = {name: form for form, names in CHOSEN.items() for name in names.split()}
    expected |= dict.fromkeys(NONE.split())
    found = {
        name.removeprefix("trl/"): detect_format(source)
        for name, source in TEMPLATES.items()
        if name.startswith("trl/") and not name.endswith("_training")
    }
    assert found == expected


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("'<|tool_call_begin|>' + id + '<|tool_call_argument_begin|>'", "kimi_k2"),
        ("<minimax:tool_call>\n<invoke name=", "minimax-m2"),
        ("<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments", "deepseekv31"),
        ("<｜DSML｜function_calls>", "deepseekv32"),
        ("<｜DSML｜tool_calls>", "deepseekv4"),
        ("<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>", "glm47"),
        ("<tool_calls><tool_call>{name}<tool_sep>\n<arg_key>", "hunyuan"),
        ("<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=", "step3"),
        ("<|tools_prefix|>[", "apertus2509"),
        ("<|action_start|> <|plugin|>\n", "interns1"),
        ("function call<|role_sep|>\n", "gigachat3"),
        ("<|START_ACTION|>[", "cohere_command4"),
        ("[TOOL_CALLS] [", "mistral"),
        ('<function name="f"><param name="k">v</param></function>', "minicpm5"),
        ("<|python_start|> <|python_tag|>", None),
        ("{{ message.tool_calls }}", None),
        ("", None),
    ],
)
def test_the_marks_of_other_families_are_told_apart(source: str, form: str | None) -> None:
    assert detect_format(source) == form


SHOWS_NO_CALL = {"trl/lfm2", "trl/lfm2_training", "axolotl/command_a", "axolotl/falcon_h1"}


@pytest.mark.parametrize("template", [name for name, source in TEMPLATES.items() if detect_format(source)])
def test_what_a_template_writes_itself_is_read_back(template: str) -> None:
    source = TEMPLATES[template]
    name = detect_format(source)
    prompt, said, count = written_by(source)
    assert bool(said) is (template not in SHOWS_NO_CALL)
    turn = make_parser("auto", Shown(source=source, tool_call_format=name)).parse(said, TOOLS, prompt=prompt)
    assert turn.calls == parsed(MULTILINE, COUNT)[:count]
    assert "<" not in turn.content


MULTILINE = ("search", {**SEARCH[1], "q": 'a "quoted" é\nline'})
_TURN_END = re.compile(
    r"(?:<\|im_end\|>|<\|eot_id\|>|<\|call\|>|<EOS>|<｜end▁of▁sentence｜>|<turn\|>|\[\|endofturn\|\]|<\|observation\|>|"
    r"<\|END_OF_TURN_TOKEN\|>(?:<\|START_OF_TURN_TOKEN\|><\|CHATBOT_TOKEN\|>)?)\s*\Z"
)


def written_by(source: str) -> tuple[str, str, int]:
    """The generation prompt as far as it stands before a turn with calls, that turn, and how many calls it holds."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(*messages: dict[str, Any], **options: Any) -> str:
        words = {"bos_token": "<BOS>", "eos_token": "<EOS>"} | options
        [[text], _] = render_jinja_template(
            [list(messages)], [t.for_template() for t in TOOLS], chat_template=source, **words
        )
        return str(text).rpartition("Question")[2]

    user = {"role": "user", "content": "Question"}
    prompt = render(user, add_generation_prompt=True)
    for count, as_text, content in [(c, t, w) for c in (2, 1) for t in (False, True) for w in ("Words.", None)]:
        calls = [
            {
                "type": "function",
                "id": f"callcall{i}",
                "function": {"name": name, "arguments": json.dumps(a) if as_text else a},
            }
            for i, (name, a) in enumerate((MULTILINE, COUNT)[:count])
        ]
        try:
            turn = render(user, {"role": "assistant", "content": content, "tool_calls": calls})
        except Exception:  # noqa: BLE001 - templates refuse what they do not know with anything
            continue
        if "search" in turn:
            while not turn.startswith(prompt):
                prompt = prompt[: prompt.rindex("<")]
            return prompt, _TURN_END.sub("", turn.removeprefix(prompt)), turn.count("calculator") + 1
    return prompt, "", 0


# Values and their types


@pytest.mark.parametrize("name", TAGGED)
def test_a_value_between_tags_has_its_schemas_type_whatever_its_length(name: str) -> None:
    properties = {
        "count": {"type": ["integer", "null"]},
        "ratio": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "point": {"$ref": "#/$defs/Point"},
        "level": {"enum": [1, 2]},
        "text": {"type": "string"},
        "list": {"type": "array", "items": {"type": "string"}},
    }
    parameters = {"type": "object", "properties": properties, "$defs": {"Point": {"properties": {"x": {}}}}}
    tool = ToolSchema(function=FunctionSchema(name="place", parameters={**parameters, "required": ["never"]}))
    arguments = {"count": 3, "ratio": 0.5, "point": {"x": [1]}, "level": 2, "text": "a  b", "list": ["x" * 3000]}
    calls = (("place", arguments), ("place", {"text": "a b " * 1000 + "c", "other": "x == 1 and not y"}))
    assert parser(name).parse(FORMATS[name].write(*calls), [tool]).calls == parsed(*calls)


@pytest.mark.parametrize("name", TAGGED)
def test_the_last_of_duplicate_values_counts_as_in_json(name: str) -> None:
    form = FORMATS[name]
    twice = (
        form.call("search", {"q": "one", "Q": "two"}).replace('"Q"', '"q"').replace(">Q<", ">q<").replace("=Q>", "=q>")
    )
    (call,) = parser(name).parse(form.turn([twice]), TOOLS).calls
    if name == "minicpm5":  # SGLang's detector refuses them
        assert isinstance(call, BrokenCall)
    else:
        assert call == ParsedCall(name="search", arguments={"q": "two"})


def test_a_value_sglangs_detector_loses_is_kept() -> None:
    assert parser("step3").parse(FORMATS["step3"].write(("search", {"q": "a < b"})), TOOLS).calls == parsed(
        ("search", {"q": "a < b"})
    )


@pytest.mark.parametrize("name", ["qwen3_coder", "step3p5"])
def test_qwens_values_may_end_without_a_tag_as_sglang_has_it(name: str) -> None:
    text = "<tool_call>\n<function=search>\n<parameter=q>\nx\n<parameter=n>\n3\n</function>\n</tool_call>"
    assert parser(name).parse(text, TOOLS).calls == parsed(("search", {"q": "x", "n": 3}))
    assert read_by_sglang(name, text) == [("search", {"q": "x", "n": 3})]


# Hostile text


def marks_of(form: Format) -> list[str]:
    """The marks of a format, and what may stand between them."""
    turn = form.write(("search", {"q": "x"}))
    found = sorted(set(re.findall(r"<[^<>\n]{1,60}>|\[[A-Z_]+\]|[\[\]{}()\"',:=]", turn)))
    return [*found, turn, form.broken[0][0], "\\", "\n", " ", "search", "é", "\ud800", "1e999", "&lt;", *MARKS[-1]]


@each_format
def test_nothing_a_model_writes_makes_a_parser_raise(name: str) -> None:
    marks = st.lists(st.sampled_from(marks_of(FORMATS[name])) | st.text(max_size=3), max_size=25).map("".join)

    @settings(max_examples=100, deadline=None)
    @given(marks)
    def check(text: str) -> None:
        turn = parser(name).parse(text, TOOLS)
        assert len(turn.content) + len(turn.reasoning) <= len(text)

    check()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.text(max_size=10) | st.sampled_from(["</", "<|", "]}"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_well_formed_json_calls_round_trip(name: str) -> None:
    form = FORMATS[name]
    inside = st.sampled_from(marks_of(form)[:-11])  # the format's own marks, inside a string
    values = st.dictionaries(st.text(min_size=1, max_size=5), json_values | inside, max_size=3)
    calls = st.lists(st.tuples(st.from_regex(r"[a-z_]{1,10}", fullmatch=True), values), min_size=1, max_size=3)

    @settings(max_examples=60, deadline=None)
    @given(calls)
    def check(written: list[tuple[str, dict[str, Any]]]) -> None:
        assert parser(name).parse(form.write(*written), TOOLS).calls == parsed(*written)

    check()


@each_format
def test_a_megabyte_of_anything_is_read_in_bounded_time(name: str) -> None:
    form = FORMATS[name]
    good, broken, least = form.call("search", {"q": "x"}), form.broken[0][0], form.call("f", {})
    texts = [mark * (1_000_000 // len(mark)) for mark in marks_of(form)[:-11]]
    texts += [form.turn([call] * (1_000_000 // len(call))) for call in (good, broken, least, good[: len(good) // 2])]
    for value in ("[", "{", "-", "9", "1,", "f'{1}'", '"', "\\'", " ", "<"):
        short = value * (1900 // len(value))
        one = form.call("search", {"deep": short})
        texts += [form.turn([form.call("search", {"deep": value * (size // len(value))})]) for size in (90_000, 10**6)]
        texts += [form.turn([one] * 500), form.turn([one]) * 500]
        texts.append(form.turn([form.call("search", {f"k{i}": short for i in range(500)})]))
    texts += [f"{form.before}search(q={pad}" + "\\'" * 500_000 for pad in ("", " ")]
    texts += [form.before + '{"name":' + pad + '\\"' * 500_000 for pad in ("", " ")]
    texts.append(form.before + '{"name": { }, ' * 70_000)
    parse = parser(name).parse
    for text in texts:
        started = time.process_time()
        calls = parse(text, TOOLS).calls
        assert time.process_time() - started < 2  # 0.7 at most where this was written; minutes without the limits
        assert len(calls) <= 129
