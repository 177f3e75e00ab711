"""A tool's arguments against its schema: what is wrong with them, and the defaults that were left out.

Any JSON Schema may stand in a YAML. Nothing is ever fetched for one: a `$ref` leads to a place inside the same schema. A
`pattern` is matched with a time limit, since the text is the model's and a careless pattern can take for ever on it.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import regex  # type: ignore[import-untyped]
from jsonschema import Draft202012Validator, SchemaError, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from sglang_multiturn.errors import ConfigError
from sglang_multiturn.schemas import ToolSchema
from sglang_multiturn.tools.argument_words import explain_errors

__all__ = ["ArgumentRules"]

logger = logging.getLogger(__name__)

MAX_PATTERN_TEXT_CHARS = 10_000
PATTERN_TIMEOUT_S = 0.1
_MOST_ERRORS = 32
_MOST_DEPTH = 64
_MOST_REFERENCES = 16


class ArgumentRules:
    """The `parameters` of one tool's schema."""

    def __init__(self, schema: ToolSchema, source: str) -> None:
        """Raises ConfigError, naming `source`: this is no JSON Schema, or it leads outside itself."""
        self._parameters = schema.function.parameters
        said = f"{source}: tool {schema.name!r}"
        try:
            validator_class = validator_for(self._parameters, default=Draft202012Validator)
            validator_class.check_schema(self._parameters)
            self._validator: Validator = _bounded(validator_class)(self._parameters, registry=Registry())
            root = Resource.from_contents(self._parameters, default_specification=DRAFT202012)
            self._resolver = Registry().resolver_with_root(root)
            for reference in _texts(self._parameters, "$ref", "$dynamicRef"):
                self._refuse_outside(reference, said)
            for pattern in _texts(self._parameters, "pattern"):
                regex.compile(pattern)
            list(itertools.islice(self._validator.iter_errors({}), _MOST_ERRORS))
        except ConfigError:
            raise
        except SchemaError as error:
            where = ".".join(str(part) for part in error.absolute_path) or "parameters"
            raise ConfigError(f"{said}: {where}: {error.message[:500]}; write a JSON Schema") from error
        except RecursionError as error:
            raise ConfigError(f"{said}: a $ref leads to itself, so that no arguments can be checked") from error
        except Exception as error:  # a pattern that is none, a $schema that is no text: the libraries raise many things
            why = f"{type(error).__name__}: {error}"[:500]
            raise ConfigError(
                f"{said}: arguments cannot be checked with this schema: {why}; write a JSON Schema"
            ) from error

    def _refuse_outside(self, reference: str, said: str) -> None:
        try:
            self._resolver.lookup(reference)
        except Unresolvable as error:
            raise ConfigError(
                f"{said}: $ref {reference!r} leads nowhere inside this schema, and nothing is fetched; write what it "
                "means under $defs, and '#/$defs/<name>'"
            ) from error

    def explain(self, arguments: dict[str, Any]) -> str | None:
        """One sentence for the model when the arguments break the schema; None when they fit."""
        try:
            return explain_errors(itertools.islice(self._validator.iter_errors(arguments), _MOST_ERRORS))
        except RecursionError:
            return "the arguments are nested too deeply"
        except Exception as error:  # noqa: BLE001 - numbers beyond all bounds and the like; the text is the model's
            logger.debug("arguments cannot be checked: %r", error)
            return "the arguments cannot be checked against the tool's schema; write them more simply"

    def with_defaults(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """A copy of arguments that fit, with the schema's `default` where a key was left out, in nested objects too.

        Validators do not fill defaults in, and tools written against the schema expect them. `anyOf` and `oneOf` fill
        nothing: which form was meant is not known. An object that was left out is made only by a default of its own.
        """
        filled: dict[str, Any] = self._filled(self._parameters, arguments, 0)
        return filled

    def _filled(self, schema: Any, value: Any, depth: int) -> Any:
        if depth > _MOST_DEPTH or not isinstance(value, dict | list):
            return value
        schemas = list(self._parts(schema))
        if isinstance(value, list):
            items = [part["items"] for part in schemas if "items" in part]
            return [self._filled(items[0] if items else {}, item, depth + 1) for item in value]
        known: dict[str, Any] = {}
        for part in schemas:
            known |= part["properties"] if isinstance(part.get("properties"), Mapping) else {}
        given = dict(value)
        for name, inner in known.items():
            if name not in given and isinstance(inner, Mapping) and "default" in inner:
                given[name] = copy.deepcopy(inner["default"])
        return {name: self._filled(known.get(name, {}), item, depth + 1) for name, item in given.items()}

    def _parts(self, schema: Any, hops: int = 0) -> Iterator[Mapping[str, Any]]:
        """A schema, what it refers to, and all of its `allOf`."""
        if not isinstance(schema, Mapping) or hops > _MOST_REFERENCES:
            return
        yield schema
        if isinstance(reference := schema.get("$ref"), str):
            yield from self._parts(self._resolver.lookup(reference).contents, hops + 1)
        for part in schema.get("allOf", ()):
            yield from self._parts(part, hops + 1)


def _texts(schema: Any, *keywords: str) -> Iterator[str]:
    """What some keywords say anywhere in a schema. A property may be called like one: then it holds a schema, no text."""
    if isinstance(schema, Mapping):
        for key, value in schema.items():
            if key in keywords and isinstance(value, str):
                yield value
            elif key not in ("const", "enum", "default", "examples"):
                yield from _texts(value, *keywords)
    elif isinstance(schema, list):
        for item in schema:
            yield from _texts(item, *keywords)


# Keywords that match patterns


@functools.cache
def _bounded(validator_class: type[Validator]) -> type[Validator]:
    """A JSON Schema dialect whose patterns take bounded time."""
    bounded: type[Validator] = extend(  # type: ignore[no-untyped-call]
        validator_class,
        {"pattern": _pattern, "patternProperties": _pattern_properties, "additionalProperties": _additional_properties},
    )
    return bounded


def _pattern(validator: Any, pattern: str, text: Any, schema: Any) -> Iterator[ValidationError]:
    if not validator.is_type(text, "string"):
        return
    if len(text) > MAX_PATTERN_TEXT_CHARS:
        reason = f"only texts of up to {MAX_PATTERN_TEXT_CHARS} characters are checked"
        yield ValidationError(reason, cause=ValueError(reason))
        return
    try:
        if not _matches(pattern, text):
            yield ValidationError("does not match")
    except TimeoutError as error:
        yield ValidationError("checking it took too long", cause=error)


def _pattern_properties(validator: Any, patterns: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if not validator.is_type(instance, "object"):
        return
    for pattern, inner in patterns.items():
        for key, value in instance.items():
            if _matches_in_time(pattern, key):
                yield from validator.descend(value, inner, path=key, schema_path=pattern)


def _additional_properties(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if not validator.is_type(instance, "object"):
        return
    patterns = schema.get("patternProperties", {})
    unknown = (key for key in instance if key not in schema.get("properties", {}))
    for key in unknown:
        if any(_matches_in_time(pattern, key) for pattern in patterns):
            continue
        if validator.is_type(allowed, "object"):
            yield from validator.descend(instance[key], allowed, path=key)
        elif not allowed:
            yield ValidationError("is not known", instance=key)


def _matches(pattern: str, text: str) -> bool:
    return regex.search(pattern, text, timeout=PATTERN_TIMEOUT_S) is not None


def _matches_in_time(pattern: str, key: str) -> bool:
    try:
        return len(key) <= MAX_PATTERN_TEXT_CHARS and _matches(pattern, key)
    except TimeoutError:
        return False
