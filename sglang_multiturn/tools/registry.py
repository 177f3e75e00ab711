"""From a YAML to tools: classes by import path, schemas for the model, and arguments checked against them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from jsonschema import SchemaError
from jsonschema.exceptions import best_match
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for

from sglang_multiturn.config import ToolConfig, ToolsConfig, closest
from sglang_multiturn.errors import ConfigError
from sglang_multiturn.schemas import ToolSchema
from sglang_multiturn.tools.base import Tool

MOVED_CLASSES: Mapping[str, str] = {
    "verl.tools.gsm8k_tool.Gsm8kTool": "sglang_multiturn.tools.builtin.gsm8k.Gsm8kTool",
    "verl.tools.base_tool.BaseTool": "sglang_multiturn.tools.base.BaseTool",
}
"""Class paths that verl dropped, and ours that keep their behaviour; used when verl's own cannot be imported."""

_SHOWN_VALUE_CHARS = 200


class ToolRegistry:
    """The tools of a run, by name. One object of each serves all conversations."""

    def __init__(self, tools: Iterable[Tool] = (), source: str = "tools") -> None:
        """Raises ConfigError for two tools of one name and for a schema that is no JSON Schema."""
        self._tools: dict[str, Tool] = {}
        self._validators: dict[str, Validator] = {}
        for tool in tools:
            if tool.name in self._tools:
                raise ConfigError(f"{source}: two tools are named {tool.name!r}; rename one of them")
            self._tools[tool.name] = tool
            self._validators[tool.name] = _validator(self._schema(tool), source)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Tools of a YAML file. Raises ConfigError."""
        return cls.from_config(ToolsConfig.from_yaml(path), str(path))

    @classmethod
    def from_config(cls, config: ToolsConfig, source: str = "tools") -> Self:
        """Tools of a configuration read elsewhere. Raises ConfigError."""
        return cls([_make_tool(entry, source) for entry in config.tools], source)

    @property
    def names(self) -> tuple[str, ...]:
        """Names, in the order of the YAML."""
        return tuple(self._tools)

    def get(self, name: str) -> Tool | None:
        """The tool of that name."""
        return self._tools.get(name)

    def schemas(self, names: Sequence[str] | None = None) -> list[ToolSchema]:
        """What the model is shown, of all tools or of some. Raises ConfigError for a name that is not configured."""
        for name in names or ():
            if name not in self._tools:
                raise ConfigError(f"tool {name!r} is not configured{closest(name, self._tools)}")
        return [self._schema(tool) for name, tool in self._tools.items() if names is None or name in names]

    def explain_arguments(self, name: str, arguments: dict[str, Any]) -> str | None:
        """One sentence for the model when the arguments break the tool's schema; None when they fit."""
        error = best_match(self._validators[name].iter_errors(arguments))
        if error is None:
            return None
        where = ".".join(str(part) for part in error.absolute_path)
        said = error.message if len(error.message) <= _SHOWN_VALUE_CHARS else error.message[:_SHOWN_VALUE_CHARS] + "..."
        return f"{where}: {said}" if where else said

    @staticmethod
    def _schema(tool: Tool) -> ToolSchema:
        schema = getattr(tool, "tool_schema", None)
        if isinstance(schema, ToolSchema):
            return schema
        return ToolSchema.model_validate(schema.model_dump(exclude_unset=True) if schema is not None else {})


def load_class(path: str, source: str) -> type:
    """The class at an import path.

    Raises:
        ConfigError: it cannot be imported or is no tool class; the import's own error is the cause.
    """
    module_name, _, class_name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name) if module_name else None
    except ImportError as error:
        if path in MOVED_CLASSES:
            return load_class(MOVED_CLASSES[path], source)
        raise ConfigError(
            f"{source}: class_name {path!r}: module {module_name!r} cannot be imported ({error}); "
            "is it installed or on PYTHONPATH?"
        ) from error
    if module is None:
        raise ConfigError(f"{source}: class_name {path!r} has no module; write 'package.module.Class'")
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
        raise ConfigError(f"{source}: module {module_name!r} has no class {class_name!r}{closest(class_name, classes)}")
    missing = [name for name in ("create", "execute", "calc_reward", "release") if not hasattr(found, name)]
    if missing:
        raise ConfigError(f"{source}: {path} is no tool: it has no {', '.join(missing)}; subclass BaseTool")
    return found


def _make_tool(entry: ToolConfig, source: str) -> Tool:
    tool_class = load_class(entry.class_name, source)
    try:
        tool = tool_class(config=dict(entry.config), tool_schema=entry.tool_schema)
    except ConfigError as error:
        raise ConfigError(f"{source}: {entry.class_name}: {error}") from error
    except Exception as error:  # a user's constructor may raise anything
        raise ConfigError(f"{source}: {entry.class_name} could not be made: {type(error).__name__}: {error}") from error
    if not isinstance(tool, Tool):
        raise ConfigError(f"{source}: {entry.class_name} made a {type(tool).__name__} that is no tool")
    return tool


def _validator(schema: ToolSchema, source: str) -> Validator:
    parameters = schema.function.parameters
    validator_class = validator_for(parameters)
    try:
        validator_class.check_schema(parameters)
    except SchemaError as error:
        where = ".".join(str(part) for part in error.absolute_path) or "parameters"
        raise ConfigError(f"{source}: tool {schema.name!r}: {where}: {error.message}; write a JSON Schema") from error
    return validator_class(parameters)
