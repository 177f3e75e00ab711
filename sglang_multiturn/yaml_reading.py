"""From a YAML file to settings, and what a wrong one is told: file, line, key, and a suggestion."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from sglang_multiturn.errors import ConfigError

__all__ = ["YamlPlaces", "closest", "load_yaml", "load_yaml_with_places", "validate_config"]

Model = TypeVar("Model", bound=BaseModel)
Keys = tuple[Any, ...]
"""The way to a value: keys of mappings and indices of lists."""

_SHOWN_CHARS = 200
_MUST_BE = {
    "model_type": "must be a mapping (key: value)",
    "model_attributes_type": "must be a mapping (key: value)",
    "dict_type": "must be a mapping (key: value)",
    "list_type": "must be a list (lines that begin with '- ')",
}


class YamlPlaces:
    """Where everything stands in a file."""

    def __init__(self, source: str | Path, node: yaml.Node) -> None:
        self._source = source
        self._node = node

    def of(self, *keys: Any) -> str:
        """`file:line` of the deepest of `keys` that stands in the file."""
        node, line = self._node, self._node.start_mark.line
        for part in keys:
            if isinstance(node, yaml.MappingNode):
                found = next(((key, value) for key, value in node.value if key.value == str(part)), None)
                if found is None:
                    break
                line, node = found[0].start_mark.line, found[1]
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                line = node.start_mark.line
            else:
                break
        return f"{self._source}:{line + 1}"


def load_yaml(path: Path, model: type[Model]) -> Model:
    """Read a YAML file as `model`.

    Raises:
        ConfigError: the file is missing, is no YAML, or a key or value in it is wrong.
    """
    return load_yaml_with_places(path, model)[0]


def load_yaml_with_places(path: Path, model: type[Model]) -> tuple[Model, YamlPlaces]:
    """The same, and where everything stands in the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is no UTF-8: {error.reason}"
        raise ConfigError(f"{path}: cannot be read ({why}); give the path of a YAML file") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(data, Mapping) or node is None:
        raise ConfigError(f"{path}: expected a mapping at the top, got {type(data).__name__}")
    if doubled := list(_doubled_keys(node, path)):
        raise ConfigError("\n".join(doubled))
    places = YamlPlaces(path, node)
    try:
        return model.model_validate(data), places
    except ValidationError as error:
        raise ConfigError(_explain(error, model, data, path, places)) from error


def validate_config(values: Mapping[str, Any], model: type[Model], source: str) -> Model:
    """A mapping from anywhere else (a launch config, keyword arguments) as `model`. Raises ConfigError."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(_explain(error, model, values, source, None)) from error


def closest(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` or the list of what is known: the tail of many error messages."""
    known = sorted(known)
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else f"; known: {', '.join(known) or 'none'}"


def _doubled_keys(node: yaml.Node, path: Path, where: str = "") -> Iterator[str]:
    """YAML keeps the last of two equal keys and says nothing."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _doubled_keys(item, path, f"{where}{index}.")
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in seen and name != "<<":
                yield f"{path}:{line}: the key {where + name!r} stands in line {seen[name]} already; remove one of them"
            seen[name] = line
            yield from _doubled_keys(value, path, f"{where}{name}.")


def _explain(
    error: ValidationError, model: type[BaseModel], data: Any, source: str | Path, places: YamlPlaces | None
) -> str:
    """One line for each key that is wrong."""
    by_key: dict[Keys, list[ErrorDetails]] = {}
    for one in error.errors():
        by_key.setdefault(_as_written(one, model, data), []).append(one)
    lines = []
    for keys, found in by_key.items():
        place = str(source) if places is None else places.of(*keys)
        lines.append(f"{place}: {_sentence(keys, found, model)}")
    return "\n".join(lines)


def _sentence(keys: Keys, found: list[ErrorDetails], model: type[BaseModel]) -> str:
    where, first = ".".join(map(str, keys)), found[0]
    given = first["input"]
    if first["type"] == "extra_forbidden":
        return f"unknown key {where!r}{_known_instead(keys, model)}"
    if first["type"] == "missing":
        return f"{where!r} is missing"
    if given is None:
        return f"{where!r} is empty; give it a value, or leave the key out"
    said = " or ".join(dict.fromkeys(_MUST_BE.get(one["type"], one["msg"]) for one in found))
    shown = repr(given) if len(repr(given)) <= _SHOWN_CHARS else f"{repr(given)[:_SHOWN_CHARS]}..."
    hint = ""
    if first["type"] == "literal_error":
        known = re.findall(r"'([^']*)'", str(first.get("ctx", {}).get("expected", "")))
        hint = closest(given, known) if isinstance(given, str) else ""
        hint = hint if hint.endswith("?") else ""
        if given is False and "off" in known:
            hint = "; YAML reads off as false: put it in quotes"
    return f"{where!r}: {said}, got {shown}{hint}" if where else f"{said}, got {shown}{hint}"


def _known_instead(keys: Keys, model: type[BaseModel]) -> str:
    """What an unknown key may have been meant to be, or where it belongs."""
    key = str(keys[-1])
    hint = closest(key, _names(_model_at(model, keys[:-1])))
    if not hint.endswith("?"):
        for name, field in model.model_fields.items():
            inner = _model_in(field.annotation)
            if inner is not None and name != keys[0] and key in _names(inner):
                return f"; it belongs under {name!r}"
    return hint


def _as_written(one: ErrorDetails, model: type[BaseModel], data: Any) -> Keys:
    """The keys to a wrong value as they stand in the file: old names, and without pydantic's marks of a union."""
    keys: list[Any] = []
    for part in one["loc"]:
        if isinstance(data, Mapping):
            if part not in data:
                olds = _old_names(_model_at(model, tuple(keys)))
                part = next((old for old, new in olds.items() if new == part and old in data), part)
            if part not in data:
                return (*keys, part) if one["type"] == "missing" else tuple(keys)
        elif not (isinstance(data, list) and isinstance(part, int) and part < len(data)):
            return tuple(keys)
        data = data[part]
        keys.append(part)
    return tuple(keys)


def _names(model: type[BaseModel]) -> set[str]:
    return {*model.model_fields, *_old_names(model)}


def _old_names(model: type[BaseModel]) -> Mapping[str, str]:
    """Names that a model understands beside its own: its class attribute `old_names`."""
    old_names: Mapping[str, str] = getattr(model, "old_names", {})
    return old_names


def _model_at(model: type[BaseModel], keys: Keys) -> type[BaseModel]:
    """The model whose keys stand at `keys`."""
    for part in keys:
        field = model.model_fields.get(part) if isinstance(part, str) else None
        inner = None if field is None else _model_in(field.annotation)
        model = model if inner is None else inner
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model in `Model`, `Model | None` or `list[Model]`."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)
