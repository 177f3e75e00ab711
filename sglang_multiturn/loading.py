"""Code of a user's that a flag or a YAML names: functions in a file."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_multiturn.config import closest
from sglang_multiturn.errors import ConfigError


def load_function(path: str, name: str, *, what: str) -> Callable[..., Any]:
    """The function `name` of the file at `path`; `what` it is for goes into messages.

    Raises:
        ConfigError: there is no such file, or no such function in it. What the file itself raises is passed on.
    """
    if not Path(path).is_file():
        raise ConfigError(f"{what} file {path!r} does not exist")
    spec = importlib.util.spec_from_file_location(f"{what}_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None  # a file path always has one
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError(f"{what} file {path!r} has no function {name!r}{closest(name, functions)}")
    return function  # type: ignore[no-any-return]
