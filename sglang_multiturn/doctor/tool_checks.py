"""The tool YAML: can it be read, are its classes tools, are its schemas schemas. No tool is executed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for

from sglang_multiturn.config import ToolConfig, ToolsConfig, closest
from sglang_multiturn.doctor.examples import full_arguments
from sglang_multiturn.doctor.findings import Finding, Findings, note, ok, problem
from sglang_multiturn.doctor.subject import Subject
from sglang_multiturn.errors import ConfigError
from sglang_multiturn.schemas import ToolSchema
from sglang_multiturn.tools.base import BaseTool
from sglang_multiturn.tools.registry import ToolEntry, ToolRegistry
from sglang_multiturn.tools.schema_mistakes import schema_mistakes
from sglang_multiturn.tools.tool_classes import load_class

PLAIN_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What OpenAI allows as a function's name, and every format of calls can carry."""
_LIFECYCLE = ("create", "execute", "calc_reward", "release")


def load_tools(subject: Subject, path: Path) -> Findings:
    """Read the YAML and make every tool by itself, so that one that is wrong hides no other."""
    try:
        config = ToolsConfig.from_yaml(path)
    except ConfigError as error:
        subject.tools_complete = False
        for sentence in re.split(rf"\n(?={re.escape(str(path))}:)", str(error)):
            yield problem("tools-yaml", sentence, "Correct this line; docs/settings.md has every key under `rollout:`.")
        return
    subject.tools_config = config
    if not config.tools:
        yield note(
            "tools-none", "the YAML lists no tools", "Add entries under `tools:`, or leave the file out.", str(path)
        )
        return
    made: dict[str, ToolEntry] = {}
    places: dict[str, str] = {}
    for index, entry in enumerate(config.tools):
        place = config.place("tools", index, otherwise=str(path))
        tool = yield from _make(entry, place)
        if tool is None:
            subject.tools_complete = False
            continue
        if tool.name in made:
            what = f"two tools are named {tool.name!r}; the other one stands at {places[tool.name]}"
            yield problem("tools-name-twice", what, "Rename one: a call could not tell which is meant.", place)
            continue
        made[tool.name], places[tool.name] = tool, place
    subject.registry, subject.tool_places = ToolRegistry.from_entries(made.values(), str(path)), places
    if made:
        yield ok("tools-yaml", f"{len(made)} tool(s) were made: {', '.join(made)}", str(path))


def _make(entry: ToolConfig, place: str) -> Generator[Finding, None, ToolEntry | None]:
    """One tool, or what is wrong with it and None."""
    try:
        load_class(entry.class_name, place)
        if entry.tool_schema is not None and (wrong := list(_schema_problems(entry, entry.tool_schema, place))):
            yield from wrong
            return None
        (made,) = ToolRegistry.from_config(ToolsConfig(tools=[entry]), place).entries
    except ConfigError as error:
        yield problem(
            "tools-class", str(error).removeprefix(f"{place}: "), "Correct class_name, config or the class.", place
        )
        return None
    return made


def _schema_problems(entry: ToolConfig, schema: ToolSchema, place: str) -> Findings:
    """Why a schema that stands in the YAML is refused when a run starts."""
    if wrong := _wrong_schema(schema):
        yield problem("tools-schema", wrong, "Write a JSON Schema: json-schema.org/learn shows how.", place)
        return
    for mistake in schema_mistakes(schema, strict="type" not in entry.config):
        what = f"tool {schema.name!r}: {'.'.join(map(str, mistake.path[1:]))} {mistake.said}"
        check = "tools-required" if mistake.key == "required" else "tools-schema"
        yield problem(check, what, "A run does not start with it: correct the schema in the YAML.", place)


