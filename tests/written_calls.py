"""Tool calls as models write them, in every format SGLang has a parser for; and calls written wrongly."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_multiturn.chat.calls import BrokenKind

JSON, NAME, ARGUMENTS, ENVELOPE = BrokenKind.JSON, BrokenKind.NAME, BrokenKind.ARGUMENTS, BrokenKind.ENVELOPE
Arguments = dict[str, Any]


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def text(value: Any) -> str:
    """A value between tags: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else dumps(value)


def gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(inner)}" for key, inner in value.items()) + "}"
    return "[" + ",".join(map(gemma, value)) + "]" if isinstance(value, list) else dumps(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How one format writes calls."""

    call: Callable[[str, Arguments], str]
    """One call, without what surrounds all of them."""
    before: str = ""
    between: str = ""
    behind: str = ""
    broken: tuple[tuple[str, BrokenKind], ...]
    """Texts in place of one call, and what is wrong with each."""
    ends: int
    """A turn of one call, cut this many characters before its end, ends inside the call."""

    def turn(self, calls: Sequence[str]) -> str:
        return self.before + self.between.join(calls) + self.behind

    def write(self, *calls: tuple[str, Arguments]) -> str:
        return self.turn([self.call(name, arguments) for name, arguments in calls])


def _object(name_key: str = "name", arguments_key: str = "arguments") -> Callable[[str, Arguments], str]:
    return lambda name, arguments: dumps({name_key: name, arguments_key: arguments})


def _broken_objects(around: Callable[[str], str] = str, name: str = "name") -> tuple[tuple[str, BrokenKind], ...]:
    return (
        (around(f'{{"{name}": "search", "arguments": {{"q": }}}}'), JSON),
        (around(f'{{"{name}": "search", "arguments": {{"q": NaN}}}}'), JSON),
        (around(f'{{"{name}": "search", "arguments": {{"q": 1e999}}}}'), JSON),
        (around(f'{{"{name}": "search", "arguments": {{"q": "\\ud800"}}}}'), JSON),
        (around(f'{{"{name}": "search", "arguments": "{{\\"q\\": \\"\\\\ud800\\"}}"}}'), JSON),
        (around('{"arguments": {}}'), NAME),
        (around(f'{{"{name}": 3, "arguments": {{}}}}'), NAME),
        (around(f'{{"{name}": "search", "arguments": [1]}}'), ARGUMENTS),
        (around(f'{{"{name}": "search", "arguments": 3}}'), ARGUMENTS),
        (around(f'{{"{name}": "search", "arguments": null}}'), ARGUMENTS),
        (around(f'{{"{name}": "search", "arguments": "q"}}'), ARGUMENTS),
    )


def _broken_arguments(around: Callable[[str, str], str]) -> tuple[tuple[str, BrokenKind], ...]:
    return (
        (around("search", '{"q": }'), JSON),
        (around("search", '{"q": Infinity}'), JSON),
        (around("search", "[" * 5000), JSON),
        (around("search", '{"q": 1' + "0" * 5000 + "}"), JSON),
        (around("", "{}"), NAME),
        (around("search", "[1]"), ARGUMENTS),
        (around("search", "3"), ARGUMENTS),
    )


def _deepseek_v3(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def _deepseek_v31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def _kimi(name: str, arguments: str) -> str:
    index = f"functions.{name}:0" if name else "3"
    return f"<|tool_call_begin|>{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def _harmony(name: str, arguments: str) -> str:
    to = f"to=functions.{name} <|constrain|>json"
    return f"<|start|>assistant<|channel|>commentary {to}<|message|>{arguments}<|call|>"


def _mistral(name: str, arguments: str) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{arguments}"


def _function(name: str, arguments: Arguments) -> str:
    values = "".join(f"<parameter={key}>\n{text(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def _tagged(before: str, behind: str, value: str) -> Callable[[str, Arguments], str]:
    """`value` holds KEY and VALUE."""

    def write(name: str, arguments: Arguments) -> str:
        values = [value.replace("KEY", key).replace("VALUE", text(inner)) for key, inner in arguments.items()]
        return before.replace("NAME", name) + "".join(values) + behind

    return write


def _python(name: str, arguments: Arguments) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_KEY_VALUE = "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"
_BROKEN_KEY_VALUE = (
    ("<tool_call>\n</tool_call>", NAME),
    ("<tool_call>search\nq is x\n</tool_call>", ARGUMENTS),
    ("<tool_call>search\n<arg_key>q</arg_key>\n</tool_call>", ARGUMENTS),
    ("<tool_call>search\n<arg_key>q</arg_key>\n<arg_value>x\n</tool_call>", ARGUMENTS),
    ("<tool_call>search\n<arg_key>q</arg_key>\n<arg_value>x</arg_value>\n", ENVELOPE),
)
_BROKEN_FUNCTION = (
    ("<tool_call>\n</tool_call>", ENVELOPE),
    ('<tool_call>\n{"name": "search", "arguments": {"q": "x"}}\n</tool_call>', ENVELOPE),
    ("<tool_call>\n<function=search>\n<parameter=q>\nx\n</parameter>\n</tool_call>", ENVELOPE),
    ("<function=search>\n<parameter=q>\nx\n</parameter>\n</function>", ENVELOPE),
    ("<tool_call>\n<function=>\n</function>\n</tool_call>", NAME),
    ('<tool_call>\n<function=search>\n{"q": "x"}\n</function>\n</tool_call>', ARGUMENTS),
    ("<tool_call>\n<function=search>\n<parameter=q\nx\n</parameter>\n</function>\n</tool_call>", ARGUMENTS),
)
_HERMES = Format(
    call=lambda name, arguments: f"<tool_call>\n{_object()(name, arguments)}\n</tool_call>",
    between="\n",
    broken=(
        *_broken_objects(lambda inner: f"<tool_call>\n{inner}\n</tool_call>"),
        ("<tool_call>\n</tool_call>", ENVELOPE),
        ("<tool_call>\n[1, 2]\n</tool_call>", ENVELOPE),
        ('<tool_call>\n{"name": "search", "arguments": {}} and more\n</tool_call>', ENVELOPE),
        ('<tool_call>\n{"name": "search", "arguments": {}}\n', ENVELOPE),
    ),
    ends=5,
)
_GLM = Format(
    call=_tagged("<tool_call>NAME\n", "</tool_call>", _KEY_VALUE), between="\n", broken=_BROKEN_KEY_VALUE, ends=8
)
_PYTHON = (
    ("search(q=)", JSON),
    ("search(q=f'{x}')", JSON),
    ("search(q=open('x'))", JSON),
    ("search(q=" + "-" * 5000 + "1)", JSON),
    ("search('x')", ARGUMENTS),
    ("search(**{'q': 'x'})", ARGUMENTS),
    ("'search'", ENVELOPE),
)


def _dsml(section: str) -> Format:
    invoke = '<｜DSML｜invoke name="NAME">'
    value = '<｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>'
    end = "</｜DSML｜invoke>"
    return Format(
        before=f"<｜DSML｜{section}>\n",
        call=lambda name, arguments: (
            invoke.replace("NAME", name)
            + "".join(
                value.replace("KEY", key)
                .replace("true", "true" if isinstance(inner, str) else "false", 1)
                .replace("VALUE", text(inner))
                for key, inner in arguments.items()
            )
            + end
        ),
        behind=f"\n</｜DSML｜{section}>",
        broken=(
            (invoke.replace("NAME", "") + end, NAME),
            (invoke.replace("NAME", "search") + '{"q": }' + end, JSON),
            (invoke.replace("NAME", "search") + '{"q": 1} and' + end, ENVELOPE),
            (invoke.replace("NAME", "search") + "[1]" + end, ARGUMENTS),
            (invoke.replace("NAME", "search") + '<｜DSML｜parameter name="q">x' + end, ARGUMENTS),
            (invoke.replace("NAME", "search"), ENVELOPE),
        ),
        ends=len(end) + 20,
    )


FORMATS: dict[str, Format] = {
    **dict.fromkeys(("hermes", "qwen", "qwen25", "trinity"), _HERMES),
    **dict.fromkeys(("glm", "glm45", "poolside_v1"), _GLM),
    "glm47": Format(
        call=_tagged("<tool_call>NAME", "</tool_call>", _KEY_VALUE.replace("\n", "")),
        broken=_BROKEN_KEY_VALUE,
        ends=5,
    ),
    "apertus2509": Format(
        before="<|tools_prefix|>[",
        call=lambda name, arguments: dumps({name: arguments}),
        between=", ",
        behind="]<|tools_suffix|>",
        broken=(('{"search": {"q": }}', JSON), ('{"search": [1]}', ARGUMENTS), ('{"": {}}', NAME), ("[1]", ENVELOPE)),
        ends=20,
    ),
    "cohere_command4": Format(
        before="<|START_ACTION|>[\n    ",
        call=lambda name, arguments: dumps({"tool_call_id": "0", "tool_name": name, "parameters": arguments}),
        between=",\n    ",
        behind="\n]<|END_ACTION|>",
        broken=(*_broken_objects(name="tool_name"), ('{"tool_name": "search", "parameters": {"q": "x"}', JSON)),
        ends=25,
    ),
    "deepseekv3": Format(
        before=_DEEPSEEK_SECTION[0],
        call=lambda name, arguments: _deepseek_v3(name, dumps(arguments)),
        between="\n",
        behind=_DEEPSEEK_SECTION[1],
        broken=(
            *_broken_arguments(_deepseek_v3),
            ("<｜tool▁call▁begin｜>search<｜tool▁call▁end｜>", ENVELOPE),
            (_deepseek_v3("search", "{}").removesuffix("<｜tool▁call▁end｜>"), ENVELOPE),
        ),
        ends=len(_DEEPSEEK_SECTION[1]) + 3,
    ),
    "deepseekv31": Format(
        before=_DEEPSEEK_SECTION[0],
        call=lambda name, arguments: _deepseek_v31(name, dumps(arguments)),
        behind=_DEEPSEEK_SECTION[1],
        broken=(
            *_broken_arguments(_deepseek_v31),
            ("<｜tool▁call▁begin｜>search<｜tool▁call▁end｜>", ENVELOPE),
            (_deepseek_v31("search", "{} {}"), ENVELOPE),
        ),
        ends=len(_DEEPSEEK_SECTION[1]) + 25,
    ),
    "deepseekv32": _dsml("function_calls"),
    "deepseekv4": _dsml("tool_calls"),
    "gemma4": Format(
        call=lambda name, arguments: f"<|tool_call>call:{name}{gemma(arguments)}<tool_call|>",
        broken=(
            ("<|tool_call>call:search{q:<tool_call|>", JSON),
            ('<|tool_call>call:search{q:<|"|>x}<tool_call|>', JSON),
            ("<|tool_call>call:search{" + "a:{" * 5000 + "<tool_call|>", JSON),
            ("<|tool_call>call:{q:1}<tool_call|>", NAME),
            ('<|tool_call>{"name": "search"}<tool_call|>', NAME),
            ("<|tool_call>call:search{q:1}", ENVELOPE),
        ),
        ends=15,
    ),
    "gigachat3": Format(
        call=lambda name, arguments: "<|function_call|>" + _object()(name, arguments),
        broken=_broken_objects(lambda inner: "<|function_call|>" + inner),
        ends=3,
    ),
    "gpt-oss": Format(
        call=lambda name, arguments: _harmony(name, dumps(arguments)),
        before="<|channel|>analysis<|message|>Hm.<|end|>",
        broken=(
            (_harmony("search", '{"q": }'), JSON),
            (_harmony("search", ""), JSON),
            (_harmony("search", "[" * 5000), JSON),
            (_harmony("search", "[1]"), ARGUMENTS),
            (_harmony("", "{}"), NAME),
            (_harmony("search", "{} {}"), ENVELOPE),
            (_harmony("search", "{}").replace("<|call|>", "<|end|>"), ENVELOPE),
        ),
        ends=10,
    ),
    "hunyuan": Format(
        before="<tool_calls>\n",
        call=_tagged("<tool_call>NAME<tool_sep>\n", "</tool_call>", _KEY_VALUE),
        between="\n",
        behind="\n</tool_calls>",
        broken=(
            ("<tool_call>search</tool_call>", ENVELOPE),
            ("<tool_call><tool_sep></tool_call>", NAME),
            ("<tool_call>search<tool_sep>x</tool_call>", ARGUMENTS),
            ("<tool_call>search<tool_sep>\n<arg_key>q</arg_key>\n</tool_call>", ARGUMENTS),
        ),
        ends=25,
    ),
    "interns1": Format(
        call=lambda name, arguments: f"<|action_start|> <|plugin|>\n{_object()(name, arguments)}<|action_end|>",
        broken=_broken_objects(lambda inner: f"<|action_start|> <|plugin|>\n{inner}<|action_end|>"),
        ends=4,
    ),
    "kimi_k2": Format(
        before="<|tool_calls_section_begin|>",
        call=lambda name, arguments: _kimi(name, dumps(arguments)),
        behind="<|tool_calls_section_end|>",
        broken=(*_broken_arguments(_kimi), ("<|tool_call_begin|>functions.search:0<|tool_call_end|>", ENVELOPE)),
        ends=len("<|tool_calls_section_end|>") + 3,
    ),
    "lfm2": Format(
        before="<|tool_call_start|>[",
        call=_python,
        between=", ",
        behind="]<|tool_call_end|>",
        broken=_PYTHON,
        ends=20,
    ),
    "llama3": Format(
        before="<|python_tag|>", call=_object("name", "parameters"), between="; ", broken=_broken_objects(), ends=3
    ),
    "minicpm5": Format(
        call=_tagged('<function name="NAME">', "</function>", '<param name="KEY">VALUE</param>'),
        broken=(
            ('<function name=""></function>', NAME),
            ('<function name="search">q</function>', ARGUMENTS),
            ('<function name="search"><param>x</param></function>', ARGUMENTS),
            ('<function name="search"><param name="q">x</function>', ARGUMENTS),
            ('<function name="search"><param name="q">x</param>', ENVELOPE),
        ),
        ends=4,
    ),
    "minimax-m2": Format(
        before="<minimax:tool_call>\n",
        call=_tagged('<invoke name="NAME">\n', "</invoke>", '<parameter name="KEY">VALUE</parameter>\n'),
        between="\n",
        behind="\n</minimax:tool_call>",
        broken=(
            ('<invoke name=""></invoke>', NAME),
            ('<invoke name="search">q</invoke>', ARGUMENTS),
            ('<invoke name="search"><parameter name="q">x</invoke>', ARGUMENTS),
            ('<invoke name="search"><parameter name="q">x</parameter>', ENVELOPE),
        ),
        ends=len("\n</minimax:tool_call>") + 3,
    ),
    "mistral": Format(
        call=lambda name, arguments: _mistral(name, dumps(arguments)),
        broken=(
            (_mistral("search", '{"q": }'), JSON),
            (_mistral("search", '{"q": NaN}'), JSON),
            (_mistral("search", "[1]"), ARGUMENTS),
            (_mistral("", "{}"), NAME),
            ("[TOOL_CALLS]search", ENVELOPE),
        ),
        ends=3,
    ),
    "pythonic": Format(before="[", call=_python, between=", ", behind="]", broken=_PYTHON, ends=2),
    "mimo": Format(
        call=lambda name, arguments: _function(name, arguments).replace(">\n", ">").replace("\n</", "</"),
        between="\n",
        broken=(
            *_BROKEN_FUNCTION,
            ("<tool_call><function=search><parameter=q>x</function></tool_call>", ARGUMENTS),
        ),
        ends=25,
    ),
    **dict.fromkeys(("qwen3_coder", "step3p5"), Format(call=_function, between="\n", broken=_BROKEN_FUNCTION, ends=20)),
    "step3": Format(
        before="<｜tool_calls_begin｜>\n",
        call=_tagged(
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">\n',
            "</steptml:invoke><｜tool_call_end｜>",
            '<steptml:parameter name="KEY">VALUE</steptml:parameter>\n',
        ),
        between="\n",
        behind="\n<｜tool_calls_end｜>",
        broken=(
            ("<｜tool_call_begin｜>search<｜tool_call_end｜>", ENVELOPE),
            (
                '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="">'
                "</steptml:invoke><｜tool_call_end｜>",
                NAME,
            ),
            (
                '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="search">'
                '<steptml:parameter name="q">x</steptml:invoke><｜tool_call_end｜>',
                ARGUMENTS,
            ),
            (
                '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="search">'
                '<steptml:parameter name="q">x</steptml:parameter><｜tool_call_end｜>',
                ENVELOPE,
            ),
        ),
        ends=len("\n<｜tool_calls_end｜>") + 3,
    ),
}
