"""From an import path to a tool: its class, imported and looked at, and the object made of it.

This runs in the process the tool runs in, so also in those of `execution: process` and `ray`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang_multiturn.config import closest
from sglang_multiturn.errors import ConfigError
from sglang_multiturn.schemas import ToolSchema
from sglang_multiturn.tools.base import Tool
from sglang_multiturn.tools.verl_versions import MOVED_CLASSES, deleted_module, verl_or_stand_in

__all__ = ["keeps_snapshots", "load_class", "make_tool"]

_METHODS = ("create", "execute", "calc_reward", "release")
_OPTIONAL = ("snapshot", "restore")


def load_class(path: str, source: str) -> type:
    """The class at an import path; `source` is where it was named, for messages.

    Raises:
        ConfigError: it cannot be imported or is no tool class; the import's own error is the cause.
    """
    module_name, _, class_name = path.rpartition(".")
    if not module_name:
        raise ConfigError(f"{source}: class_name {path!r} has no module; write 'package.module.Class'")
    module = _import(module_name, path, source)
    if module is None:
        return load_class(MOVED_CLASSES[path], source)
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
        raise ConfigError(f"{source}: module {module_name!r} has no class {class_name!r}{closest(class_name, classes)}")
    if missing := [name for name in _METHODS if not hasattr(found, name)]:
        raise ConfigError(f"{source}: {path} is no tool: it has no {', '.join(missing)}; subclass BaseTool")
    return found


def make_tool(class_path: str, config: Mapping[str, Any], tool_schema: ToolSchema | None, source: str) -> Tool:
    """The tool object of a YAML entry.

    Raises:
        ConfigError: its class cannot be loaded, or its constructor raised or made no tool.
    """
    tool_class = load_class(class_path, source)
    try:
        tool = tool_class(config=dict(config), tool_schema=_as_its_own(tool_class, tool_schema))
    except ConfigError as error:
        raise ConfigError(f"{source}: {class_path}: {error}") from error
    except (Exception, SystemExit) as error:  # a user's constructor may raise anything
        raise ConfigError(f"{source}: {class_path} could not be made: {type(error).__name__}: {error}") from error
    if not isinstance(tool, Tool):
        raise ConfigError(f"{source}: {class_path} made a {type(tool).__name__} that is no tool: it has no name")
    return tool


def keeps_snapshots(tool_class: type, source: str) -> bool:
    """Whether a tool class has `snapshot` and `restore`. Raises ConfigError: it has only one of them."""
    has = [name for name in _OPTIONAL if callable(getattr(tool_class, name, None))]
    if len(has) == 1:
        other = _OPTIONAL[has == ["snapshot"]]
        raise ConfigError(
            f"{source}: {tool_class.__name__} has {has[0]!r} and no {other!r}, and neither is of use without the other; "
            f"write {other!r} too, or give the method another name"
        )
    return bool(has)


def _as_its_own(tool_class: type, schema: ToolSchema | None) -> Any:
    """The schema as what the tool was written for: verl's class for verl's tools, if it can hold it; else ours.

    verl's drops what is nested. The model is shown the YAML's all the same: this is only what the tool sees.
    """
    verls = sys.modules.get("verl.tools.schemas")
    if (
        schema is None
        or verls is None
        or not any(base.__module__ == "verl.tools.base_tool" for base in tool_class.__mro__)
    ):
        return schema
    try:
        return verls.OpenAIFunctionToolSchema.model_validate(schema.for_template())
    except ValueError:  # pydantic's: verl's classes know less of JSON Schema than the YAML says
        return schema


def _import(module_name: str, path: str, source: str) -> ModuleType | None:
    """The module; None when verl has no more of it and the class is ours now."""
    try:
        with verl_or_stand_in():
            return importlib.import_module(module_name)
    except ImportError as error:
        missing = error.name or ""
        is_itself = isinstance(error, ModuleNotFoundError) and _is_within(module_name, missing)
        if is_itself and path in MOVED_CLASSES:
            return None
        why = _why_missing(module_name, missing) if is_itself else _why_broken(module_name, missing, error)
        raise ConfigError(f"{source}: class_name {path!r}: {why}") from error
    except (Exception, SystemExit) as error:  # a user's module runs when it is imported, and may raise anything
        why = f"module {module_name!r} cannot be imported: {_place(error)}{type(error).__name__}: {error}"
        raise ConfigError(f"{source}: class_name {path!r}: {why}") from error


def _is_within(name: str, package: str) -> bool:
    return bool(package) and (name == package or name.startswith(f"{package}."))


def _why_missing(module_name: str, missing: str) -> str:
    """There is no such module, or no such package above it."""
    said = f"module {module_name!r} cannot be imported (No module named {missing!r})"
    if (deleted := deleted_module(module_name)) is not None:
        return f"there is no module {module_name!r} any more: {deleted.sentence(module_name)}"
    if missing.partition(".")[0] == "verl" and "verl" not in sys.modules:
        return f"{said}: verl is not installed: pip install 'sglang_multiturn[verl]'"
    top = missing.partition(".")[0]
    if os.getcwd() not in sys.path and (Path(f"{top}.py").is_file() or Path(top).is_dir()):
        return f"{said}; it stands in {os.getcwd()}, which is not on PYTHONPATH"
    near = difflib.get_close_matches(missing, _siblings(missing), n=1, cutoff=0.8)
    return f"{said}; did you mean {near[0]!r}?" if near else f"{said}; is it installed or on PYTHONPATH?"


def _why_broken(module_name: str, missing: str, error: ImportError) -> str:
    """The module is there, and something that it imports is not."""
    said = f"module {module_name!r} cannot be imported: {_place(error)}{error}"
    if isinstance(error, ModuleNotFoundError) and (deleted := deleted_module(missing)) is not None:
        return f"{said}: {deleted.sentence(missing)}"
    if missing.partition(".")[0] == "verl" and "verl" not in sys.modules:
        return (
            f"{said}; without verl a tool can import verl.tools.base_tool, verl.tools.schemas and "
            "verl.utils.rollout_trace only: pip install 'sglang_multiturn[verl]'"
        )
    if missing.endswith((".base_tool", ".schemas")):
        return f"{said}; write verl.tools{missing[missing.rindex('.') :]}, which stood beside this file in verl"
    return said


def _siblings(module_name: str) -> list[str]:
    """Full names of the modules that stand where this one should; of top-level ones, those outside Python's own."""
    package_name, _, _ = module_name.rpartition(".")
    if not package_name:
        own = [folder for folder in sys.path if not folder.startswith((sys.prefix, sys.base_prefix))]
        return [found.name for found in pkgutil.iter_modules(own)]
    paths = getattr(sys.modules.get(package_name), "__path__", [])
    return [f"{package_name}.{found.name}" for found in pkgutil.iter_modules(paths)]


def _place(error: BaseException) -> str:
    """`file.py:7: `, the line of the user's that raised: the last outside the import system."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: "
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    outside = [f for f in frames if f.filename not in (__file__, importlib.__file__)]
    return f"{outside[-1].filename}:{outside[-1].lineno}: " if outside else ""
