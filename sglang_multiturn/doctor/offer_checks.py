"""What the tool YAML offers that the template does not show, or that the parser does not bring back."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_multiturn.chat.parsing import BrokenCall, ParsedCall, ToolCallParser
from sglang_multiturn.doctor.examples import HARD_TEXT, full_arguments, has_free_text
from sglang_multiturn.doctor.findings import Findings, Severity, note, ok, problem
from sglang_multiturn.doctor.subject import Subject
from sglang_multiturn.doctor.written import QUESTION, calling, write_turn
from sglang_multiturn.errors import TemplateError
from sglang_multiturn.schemas import ToolSchema

if TYPE_CHECKING:
    from sglang_multiturn.chat.hf_template import HFChatTemplate

MAX_KEYS = 200
"""Keys of all schemas together that are looked for in the prompt, a rendering each."""
_TOLD = frozenset(
    "description enum default type items required const minimum maximum pattern format examples anyOf oneOf allOf "
    "minItems maxItems minLength maxLength".split()
)
"""Keywords that tell a model something."""


@dataclass(frozen=True, slots=True)
class _Key:
    """One key of a tool's schema."""

    path: tuple[str | int, ...]
    label: str
    is_name: bool
    """A property's name: without it the model does not know that the argument exists."""


def what_is_shown(subject: Subject, template: HFChatTemplate) -> Findings:
    """Take each key of each schema away: where the prompt stays the same, the template does not show it."""
    shown = [schema.for_template() for schema in subject.schemas]
    question = [template.dialect.spell(QUESTION)]
    try:
        whole = template.render(question, shown)
        if whole == template.render(question):
            return  # the template shows no tools at all, which its traits say
    except TemplateError as error:
        yield problem(
            "tools-shown", f"the template refuses these tools: {error}", "Look at the schema it stumbles over."
        )
        return
    keys = [(index, key) for index, tool in enumerate(shown) for key in _keys(tool)]
    for index, schema in enumerate(subject.schemas):
        mine = [key for at, key in keys[:MAX_KEYS] if at == index]
        hidden = [key for key in mine if _is_hidden(template, question, shown, index, key, whole)]
        yield from _hidden_findings(schema, hidden, subject.tool_places.get(schema.name, ""))
    if len(keys) > MAX_KEYS:
        what = f"the first {MAX_KEYS} of {len(keys)} schema keys were looked for in the prompt"
        yield note("tools-shown", what, "Fewer and smaller tools are easier to call, too.")


def _hidden_findings(schema: ToolSchema, hidden: Sequence[_Key], place: str) -> Findings:
    names = [key.label for key in hidden if key.is_name]
    details = [key.label for key in hidden if not key.is_name]
    if names:
        yield problem(
            "tools-shown",
            f"tool {schema.name!r}: the template never shows {', '.join(names)}",
            "The model cannot know these arguments: make the schema flatter, or describe them in the tool's description.",
            place,
        )
    elif details:
        yield note(
            "tools-shown",
            f"tool {schema.name!r}: the template does not show {', '.join(details)}",
            "Say it in the description instead; it is still checked when a call comes.",
            place,
        )
    else:
        yield ok("tools-shown", f"tool {schema.name!r}: everything its schema says stands in the prompt", place)


def _is_hidden(
    template: HFChatTemplate,
    question: list[dict[str, Any]],
    tools: Sequence[dict[str, Any]],
    index: int,
    key: _Key,
    whole: str,
) -> bool:
    changed = copy.deepcopy(list(tools))
    parent: Any = changed[index]
    for part in key.path[:-1]:
        parent = parent[part]
    del parent[key.path[-1]]
    try:
        return template.render(question, changed) == whole
    except TemplateError:
        return False  # the template asked for it


def _keys(tool: dict[str, Any]) -> Iterator[_Key]:
    function = tool["function"]
    if function.get("description"):
        yield _Key(("function", "description"), "its description", is_name=False)
    if isinstance(function.get("parameters"), dict):
        yield from _schema_keys(function["parameters"], ("function", "parameters"), "", top=True)


