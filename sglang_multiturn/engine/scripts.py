"""Ready-made scripts for the scripted engine: what a dry run says, planned from each request.

A plan is a function from a request to the assistant turns it will play: `RequestSpec -> sequence of turns`, each one
a text, a `ScriptedTurn`, or a function that is given the conversation so far as text and returns one of these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from sglang_multiturn.chat.template import ChatTemplate
from sglang_multiturn.config import closest
from sglang_multiturn.engine.base import GenerationId
from sglang_multiturn.engine.scripted import ScriptedTurn
from sglang_multiturn.errors import ConfigError, EngineError
from sglang_multiturn.loading import load_function
from sglang_multiturn.request import RequestSpec
from sglang_multiturn.schemas import ToolSchema
from sglang_multiturn.tools.builtin.gsm8k import same_number

PlannedTurn = ScriptedTurn | str | Callable[[str], ScriptedTurn | str]
Turns = Sequence[PlannedTurn]
Plan = Callable[[RequestSpec], Turns]

_ANNOTATION = re.compile(r"<<([^<>=]+)=([^<>]*)>>")
_FINAL = re.compile(r"####\s*(\S+)\s*$")
_REPLIES = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


class PlannedScript:
    """A script that plays each request's plan, made when the request is taken up."""

    def __init__(self, plan: Plan, template: ChatTemplate) -> None:
        self._plan = plan
        self._template = template
        self._turns: dict[str, Turns] = {}

    def watch(self, specs: Iterable[RequestSpec]) -> Iterator[RequestSpec]:
        """Pass requests through, planning each one."""
        for spec in specs:
            self._turns[spec.request_id] = self._plan(spec)
            yield spec

    def __call__(self, generation_id: GenerationId, input_ids: Sequence[int]) -> ScriptedTurn | str:
        """The planned turn. Raises EngineError beyond the last one."""
        turns = self._turns.get(generation_id.request_id, ())
        if generation_id.turn >= len(turns):
            raise EngineError(f"generation {generation_id.rid}: the script has only {len(turns)} turns")
        turn = turns[generation_id.turn]
        return turn(self._template.decode(input_ids)) if callable(turn) else turn


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """A tool call in the Hermes format."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def follow_gsm8k(spec: RequestSpec) -> Turns:
    """Each `<<expression=value>>` of the row's solution as a calculator call, then `#### answer`.

    The answer is what the calculator last replied. Where the solution's own last step is not annotated, so that its
    answer is another number than its last annotation's value, the answer is the solution's.

    Raises:
        ConfigError: the row has no `extra_info.answer`.
    """
    solution = spec.extra_info.get("answer")
    if not isinstance(solution, str) or not (final := _FINAL.search(solution)):
        raise ConfigError(f"request {spec.request_id}: the gsm8k script needs a solution in extra_info.answer")
    steps = list(_ANNOTATION.finditer(solution))
    calls = [call_text("calculator", {"expression": step.group(1)}) for step in steps]
    if steps and same_number(steps[-1].group(2), final.group(1)):
        return [*calls, _answer_with_last_reply]
    return [*calls, f"#### {final.group(1)}"]


def _answer_with_last_reply(conversation: str) -> str:
    reply = _REPLIES.findall(conversation)[-1]
    return f"#### {reply}"


def call_tools(schemas: Sequence[ToolSchema], calls: int) -> Plan:
    """`calls` turns that call the offered tools one after the other with made-up arguments, then an answer."""
    texts = [call_text(schema.name, example_of(schema.function.parameters)) for schema in schemas]

    def plan(spec: RequestSpec) -> Turns:
        return [*(texts[i % len(texts)] for i in range(calls if texts else 0)), "Done."]

    return plan


def example_of(schema: dict[str, Any]) -> Any:
    """A small value that fits a JSON Schema's type; what it names in `default`, `examples` or `enum` comes first."""
    if "default" in schema:
        return schema["default"]
    for key in ("examples", "enum"):
        if schema.get(key):
            return schema[key][0]
    kind = schema.get("type", "object")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: example_of(properties.get(name, {"type": "string"})) for name in schema.get("required", ())}
    simple: dict[str, Any] = {"string": "1", "integer": 1, "number": 1.5, "boolean": True, "array": [], "null": None}
    return simple.get(kind)


def load_plan(name: str, schemas: Sequence[ToolSchema]) -> Plan:
    """A plan by name: `calls:N`, `gsm8k`, or `file.py:function`.

    Raises:
        ConfigError: there is no such plan.
    """
    kind, _, rest = name.partition(":")
    if kind == "calls" and rest.isdigit():
        return call_tools(schemas, int(rest))
    if name == "gsm8k":
        return follow_gsm8k
    file, _, function = name.rpartition(":")
    if not file.endswith(".py"):
        raise ConfigError(f"script {name!r} is unknown{closest(name, ['calls:4', 'gsm8k', 'my_script.py:plan'])}")
    return load_function(file, function, what="script")
