"""What verl's older versions had under `verl.tools` and today's no longer has, and a stand-in where verl is missing.

Taken from the published wheels 0.4.0 to 0.9.1. verl 0.8.0 deleted every tool it came with.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

from sglang_multiturn.schemas import FunctionSchema, ToolSchema
from sglang_multiturn.tools import base

__all__ = ["DELETED_MODULES", "MOVED_CLASSES", "DeletedModule", "deleted_module", "verl_or_stand_in"]

Function = TypeVar("Function", bound=Callable[..., Any])

MOVED_CLASSES: Mapping[str, str] = {
    "verl.tools.gsm8k_tool.Gsm8kTool": "sglang_multiturn.tools.builtin.gsm8k.Gsm8kTool",
    "verl.tools.base_tool.BaseTool": "sglang_multiturn.tools.base.BaseTool",
}
"""Class paths that verl dropped, and ours that keep their behaviour; used when verl's own cannot be imported."""

_COPY = (
    "copy {file} of verl {last} into a package of yours, write its `from .base_tool` and `from .schemas` as "
    "`from verl.tools.base_tool` and `from verl.tools.schemas`, and give its new path"
)
_AND_ITS_HELPERS = _COPY + "; copy verl/tools/utils/ with it"
_MCP = (
    "no released verl has it: copy verl/tools/utils/mcp_clients/ from verl's repository (v0.7.1), or call your MCP "
    "server in a tool of your own"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedModule:
    """A module that verl had from one version to another."""

    first: str
    last: str
    advice: str

    def sentence(self, name: str) -> str:
        """Who had it, and what to do."""
        file = f"{name.replace('.', '/')}.py"
        advice = self.advice.replace("{file}", file).replace("{last}", self.last)
        return f"verl {self.first} to {self.last} had it, {advice}"


DELETED_MODULES: Mapping[str, DeletedModule] = {
    "verl.tools.gsm8k_tool": DeletedModule(
        first="0.4.0", last="0.7.1", advice="use sglang_multiturn.tools.builtin.gsm8k.Gsm8kTool, which behaves like it"
    ),
    "verl.tools.geo3k_tool": DeletedModule(
        first="0.4.1",
        last="0.7.1",
        advice=_COPY + " (sglang_multiturn.tools.builtin.gsm8k.Gsm8kTool is the nearest here: it compares numbers)",
    ),
    "verl.tools.search_tool": DeletedModule(first="0.4.0", last="0.7.1", advice=_AND_ITS_HELPERS),
    "verl.tools.sandbox_fusion_tools": DeletedModule(first="0.4.0", last="0.7.1", advice=_COPY),
    "verl.tools.image_zoom_in_tool": DeletedModule(
        first="0.6.0", last="0.7.1", advice="and there is nothing here to take its place: only text reaches a model"
    ),
    "verl.tools.mcp_base_tool": DeletedModule(first="0.4.1", last="0.7.1", advice=_AND_ITS_HELPERS),
    "verl.tools.mcp_search_tool": DeletedModule(first="0.4.1", last="0.7.1", advice=_AND_ITS_HELPERS),
    "verl.tools.utils.mcp_clients": DeletedModule(first="0.4.1", last="0.7.1", advice=_MCP),
    "verl.tools.utils.tool_registry": DeletedModule(
        first="0.4.1", last="0.7.1", advice="import it from verl.tools.tool_registry"
    ),
    "verl.tools.utils": DeletedModule(
        first="0.4.0", last="0.7.1", advice="copy what you need of verl/tools/utils/ of verl {last} into your package"
    ),
    "verl.utils.reward_score.math": DeletedModule(
        first="0.4.0", last="0.5.0", advice="import it from verl.utils.reward_score.math_reward"
    ),
    "verl.interactions": DeletedModule(
        first="0.4.1",
        last="0.7.1",
        advice="write the user or environment as an interaction of sglang_multiturn (interactions/base.py)",
    ),
}
"""What old tool files and YAMLs name, by module or package."""


def deleted_module(name: str) -> DeletedModule | None:
    """What verl had under a module's name, or under the package it was in."""
    parts = name.split(".")
    prefixes = (".".join(parts[:end]) for end in range(len(parts), 1, -1))
    return next((DELETED_MODULES[prefix] for prefix in prefixes if prefix in DELETED_MODULES), None)


# Where verl is not installed


class _BaseTool(base.BaseTool):
    """Ours, with what tools that call `super()` expect of verl's since 0.6."""

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        if tool_schema is None and type(self).get_openai_tool_schema is not base.BaseTool.get_openai_tool_schema:
            tool_schema = self.get_openai_tool_schema()
        super().__init__(config, tool_schema)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, base.ToolResponse]:
        """Ours returns the id alone."""
        created = await super().create(instance_id, **kwargs)
        assert isinstance(created, str)
        return created, base.ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str | base.ToolResponse, float, dict[str, Any]]:
        """Answers, where ours says that it is not written."""
        return base.ToolResponse(text="Updated the tool state."), 0.0, {}


def _untraced(function: Function) -> Function:
    return function


_SCHEMAS: Mapping[str, object] = {
    "OpenAIFunctionToolSchema": ToolSchema,
    "OpenAIFunctionSchema": FunctionSchema,
    "OpenAIFunctionParametersSchema": dict,
    "OpenAIFunctionPropertySchema": dict,
    "ToolResponse": base.ToolResponse,
}
_STAND_INS: Mapping[str, Mapping[str, object]] = {
    "verl": {},
    "verl.tools": {},
    "verl.tools.schemas": _SCHEMAS,
    "verl.tools.base_tool": {**_SCHEMAS, "BaseTool": _BaseTool},
    "verl.utils": {},
    "verl.utils.rollout_trace": {"rollout_trace_op": _untraced},
}
_LOCK = threading.RLock()


@contextlib.contextmanager
def verl_or_stand_in() -> Iterator[None]:
    """While a tool's module is imported: where verl is not installed, the modules every tool file starts with.

    They are `verl.tools.base_tool`, `verl.tools.schemas` and `verl.utils.rollout_trace`, and they are gone afterwards, so
    that nobody else takes them for verl.
    """
    with _LOCK:
        if "verl" in sys.modules or importlib.util.find_spec("verl") is not None:
            yield
            return
        modules = {name: _module(name, content) for name, content in _STAND_INS.items()}
        for name in modules:
            package, _, own_name = name.rpartition(".")
            if package:
                setattr(modules[package], own_name, modules[name])
        sys.modules.update(modules)
        try:
            yield
        finally:
            for name in modules:
                sys.modules.pop(name, None)


def _module(name: str, content: Mapping[str, object]) -> ModuleType:
    module = ModuleType(name, "Stands in for verl's module of this name, which is not installed.")
    module.__dict__.update(content)
    if not content:
        module.__path__ = []  # a package, with nothing in it to be found on disk
    return module