def _schema_keys(
    schema: dict[str, Any], path: tuple[str | int, ...], name: str, *, top: bool = False
) -> Iterator[_Key]:
    of = f" of {name}" if name else ""
    for keyword, value in schema.items():
        if keyword in _TOLD and not (top and keyword == "type") and value not in ("", [], None):
            yield _Key((*path, keyword), f"`{keyword}`{of}", is_name=False)
    properties = schema.get("properties")
    for inner, value in properties.items() if isinstance(properties, dict) else ():
        full = f"{name}.{inner}" if name else str(inner)
        yield _Key((*path, "properties", inner), full, is_name=True)
        if isinstance(value, dict):
            yield from _schema_keys(value, (*path, "properties", inner), full)
    if isinstance(schema.get("items"), dict):
        yield from _schema_keys(schema["items"], (*path, "items"), f"{name}[]")


def what_comes_back(subject: Subject, template: HFChatTemplate, parser: ToolCallParser) -> Findings:
    """Let the template write a call of each tool and the parser read it."""
    if not template.dialect.shows_calls:
        return  # its traits say so, and there is nothing to read
    for schema in subject.schemas:
        try:
            found = list(_round_trip(schema, subject, template, parser))
        except TemplateError as error:
            advice = "Look at what the template does with calls of this tool."
            found = [note("calls-round-trip", f"tool {schema.name!r}: no call could be written: {error}", advice)]
        yield from found
        if any(finding.severity is Severity.PROBLEM for finding in found):
            return  # mostly the same for all of them
    yield from _two_calls(subject.schemas, template, parser)


def _round_trip(schema: ToolSchema, subject: Subject, template: HFChatTemplate, parser: ToolCallParser) -> Findings:
    place = subject.tool_places.get(schema.name, "")
    arguments = full_arguments(schema.function.parameters)
    back = _read_back(template, parser, subject.schemas, [(schema.name, arguments)])
    if len(back) != 1 or not isinstance(back[0], ParsedCall) or back[0].name != schema.name:
        yield problem(
            "calls-round-trip",
            f"tool {schema.name!r}: the template writes a call that the parser reads as {_said(back)}",
            "Name the parser that fits this model (`tool_parser` under `rollout:`), or rename the tool.",
            place,
        )
        return
    came = back[0].arguments
    if came != arguments and (wrong := subject.registry.explain_arguments(schema.name, came)):
        what = f"tool {schema.name!r}: a right call comes back with arguments its own schema refuses: {wrong}"
        yield problem("calls-round-trip", what, "Change the argument's type to one this format carries.", place)
        return
    changed = _changed(arguments, came)
    if not changed and has_free_text(schema.function.parameters):
        hard = full_arguments(schema.function.parameters, text=HARD_TEXT)
        back = _read_back(template, parser, subject.schemas, [(schema.name, hard)])
        changed = _changed(hard, back[0].arguments if back and isinstance(back[0], ParsedCall) else {})
    if changed:
        what = f"tool {schema.name!r}: the values of {', '.join(changed)} come back otherwise than the template writes them"
        yield note(
            "calls-arguments", what, "This format does not carry every text; let the tool be lenient there.", place
        )
    else:
        yield ok(
            "calls-round-trip", f"tool {schema.name!r}: a call in the template's own format comes back whole", place
        )


def _two_calls(schemas: Sequence[ToolSchema], template: HFChatTemplate, parser: ToolCallParser) -> Findings:
    if not schemas:
        return
    pair = [(s.name, full_arguments(s.function.parameters)) for s in (schemas[0], schemas[-1])]
    try:
        back = _read_back(template, parser, schemas, pair)
    except TemplateError:
        return  # the template's traits say that it refuses two calls
    names = [call.name for call in back]
    if names == [name for name, _ in pair]:
        yield ok("calls-parallel", "two calls in one turn come back as two, in their order")
    elif len(back) != 1:  # a single one is a trait of the template, which dropped the other
        what = f"two calls in one turn come back as {_said(back)}"
        yield note("calls-parallel", what, "Tell the model to make one call a turn.")


def _read_back(
    template: HFChatTemplate, parser: ToolCallParser, schemas: Sequence[ToolSchema], calls: Sequence[tuple[str, Any]]
) -> tuple[ParsedCall | BrokenCall, ...]:
    turn = write_turn(template, calling(calls), schemas)
    return parser.parse(template.decode(turn.token_ids), schemas).calls


def _changed(sent: dict[str, Any], came: dict[str, Any]) -> list[str]:
    return [str(key) for key in sent if came.get(key) != sent[key]]


def _said(calls: Sequence[ParsedCall | BrokenCall]) -> str:
    said = [f"a broken call ({c.reason})" if isinstance(c, BrokenCall) else f"a call of {c.name!r}" for c in calls]
    return " and ".join(said) or "no call"
