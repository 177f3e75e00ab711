"""Every format of tool calls that SGLang has a parser for, under SGLang's names, as a table of marks.

`READERS` are read here alone: their arguments are JSON or literals, which have one reading. `TAGGED` formats have text
between tags, whose types SGLang's own detector decides, one call at a time (`parsers.SGLangValues`).

Why calls are not left to SGLang's detectors altogether (`srt/function_call/*.py`, 0.5.14): of a good, a broken and a
good call in one turn most lose a call or all three, without a word; a `.*?` over many opening marks takes seconds for
100,000 characters and a hundred times as long for a million; `pythonic` takes ten seconds for 130; `trinity` reads calls
inside reasoning; `gpt-oss`, `lfm2`, `mistral` and `gemma4` do not read all that their models' own templates write. Tests
hold the table to the detectors on well-formed text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_multiturn.chat.calls import Block, CallReader, Context
from sglang_multiturn.chat.listed_calls import BareCalls, ListedCalls, named_by_key, named_by_tool_name
from sglang_multiturn.chat.marked_calls import JsonBody, MarkedCalls, Marks
from sglang_multiturn.chat.python_calls import PythonCalls
from sglang_multiturn.chat.tagged_calls import GemmaBody, ReadValues, TaggedBody
from sglang_multiturn.schemas import ToolSchema

HERMES = ("hermes", "qwen", "qwen25", "trinity")
"""JSON between `<tool_call>` tags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EitherReader:
    """Two ways to write calls after the same marks."""

    opening: re.Pattern[str]
    choose: re.Pattern[str]
    """Matches at the opening of what `one` reads."""
    one: CallReader
    other: CallReader
    closers: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()

    def read(self, text: str, start: int, tools: Sequence[ToolSchema], context: Context) -> Block | None:
        """See `CallReader.read`."""
        reader = self.one if self.choose.match(text, start) else self.other
        return reader.read(text, start, tools, context)


def _named(head: str, tail: str = r"\s*", *, example: str) -> JsonBody:
    return JsonBody(head=re.compile(head), tail=re.compile(tail), example=example)


_DEEPSEEK_SECTION: Marks = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL: Marks = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_COHERE_WORDS = ("<|START_TEXT|>", "<|END_TEXT|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")
_LFM2: Marks = ("<|tool_call_start|>", "<|tool_call_end|>")