def _wrong_schema(schema: ToolSchema) -> str | None:
    """Why a tool's parameters are no JSON Schema that arguments can be checked against."""
    parameters = schema.function.parameters
    validator_class = validator_for(parameters)
    try:
        validator_class.check_schema(parameters)
        list(validator_class(parameters).iter_errors(full_arguments(parameters)))
    except SchemaError as error:
        where = ".".join(map(str, error.absolute_path)) or "parameters"
        return f"tool {schema.name!r}: {where}: {error.message}"
    except Exception as error:  # noqa: BLE001 - a reference that leads nowhere, a pattern that is none
        return f"tool {schema.name!r}: arguments cannot be checked: {type(error).__name__}: {error}"
    return None


def check_tools(subject: Subject) -> Findings:
    """What can be told of each tool without calling it."""
    for schema in subject.schemas:
        entry = subject.registry.entry(schema.name)
        place = subject.tool_places.get(schema.name, "")
        yield from _schema_findings(schema, place)
        if entry.source is None:
            yield from _method_findings(entry.name, type(entry.tool), place)
        else:
            yield from _method_findings(entry.name, load_class(entry.source.class_path, place), place)


def _schema_findings(schema: ToolSchema, place: str) -> Findings:
    name, parameters = schema.name, schema.function.parameters
    properties = _properties(parameters)
    if not PLAIN_NAME.fullmatch(name):
        yield note(
            "tools-name",
            f"tool name {name!r} has characters that not every format of calls carries",
            "Use letters, digits, _ and -, at most 64: other parsers and servers read nothing else.",
            place,
        )
    for path, required, known in _required_names(parameters):
        if unknown := [key for key in required if key not in known]:
            what = f"tool {name!r}: {path} requires {unknown[0]!r}, which is no property{closest(str(unknown[0]), map(str, known))}"
            yield problem("tools-required", what, "Every call would be refused: correct the name, or add the property.", place)  # fmt: skip
    silent = [str(key) for key, value in properties.items() if not _describes(value)]
    if not schema.function.description.strip():
        yield note("tools-description", f"tool {name!r} has no description", "Say in a sentence what it does.", place)
    elif silent:
        what = f"tool {name!r} does not describe {', '.join(silent)}"
        yield note("tools-description", what, "A model knows an argument by its description.", place)
    if parameters.get("type", "object") != "object":
        what = f"tool {name!r}: parameters are of type {parameters['type']!r}, arguments are always an object"
        yield problem("tools-schema", what, "Write type: object with properties.", place)


def _method_findings(name: str, tool_class: Any, place: str) -> Findings:
    if getattr(tool_class, "execute", None) is BaseTool.execute:
        what = f"tool {name!r}: {tool_class.__name__} does not define execute"
        yield problem(
            "tools-execute", what, "Write `async def execute(self, instance_id, parameters, **kwargs)`.", place
        )
        return
    for method in _LIFECYCLE:
        function = inspect.unwrap(getattr(tool_class, method))
        if not inspect.iscoroutinefunction(function):
            what = f"tool {name!r}: {method} is no coroutine function"
            yield problem("tools-execute", what, f"Write `async def {method}(...)`: it is awaited.", place)
    try:
        inspect.signature(tool_class.execute).bind(None, "an id", {})
    except TypeError as error:
        what = f"tool {name!r}: execute cannot be called with (instance_id, parameters): {error}"
        yield problem(
            "tools-execute", what, "Write `async def execute(self, instance_id, parameters, **kwargs)`.", place
        )
    except ValueError:  # no signature can be told
        return


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _describes(schema: Any) -> bool:
    return isinstance(schema, Mapping) and bool(str(schema.get("description") or "").strip())


def _required_names(schema: Any, path: str = "parameters") -> Iterator[tuple[str, list[Any], Mapping[str, Any]]]:
    """Each object schema's `required` beside its properties, nested ones too."""
    if not isinstance(schema, Mapping):
        return
    properties = _properties(schema)
    if isinstance(schema.get("required"), list) and "properties" in schema:
        yield path, schema["required"], properties
    for name, value in properties.items():
        yield from _required_names(value, f"{path}.{name}")
    yield from _required_names(schema.get("items"), f"{path}.items")
