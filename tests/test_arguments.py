"""Arguments against a schema: the one sentence a model is told, and the defaults a tool is given."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_multiturn.errors import ConfigError
from sglang_multiturn.schemas import FunctionSchema, ToolSchema
from sglang_multiturn.tools.arguments import ArgumentRules
from sglang_multiturn.tools.schema_mistakes import schema_mistakes

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 2, "maxLength": 20},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "code": {"type": "string", "pattern": "^[A-Z]{3}$"},
        "when": {"anyOf": [{"type": "integer"}, {"type": "null"}, {"const": "now"}]},
        "stops": {
            "type": "array",
            "maxItems": 2,
            "uniqueItems": True,
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "stay": {"type": "object"}},
                "required": ["name"],
                "additionalProperties": False,
            },
        },
        "shape": {
            "oneOf": [
                {"type": "object", "properties": {"radius": {"type": "number"}}, "required": ["radius"]},
                {"type": "array", "items": {"type": "number"}},
            ]
        },
    },
    "required": ["city"],
    "additionalProperties": False,
}


def rules(parameters: dict[str, Any]) -> ArgumentRules:
    return ArgumentRules(ToolSchema(function=FunctionSchema(name="f", parameters=parameters)), "here")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"city": "Rome"}, None),
        ({"city": "Rome", "when": None, "shape": {"radius": 1}, "stops": [{"name": "a"}, {"name": "b"}]}, None),
        ({}, "city (a string) is missing"),
        ({"city": 3}, "city must be a string, not 3"),
        ({"city": True}, "city must be a string, not true"),
        ({"city": ["Rome"]}, "city must be a string, not a list of 1"),
        ({"city": {"name": "Rome"}}, "city must be a string, not an object with name"),
        ({"city": "R"}, "city must have at least 2 characters, it has 1"),
        ({"city": "R" * 21}, "city must have at most 20 characters, it has 21"),
        ({"city": "Rome", "unit": "celcius"}, "unit must be 'celsius' or 'fahrenheit', not 'celcius'"),
        ({"city": "Rome", "days": 9}, "days must be at most 7, not 9"),
        ({"city": "Rome", "days": "three"}, "days must be an integer, not 'three'"),
        ({"city": "Rome", "code": "abc"}, "code must match the pattern '^[A-Z]{3}$', not 'abc'"),
        ({"city": "Rome", "when": "soon"}, "when must be an integer, null or 'now', not 'soon'"),
        ({"city": "Rome", "day": 1}, "there is no argument 'day' (did you mean 'days'?)"),
        (
            {"city": "Rome", "xyzzy": 1},
            "there is no argument 'xyzzy' (known are city, unit, days, code, when, stops and shape)",
        ),
        ({"city": "Rome", "stops": [{"name": "a"}, {}]}, "stops[1].name (a string) is missing"),
        ({"city": "Rome", "stops": [{"name": "a", "nam": 1}]}, "there is no argument 'nam' in stops[0] (did you mean 'name'?)"),
        ({"city": "Rome", "stops": [{"name": c} for c in "abc"]}, "stops must have at most 2 items, it has 3"),
        ({"city": "Rome", "stops": [{"name": "a"}] * 2}, "stops must not hold the same twice"),
        ({"city": "Rome", "shape": {}}, "shape.radius (a number) is missing"),
        ({"city": "Rome", "shape": {"radius": "wide"}}, "shape.radius must be a number, not 'wide'"),
        ({"city": "Rome", "shape": [1, "two"]}, "shape[1] must be a number, not 'two'"),
        ({"city": "Rome", "shape": "round"}, "shape must be an object or a list, not 'round'"),
        (
            {"days": 0, "unit": 1},
            "city (a string) is missing; unit must be 'celsius' or 'fahrenheit', not 1; days must be at least 1, not 0",
        ),
        (
            {"days": 0, "unit": 1, "code": 2, "when": "x"},
            "city (a string) is missing; unit must be 'celsius' or 'fahrenheit', not 1; days must be at least 1, not 0; "
            "and more is wrong",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence(arguments: dict[str, Any], said: str | None) -> None:
    assert rules(WEATHER).explain(arguments) == said


@pytest.mark.parametrize(
    ("parameters", "arguments", "said"),
    [
        ({"required": ["a", "b"], "properties": {"a": {"type": "integer"}}}, {}, "a (an integer) and b are missing"),
        ({"properties": {"a": {"const": 3}}}, {"a": 4}, "a must be 3, not 4"),
        ({"properties": {"a": {"exclusiveMinimum": 0}}}, {"a": 0}, "a must be more than 0, not 0"),
        ({"properties": {"a": {"multipleOf": 5}}}, {"a": 7}, "a must be a multiple of 5, not 7"),
        ({"properties": {"a": False}}, {"a": 1}, "the arguments: 1 is not allowed"),
        ({"minProperties": 1}, {}, "the arguments must have at least 1 keys, it has 0"),
        ({"properties": {"a": {"type": ["integer", "null"]}}}, {"a": "x"}, "a must be an integer or null, not 'x'"),
        (
            {"properties": {"a": {"enum": [f"v{i:02}" for i in range(30)]}}},
            {"a": "v3"},
            "a must be one of 30 values (did you mean 'v23'?), not 'v3'",
        ),
        (
            {"properties": {"a": {"enum": list(range(30))}}},
            {"a": "x"},
            "a must be 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 or 20 more, not 'x'",
        ),
        ({"patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": False}, {"x_1": 1}, None),
        (
            {"patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
            {"x_1": "a", "y": 2},
            "x_1 must be an integer, not 'a'; y must be a string, not 2",
        ),
        (
            {"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}},
            {"a": "x"},
            "a must be an integer, not 'x'",
        ),
        ({"dependentRequired": {"a": ["b"]}}, {"a": 1}, "the arguments: 'b' is a dependency of 'a'"),
    ],
)
def test_other_keywords(parameters: dict[str, Any], arguments: dict[str, Any], said: str | None) -> None:
    assert rules({"type": "object", **parameters}).explain(arguments) == said


HOSTILE: list[Any] = [
    "x" * 1_000_000,
    "\x1b[2J\x00\u202e\n<|im_end|>",
    "{0.__class__} %s %(x)s ${HOME}",
    10**4000,
    [[]] * 100_000,
    {"k" * 5000: 1, "\x07": 2},
    {str(i): i for i in range(10_000)},
    float("inf"),
    float("nan"),
]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: str(type(value)))
@pytest.mark.parametrize("name", ["city", "days", "unit", "code", "when", "stops", "shape", "\x1b[31mname" * 100])
def test_hostile_values_make_a_short_printable_sentence(name: str, value: Any) -> None:
    said = rules(WEATHER).explain({"city": "Rome", name: value})
    assert said is None or (len(said) <= 650 and said.isprintable())


def test_arguments_nested_beyond_all_bounds_are_refused() -> None:
    tree = {"type": "object", "properties": {"child": {"$ref": "#"}}}
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"child": deep}
    assert rules(tree).explain(deep) == "the arguments are nested too deeply"


@pytest.mark.parametrize(
    ("pattern", "text", "said"),
    [
        ("^(a|aa)+$", "a" * 60 + "!", "a must match the pattern '^(a|aa)+$' (checking it took too long), not 'aaaa"),
        (
            "^a*$",
            "a" * 10_001,
            "a must match the pattern '^a*$' (only texts of up to 10000 characters are checked), not",
        ),
        ("^a*$", "a" * 10_000, None),
    ],
)
def test_a_pattern_takes_bounded_time(pattern: str, text: str, said: str | None) -> None:
    told = rules({"type": "object", "properties": {"a": {"pattern": pattern}}}).explain({"a": text})
    assert told is None if said is None else (told or "").startswith(said)


def test_a_careless_pattern_for_keys_takes_bounded_time() -> None:
    parameters = {"type": "object", "patternProperties": {"^(a|aa)+$": {}}, "additionalProperties": False}
    assert rules(parameters).explain({"a" * 60 + "!": 1}) == f"there is no argument {'a' * 60!r}... (it takes none)"


def test_nothing_is_fetched_for_a_schema() -> None:
    """A server stands ready, and nobody calls."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        remote = f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"
        for parameters in [
            {"properties": {"a": {"$ref": remote}}},
            {"$ref": remote},
            {"properties": {"a": {"$dynamicRef": remote}}},
        ]:
            with pytest.raises(Exception, match="leads nowhere inside this schema, and nothing is fetched"):
                rules({"type": "object", **parameters})
        rules({"type": "object", "$schema": remote, "$id": remote}).explain({"a": 1})
        with pytest.raises(BlockingIOError):
            server.accept()


