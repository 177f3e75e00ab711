"""What goes wrong when a tool's schema is written by hand in YAML, beyond what is no JSON Schema at all.

Some of it is valid JSON Schema that hardly anyone means: a list that may hold anything, arguments that may all be left
out. There the YAML has to say so (`items: {}`, `required: []`).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_multiturn.config import closest
from sglang_multiturn.schemas import ToolSchema

__all__ = ["SchemaMistake", "schema_mistakes"]

Path = tuple[str | int, ...]

_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_OTHER_TYPES = {
    "bool": "boolean",
    "dict": "object",
    "float": "number",
    "int": "integer",
    "list": "array",
    "none": "null",
    "str": "string",
    "text": "string",
}
"""What other languages call them."""
_HOLDS_SCHEMA = ("items", "additionalProperties", "contains", "not", "propertyNames", "if", "then", "else")
_HOLDS_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_HOLDS_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OTHER_PROPERTIES = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties", "if", "dependentSchemas")
"""Where one of these stands, properties may be named elsewhere than in `properties`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaMistake:
    """One mistake. `path` leads to the part that is wrong, from `tool_schema` on; `key` is the key in it, if one is."""

    path: Path
    key: str | None = None
    said: str
    """What is wrong with that part and what to write: the end of a sentence that it begins."""


def schema_mistakes(schema: ToolSchema, *, strict: bool = True) -> Iterator[SchemaMistake]:
    """What is wrong, from top to bottom.

    Args:
        schema: As it stands in the YAML.
        strict: Also what is valid and most likely not meant: `required` or `items` left out.
    """
    written = schema.for_template()
    if outside := list(_not_json(written, ())):
        yield from outside  # the rest would stumble over it
        return
    yield from _near_keys(written, ("type", "function"), ())
    yield from _near_keys(written["function"], ("name", "description", "parameters", "strict"), ("function",))
    parameters, path = schema.function.parameters, ("function", "parameters")
    kind = parameters.get("type", "object")
    if kind != "object" and kind in _TYPES:
        said = f"are of type {kind!r}, and arguments are always an object; write type: object with properties"
        yield SchemaMistake(path=path, key="type", said=said)
        return
    properties = parameters.get("properties")
    if strict and isinstance(properties, Mapping) and properties and "required" not in parameters:
        yield SchemaMistake(path=path, said=f"does not say what is required; write {_required_line(properties)}")
    yield from _in_schema(parameters, path, strict)


def _required_line(properties: Mapping[str, Any]) -> str:
    needed = [name for name, schema in properties.items() if not (isinstance(schema, Mapping) and "default" in schema)]
    everything = "required: [], if all of it may be left out"
    return f"required: [{', '.join(needed)}], or {everything}" if needed else everything


def _in_schema(schema: Any, path: Path, strict: bool) -> Iterator[SchemaMistake]:
    if not isinstance(schema, Mapping):
        return
    properties = schema.get("properties")
    if isinstance(properties, list):
        yield SchemaMistake(
            path=path, key="properties", said=f"has its properties in a list; {_as_mapping(properties)}"
        )
    if "required" in schema:
        yield from _in_required(schema, path)
    yield from _in_type(schema, path, strict)
    for key, inner in _inner_schemas(schema):
        yield from _in_schema(inner, (*path, *key), strict)


def _in_type(schema: Mapping[str, Any], path: Path, strict: bool) -> Iterator[SchemaMistake]:
    given = schema.get("type")
    kinds = [kind for kind in (given if isinstance(given, list) else [given]) if isinstance(kind, str)]
    for kind in kinds:
        if kind not in _TYPES:
            hint = f"; did you mean {_OTHER_TYPES[kind]!r}?" if kind in _OTHER_TYPES else closest(kind, _TYPES)
            yield SchemaMistake(path=path, key="type", said=f"has the type {kind!r}, which is none{hint}")
    if strict and "array" in kinds and not {"items", "prefixItems", "$ref"} & schema.keys():
        hint = "write items: {type: string}, or items: {} for anything"
        hint = "'item' should be 'items'" if "item" in schema else hint
        yield SchemaMistake(path=path, key="type", said=f"is an array and does not say of what; {hint}")


def _in_required(schema: Mapping[str, Any], path: Path) -> Iterator[SchemaMistake]:
    required, properties = schema["required"], schema.get("properties")
    if isinstance(required, bool) and len(path) >= 4:
        instead = f"name it in the list of {path[-3]}, required: [{path[-1]}]" if required else "leave the key out"
        said = f"has required: {str(required).lower()}, as draft 3 had it; {instead}"
        yield SchemaMistake(path=path, key="required", said=said)
    elif not isinstance(required, list):
        names = [required] if isinstance(required, str) else []
        yield SchemaMistake(
            path=path, key="required", said=f"has no list in required; write required: [{', '.join(names)}]"
        )
    elif isinstance(properties, Mapping) and not schema.keys() & set(_OTHER_PROPERTIES):
        for name in required:
            if not isinstance(name, str):
                said = f"requires {name!r}, which is no name; write names in quotes, as in required: [city]"
                yield SchemaMistake(path=path, key="required", said=said)
            elif name not in properties:
                said = f"requires {name!r}, which is no property{closest(name, map(str, properties))}"
                yield SchemaMistake(path=path, key="required", said=said)


def _inner_schemas(schema: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    for key in _HOLDS_SCHEMA:
        if key in schema:
            yield (key,), schema[key]
    for key in _HOLDS_SCHEMAS:
        if isinstance(schema.get(key), list):
            yield from (((key, index), inner) for index, inner in enumerate(schema[key]))
    for key in _HOLDS_NAMED_SCHEMAS:
        if isinstance(schema.get(key), Mapping):
            yield from (((key, name), inner) for name, inner in schema[key].items())


def _as_mapping(properties: list[Any]) -> str:
    """How a list of properties should have been written, with the name of the first."""
    first = properties[0] if properties and isinstance(properties[0], Mapping) else {}
    name = first.get("name", next(iter(first), "city") if len(first) == 1 else "city")
    kind = first.get("type", "string")
    return f"write a mapping from each name to its schema, properties: {{{name}: {{type: {kind}}}}}"


def _near_keys(written: Mapping[str, Any], known: Iterable[str], path: Path) -> Iterator[SchemaMistake]:
    """Other keys are kept and shown; one that is nearly a known one is that one misspelt."""
    known = list(known)
    for key in written:
        if key not in known and (near := difflib.get_close_matches(key, known, n=1, cutoff=0.75)):
            yield SchemaMistake(path=path, key=key, said=f"has an unknown key {key!r}; did you mean {near[0]!r}?")


def _not_json(value: Any, path: Path) -> Iterator[SchemaMistake]:
    """What YAML reads as something that JSON cannot say: dates, and words such as `on` and `no` as keys."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(key, str):
                yield from _not_json(inner, (*path, key))
                continue
            hint = "; YAML reads on, yes, off and no as true and false" if isinstance(key, bool) else ""
            yield SchemaMistake(path=path, said=f"has a key that is no text, {key!r}; put it in quotes{hint}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _not_json(inner, (*path, index))
    elif isinstance(value, float) and not math.isfinite(value):
        yield SchemaMistake(path=path, said=f"is {value}, which JSON cannot say; write a number, or leave it out")
    elif not isinstance(value, str | int | float | None):
        kind = type(value).__name__
        yield SchemaMistake(path=path, said=f"is a {kind} to YAML, which JSON cannot say; put it in quotes")
