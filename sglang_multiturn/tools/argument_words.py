"""What is wrong with a call's arguments, in one sentence that a model can act on.

Values are the model's and hostile: they are quoted, cut, and never formatted with.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jsonschema import ValidationError

__all__ = ["explain_errors"]

_MOST_SENTENCES = 3
_MOST_CHARS = 600
_MOST_TEXT_CHARS = 60
_MOST_NAMED = 10
_KINDS = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "an integer",
    "null": "null",
    "number": "a number",
    "object": "an object",
    "string": "a string",
}
_BOUNDS = {
    "minimum": "be at least",
    "maximum": "be at most",
    "exclusiveMinimum": "be more than",
    "exclusiveMaximum": "be less than",
    "multipleOf": "be a multiple of",
}
_SIZES = {
    "minLength": ("have at least", "characters"),
    "maxLength": ("have at most", "characters"),
    "minItems": ("have at least", "items"),
    "maxItems": ("have at most", "items"),
    "minProperties": ("have at least", "keys"),
    "maxProperties": ("have at most", "keys"),
}


def explain_errors(errors: Iterable[ValidationError]) -> str | None:
    """What is wrong with three arguments at most, what is missing first; None when nothing is."""
    by_argument: dict[tuple[Any, ...], ValidationError] = {}
    for error in errors:
        about = (*error.absolute_path, _FIRST.get(error.validator, 2), str(_key_of(error)))
        if about not in by_argument or error.validator in ("enum", "const"):  # says more than `type`
            by_argument[about] = error
    ordered = sorted(by_argument.values(), key=lambda error: _FIRST.get(error.validator, 2))
    sentences = list(dict.fromkeys(map(_sentence, ordered)))
    if not sentences:
        return None
    said = "; ".join(sentences[:_MOST_SENTENCES])
    said = said if len(said) <= _MOST_CHARS else f"{said[:_MOST_CHARS]}..."
    return f"{said}; and more is wrong" if len(sentences) > _MOST_SENTENCES else said


_FIRST: Mapping[Any, int] = {"required": 0, "additionalProperties": 1}


def _key_of(error: ValidationError) -> Any:
    """The unknown key, for an error that stands at the object which has it."""
    return error.instance if error.validator == "additionalProperties" else None


def _sentence(error: ValidationError) -> str:
    where = _where(error)
    value: Any = error.validator_value
    instance: Any = error.instance
    if error.context:
        return _sentence_of_forms(error)
    match error.validator:
        case "required":
            return _missing(error, where)
        case "dependentRequired":
            return f"{where}: {_clean(error.message)}"
        case "additionalProperties" if isinstance(instance, str):
            return _unknown(error, where)
        case "uniqueItems":
            return f"{where} must not hold the same twice"
    if (must := _must(error)) is not None:
        return f"{where} must {must}, not {_shown(instance)}"
    if error.validator in _SIZES:
        size = len(instance)
        has, units = _SIZES[str(error.validator)]
        return f"{where} must {has} {value} {units}, it has {size}"
    if error.validator is None:  # a schema that is `false`, whose place is not told
        return f"{where}: {_shown(instance)} is not allowed"
    return f"{where}: {_clean(error.message)}"


def _must(error: ValidationError) -> str | None:
    """What the value must be, where that can be said in a few words."""
    value: Any = error.validator_value
    match error.validator:
        case "type":
            return f"be {_kinds(value)}"
        case "enum":
            return f"be {_one_of(value, error.instance)}"
        case "const":
            return f"be {_shown(value)}"
        case "pattern":
            reason = f" ({error.message})" if error.cause else ""
            return f"match the pattern {_shown(value)}{reason}"
    if error.validator in _BOUNDS:
        return f"{_BOUNDS[str(error.validator)]} {value}"
    return None


def _sentence_of_forms(error: ValidationError) -> str:
    """For `anyOf` and `oneOf`: what each form wants; or what is wrong with the one form that was meant."""
    branches: dict[Any, list[ValidationError]] = {}
    for inner in error.context or ():
        branches.setdefault(inner.relative_schema_path[0], []).append(inner)
    wanted = [_must(found[0]) for found in branches.values() if not found[0].relative_path]
    if len(wanted) == len(branches) and None not in wanted:
        phrases = dict.fromkeys(str(must).removeprefix("be ") for must in wanted)
        return f"{_where(error)} must be {_listed(phrases, 'or')}, not {_shown(error.instance)}"
    # A form of another type than the value's was not meant.
    meant = [found for found in branches.values() if not any(_is_of_another_type(inner) for inner in found)]
    if len(meant) == 1:
        return _sentence(meant[0][0])
    first = _sentence(min(meant or branches.values(), key=len)[0])
    return f"{_where(error)} fits none of its {len(branches)} forms; of the nearest: {first}"


def _is_of_another_type(error: ValidationError) -> bool:
    return error.validator == "type" and not error.relative_path


def _missing(error: ValidationError, where: str) -> str:
    named = error.schema.get("properties", {}) if isinstance(error.schema, Mapping) else {}
    required: Any = error.validator_value
    given: Any = error.instance
    names = [name for name in required if name not in given]
    prefix = "" if where == _ALL else f"{where}."
    told = [f"{prefix}{_clean(name)}" + (f" ({kind})" if (kind := _wanted(named.get(name))) else "") for name in names]
    return f"{_listed(told, 'and')} {'is' if len(told) == 1 else 'are'} missing"


def _unknown(error: ValidationError, where: str) -> str:
    known = list(error.schema.get("properties", {})) if isinstance(error.schema, Mapping) else []
    place = "" if where == _ALL else f" in {where}"
    key: Any = error.instance
    near = difflib.get_close_matches(key[:_MOST_TEXT_CHARS], known, n=1, cutoff=0.6)
    hint = (
        f"did you mean {_shown(near[0])}?"
        if near
        else f"known are {_listed(known, 'and')}"
        if known
        else "it takes none"
    )
    return f"there is no argument {_shown(key)}{place} ({hint})"


def _wanted(schema: Any) -> str:
    """What a value of a schema must be; empty when that is not said in a word."""
    if not isinstance(schema, Mapping):
        return ""
    if isinstance(schema.get("enum"), list):
        return _one_of(schema["enum"], None)
    return _kinds(schema["type"]) if "type" in schema else ""


_ALL = "the arguments"


def _where(error: ValidationError) -> str:
    """`filters[0].city`."""
    path = ""
    for part in error.absolute_path:
        path += f"[{part}]" if isinstance(part, int) else f".{_clean(str(part))}"
    return path.removeprefix(".") or _ALL


def _kinds(kinds: Any) -> str:
    names = [kinds] if isinstance(kinds, str) else list(kinds)
    return _listed([_KINDS.get(str(name), str(name)) for name in names], "or")


def _one_of(values: Sequence[Any], given: Any) -> str:
    words = [value for value in values if isinstance(value, str)]
    near = difflib.get_close_matches(given[:_MOST_TEXT_CHARS], words, n=1, cutoff=0.6) if isinstance(given, str) else []
    if len(values) > _MOST_NAMED and near:
        return f"one of {len(values)} values (did you mean {_shown(near[0])}?)"
    return _listed([_shown(value) for value in values], "or")


def _listed(words: Iterable[str], last: str) -> str:
    """`a, b or c`; of a long list its beginning."""
    words = [_clean(word) for word in words]
    if len(words) > _MOST_NAMED:
        return f"{', '.join(words[:_MOST_NAMED])} {last} {len(words) - _MOST_NAMED} more"
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _shown(value: Any) -> str:
    """A value as JSON would say it, however long or odd it is."""
    match value:
        case str():
            return repr(value[:_MOST_TEXT_CHARS]) + ("..." if len(value) > _MOST_TEXT_CHARS else "")
        case bool():
            return "true" if value else "false"
        case None:
            return "null"
        case list():
            return f"a list of {len(value)}"
        case dict():
            return f"an object with {_listed(map(str, value), 'and')}" if value else "an empty object"
        case int() if value.bit_length() > 256:
            return "a number of very many digits"
    return _clean(str(value))


def _clean(text: str) -> str:
    """Printable and short: names too may be the model's."""
    return "".join(_printable(text[: 2 * _MOST_TEXT_CHARS])) + ("..." if len(text) > 2 * _MOST_TEXT_CHARS else "")


def _printable(text: str) -> Iterator[str]:
    return (character if character.isprintable() else "?" for character in text)