# Defaults


NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"default": "celsius"},
        "limits": {"default": {"low": 1}, "properties": {"low": {"default": 9}, "high": {"default": 5}}},
        "page": {"properties": {"size": {"default": 10}}},
        "rows": {"items": {"$ref": "#/$defs/row"}},
        "tags": {"default": []},
    },
    "allOf": [{"properties": {"sort": {"default": "asc"}}}],
    "$defs": {"row": {"type": "object", "properties": {"n": {"default": 0}}}},
}


@pytest.mark.parametrize(
    ("arguments", "filled"),
    [
        ({}, {"unit": "celsius", "limits": {"low": 1, "high": 5}, "tags": [], "sort": "asc"}),
        (
            {"unit": None, "limits": {}, "page": {}, "rows": [{}, {"n": 2}], "tags": ["x"], "sort": "desc", "more": {}},
            {
                "unit": None,
                "limits": {"low": 9, "high": 5},
                "page": {"size": 10},
                "rows": [{"n": 0}, {"n": 2}],
                "tags": ["x"],
                "sort": "desc",
                "more": {},
            },
        ),
    ],
)
def test_defaults_are_filled_in_where_a_key_was_left_out(arguments: dict[str, Any], filled: dict[str, Any]) -> None:
    before = json.dumps(arguments)
    assert rules(NESTED).with_defaults(arguments) == filled
    assert json.dumps(arguments) == before


