"""Made-up arguments for a tool: every argument its schema names, and hard ones among them."""

from __future__ import annotations

from typing import Any

HARD_TEXT = 'He said "yes",\n\t<b>é 猫</b> & {"k": [1]} \\ end'
"""What breaks careless quoting: quotes, a new line, tags, braces, a backslash and letters beyond ASCII."""
_MAX_DEPTH = 12


def full_arguments(schema: dict[str, Any], *, text: str = "text") -> dict[str, Any]:
    """A value for every property of an object schema; free strings are `text`."""
    made = _example(schema, text, _MAX_DEPTH)
    return made if isinstance(made, dict) else {}


def has_free_text(schema: dict[str, Any]) -> bool:
    """Whether some string of the schema may hold anything."""
    return full_arguments(schema, text="one") != full_arguments(schema, text="two")


def _example(schema: Any, text: str, depth: int) -> Any:
    if not isinstance(schema, dict) or depth == 0:
        return text
    if "const" in schema:
        return schema["const"]
    for key in ("examples", "enum"):
        if isinstance(schema.get(key), list) and schema[key]:
            return schema[key][0]
    if "default" in schema:
        return schema["default"]
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            return _example(schema[key][0], text, depth - 1)
    return _of_type(schema, text, depth)


def _of_type(schema: dict[str, Any], text: str, depth: int) -> Any:
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "object":
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        return {str(name): _example(value, text, depth - 1) for name, value in properties.items()}
    if kind == "array":
        return [_example(schema.get("items", {"type": "string"}), text, depth - 1)]
    if kind == "string":
        return "2024-01-31" if "pattern" in schema or "format" in schema else text
    lowest = schema.get("minimum", 0)
    lowest = lowest if isinstance(lowest, int | float) else 0
    numbers = {"integer": int(lowest) + 3, "number": lowest + 1.5, "boolean": True, "null": None}
    return numbers.get(str(kind), text)