READERS: dict[str, CallReader] = {
    "apertus2509": ListedCalls(mark="<|tools_prefix|>", close="<|tools_suffix|>", to_call=named_by_key),
    "cohere_command4": ListedCalls(
        mark="<|START_ACTION|>", close="<|END_ACTION|>", to_call=named_by_tool_name, noise=_COHERE_WORDS
    ),
    "deepseekv3": MarkedCalls(
        section=_DEEPSEEK_SECTION,
        call=_DEEPSEEK_CALL,
        body=_named(
            r"[^<]{0,100}<｜tool▁sep｜>(?P<name>[^<`\n]{0,500})\n?\s*```(?:json)?\s*",
            r"\s*```\s*",
            example="function<｜tool▁sep｜>tool\n```json\n{...}\n```",
        ),
    ),
    "deepseekv31": MarkedCalls(
        section=_DEEPSEEK_SECTION,
        call=_DEEPSEEK_CALL,
        body=_named(r"(?P<name>[^<{]{0,500})<｜tool▁sep｜>\s*", example="tool<｜tool▁sep｜>{...}"),
    ),
    "gemma4": MarkedCalls(call=("<|tool_call>", "<tool_call|>"), body=GemmaBody(), noise=("<|tool_response>",)),
    "gigachat3": EitherReader(
        opening=re.compile(r"<\|function_call\|>|function call<\|role_sep\|>\n"),
        choose=re.compile(r"<\|function_call"),
        one=MarkedCalls(call=("<|function_call|>", ""), body=JsonBody()),
        other=MarkedCalls(call=("function call<|role_sep|>\n", ""), body=JsonBody()),
        noise=("<|message_sep|>",),
    ),
    "interns1": MarkedCalls(call=("<|action_start|> <|plugin|>", "<|action_end|>"), body=JsonBody()),
    "kimi_k2": MarkedCalls(
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        call=("<|tool_call_begin|>", "<|tool_call_end|>"),
        body=_named(
            # A bare counter in place of the name is one of the model's slips; it names no tool.
            r"\s*(?:functions\.)?(?P<name>(?:(?!\d+\s*<)[\w.-]{1,500})?)(?::?\d{1,9})?\s*"
            r"<\|tool_call_argument_begin\|>\s*",
            example="functions.tool:0<|tool_call_argument_begin|>{...}",
        ),
    ),
    "lfm2": EitherReader(
        opening=re.compile(re.escape(_LFM2[0])),
        choose=re.compile(re.escape(_LFM2[0]) + r"\s*\[?\s*\{"),
        one=ListedCalls(mark=_LFM2[0], close=_LFM2[1]),
        other=PythonCalls(marks=_LFM2),
        closers=_LFM2[1:],
    ),
    "llama3": BareCalls(),
    "mistral": EitherReader(
        opening=re.compile(r"\[TOOL_CALLS\]"),
        choose=re.compile(r"\[TOOL_CALLS\]\s*\[(?!ARGS)"),
        one=ListedCalls(mark="[TOOL_CALLS]"),
        other=MarkedCalls(
            call=("[TOOL_CALLS]", ""),
            body=_named(
                r"\s*(?P<name>[^\[\]{}\s]{0,500})\s*(?:\[CALL_ID\][^\[]{0,100})?(?:\[ARGS\]\s*|(?=\{))",
                example="[TOOL_CALLS]tool[ARGS]{...}",
            ),
        ),
    ),
    "pythonic": PythonCalls(noise=("<|python_start|>", "<|python_end|>")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedFormat:
    """A format of text between tags."""

    call: Marks
    section: Marks | None = None
    head: str
    value: str
    close: str
    example: str
    around: tuple[str, str, str]
    """What SGLang's detector needs before a call's name, between name and body, and behind the body."""
    tail: str = ""
    may_omit_close: bool = False
    may_be_json: bool = False
    escaped: bool = False
    """Values are escaped as in XML."""

    def reader(self, read_values: ReadValues) -> CallReader:
        """Reads calls in this format, given what decides their values' types."""
        body = TaggedBody(
            head=re.compile(self.head),
            value=re.compile(self.value),
            close=self.close,
            read_values=read_values,
            tail=self.tail,
            may_omit_close=self.may_omit_close,
            may_be_json=self.may_be_json,
            example=self.example,
        )
        return MarkedCalls(call=self.call, section=self.section, body=body)


_TOOL_CALL: Marks = ("<tool_call>", "</tool_call>")


def _function_tags(*, may_omit_close: bool) -> TaggedFormat:
    return TaggedFormat(
        section=_TOOL_CALL,
        call=("<function=", "</function>"),
        head=r"(?P<name>[^<>\n]{0,500})>",
        value=r"<parameter=(?P<key>[^<>\n]{1,500})>",
        close="</parameter>",
        example="<tool_call><function=tool><parameter=name>value</parameter></function></tool_call>",
        around=("<tool_call>\n<function=", ">\n", "\n</function>\n</tool_call>"),
        may_omit_close=may_omit_close,
        escaped=not may_omit_close,  # MiMo's are, Qwen's are not
    )


def _key_value_tags(around: tuple[str, str, str], *, sep: str = "", section: Marks | None = None) -> TaggedFormat:
    return TaggedFormat(
        section=section,
        call=_TOOL_CALL,
        head=rf"\s*(?P<name>[^<>\n]{{0,500}}){sep}\s*",
        value=r"<arg_key>(?P<key>[^<>]{1,500})</arg_key>\s*<arg_value>",
        close="</arg_value>",
        example=f"<tool_call>tool{sep}<arg_key>name</arg_key><arg_value>value</arg_value></tool_call>",
        around=around,
    )


def _dsml(section: str) -> TaggedFormat:
    return TaggedFormat(
        section=(f"<｜DSML｜{section}>", f"</｜DSML｜{section}>"),
        call=("<｜DSML｜invoke", "</｜DSML｜invoke>"),
        head=r'\s+name="(?P<name>[^"<>]{0,500})"\s*(?:>|(?P<whole>/>))',
        value=r'<｜DSML｜parameter\s+name="(?P<key>[^"<>]{1,500})"\s+string="[^"<>]{1,20}"\s*>',
        close="</｜DSML｜parameter>",
        example='<｜DSML｜invoke name="tool"><｜DSML｜parameter name="name" string="true">value</｜DSML｜parameter>'
        "</｜DSML｜invoke>",
        around=(f'<｜DSML｜{section}><｜DSML｜invoke name="', '">', f"</｜DSML｜invoke></｜DSML｜{section}>"),
        may_be_json=True,
    )


_GLM45 = _key_value_tags(("<tool_call>", "\n", "\n</tool_call>"))
_STEP3_CALL: Marks = ("<｜tool_call_begin｜>", "<｜tool_call_end｜>")
_STEP3_SECTION: Marks = ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>")

TAGGED: dict[str, TaggedFormat] = {
    "deepseekv32": _dsml("function_calls"),
    "deepseekv4": _dsml("tool_calls"),
    "glm": _GLM45,
    "glm45": _GLM45,
    "glm47": _key_value_tags(("<tool_call>", "", "</tool_call>")),
    "hunyuan": _key_value_tags(
        ("<tool_calls><tool_call>", "<tool_sep>\n", "\n</tool_call></tool_calls>"),
        sep="<tool_sep>",
        section=("<tool_calls>", "</tool_calls>"),
    ),
    "mimo": _function_tags(may_omit_close=False),
    "minicpm5": TaggedFormat(
        call=("<function name=", "</function>"),
        head=r"""\s*["'](?P<name>[^"'<>]{0,500})["'][^<>]{0,500}>""",
        value=r"""<param\s+name=["'](?P<key>[^"'<>]{1,500})["']\s*>""",
        close="</param>",
        example='<function name="tool"><param name="name">value</param></function>',
        around=('<function name="', '">', "</function>"),
        escaped=True,
    ),
    "minimax-m2": TaggedFormat(
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
        call=("<invoke name=", "</invoke>"),
        head=r'\s*"(?P<name>[^"<>]{0,500})"\s*>',
        value=r'<parameter\s+name="(?P<key>[^"<>]{1,500})">',
        close="</parameter>",
        example='<minimax:tool_call><invoke name="tool"><parameter name="name">value</parameter></invoke>'
        "</minimax:tool_call>",
        around=('<minimax:tool_call>\n<invoke name="', '">', "</invoke>\n</minimax:tool_call>"),
    ),
    "poolside_v1": _GLM45,
    "qwen3_coder": _function_tags(may_omit_close=True),
    "step3": TaggedFormat(
        section=_STEP3_SECTION,
        call=_STEP3_CALL,
        head=r'\s*function\s*<｜tool_sep｜>\s*<steptml:invoke name="(?P<name>[^"<>]{0,500})">',
        value=r'<steptml:parameter name="(?P<key>[^"<>]{1,500})">',
        close="</steptml:parameter>",
        tail="</steptml:invoke>",
        example='function<｜tool_sep｜><steptml:invoke name="tool"><steptml:parameter name="name">value'
        "</steptml:parameter></steptml:invoke>",
        around=(
            f'{_STEP3_SECTION[0]}{_STEP3_CALL[0]}function<｜tool_sep｜><steptml:invoke name="',
            '">\n',
            f"</steptml:invoke>{_STEP3_CALL[1]}{_STEP3_SECTION[1]}",
        ),
    ),
    "step3p5": _function_tags(may_omit_close=True),
}