def test_a_tool_may_change_what_it_was_given() -> None:
    own = rules(NESTED)
    arguments: dict[str, Any] = {"rows": [{"n": 1}]}
    first = own.with_defaults(arguments)
    first["tags"].append("mine")
    first["limits"]["low"] = 100
    first["rows"][0]["n"] = 100
    assert arguments == {"rows": [{"n": 1}]}
    assert own.with_defaults({})["tags"] == []
    assert own.with_defaults({})["limits"] == {"low": 1, "high": 5}


OWN = [rules(WEATHER), rules(NESTED)]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([*WEATHER["properties"], *NESTED["properties"], "x"]), json_values, max_size=5))
def test_any_arguments_are_told_apart_and_filled_once(arguments: dict[str, Any]) -> None:
    for own in OWN:
        said = own.explain(arguments)
        assert said is None or (said.isprintable() and len(said) <= 650)
        filled = own.with_defaults(arguments)
        assert repr(own.with_defaults(filled)) == repr(filled)
        assert set(arguments) <= filled.keys()


KEYWORDS = [
    *(
        "type",
        "properties",
        "required",
        "items",
        "enum",
        "const",
        "default",
        "anyOf",
        "allOf",
        "not",
        "pattern",
        "$ref",
    ),
    *("$defs", "minimum", "additionalProperties", "patternProperties", "if", "then", "prefixItems", "$schema", "$id"),
]
odd_schemas = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(["object", "array", "string", "x", "#", "#/$defs/x", "("]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KEYWORDS, "x"]), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@example({"required": [[]], "properties": {}}, {})
@given(st.dictionaries(st.sampled_from(KEYWORDS), odd_schemas, max_size=5), st.dictionaries(st.just("x"), json_values))
def test_any_schema_is_taken_or_refused_in_words(parameters: dict[str, Any], arguments: dict[str, Any]) -> None:
    schema = ToolSchema(function=FunctionSchema(name="f", parameters=parameters))
    assert all(mistake.said.isprintable() for mistake in schema_mistakes(schema))
    said, own = "", None
    try:
        own = ArgumentRules(schema, "here")
    except ConfigError as error:
        said = str(error)
    if own is None:
        assert said.startswith("here: tool 'f'")
    else:
        own.explain(arguments)
        assert arguments.keys() <= own.with_defaults(arguments).keys()
