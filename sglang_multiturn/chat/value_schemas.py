"""A tool's parameter schema, boiled down to what SGLang's detectors read of it: one `type` a value.

They look no further than `type` (some at `anyOf`), and a nullable parameter makes one of them answer null to anything
(`function_call/minimax_m2.py`, `_convert_param_value_with_types`), another drop the call (`hunyuan_detector.py`,
`_get_types`, on a list of types).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_MAX_REFERENCES = 8
_TYPE_OF: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def plain_schemas(keys: Iterable[str], parameters: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For each named value `{"type": ...}`, `{"anyOf": [...]}` where text is one of several, or `{}` where unknown."""
    properties = parameters.get("properties")
    known = properties if isinstance(properties, dict) else {}
    return {key: _plain(_types(known.get(key), parameters)) for key in keys}


def _plain(types: list[str]) -> dict[str, Any]:
    if len(types) < 2:
        return {"type": types[0]} if types else {}
    if "string" in types:
        return {"anyOf": [{"type": one} for one in types]}
    return {"type": "object"}  # to the detectors: whatever JSON says


def _types(schema: Any, root: Mapping[str, Any]) -> list[str]:
    """Every type but null that a schema allows, each once."""
    found: dict[str, None] = {}
    pending = [schema]
    for _ in range(_MAX_REFERENCES * 8):
        if not pending:
            break
        one = pending.pop(0)
        if isinstance(one, dict):
            pending += _inner(one, root)
            found |= dict.fromkeys(_own_types(one))
    return [kind for kind in found if kind != "null"]


def _inner(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Any]:
    """The schemas one refers to or offers."""
    if "type" in schema:
        return []
    inner = [option for key in ("anyOf", "oneOf", "allOf") for option in _list(schema.get(key))]
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, dict) else None
        inner.append(target)
    return inner


def _own_types(schema: Mapping[str, Any]) -> list[str]:
    if "type" in schema:
        return [str(kind) for kind in (_list(schema["type"]) or [schema["type"]])]
    if "enum" in schema or "const" in schema:
        values = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
        return [_TYPE_OF[type(value)] for value in values if type(value) in _TYPE_OF]
    return ["object"] if "properties" in schema else ["array"] if "items" in schema else []


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
