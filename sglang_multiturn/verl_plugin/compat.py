"""Every patch of verl, with its reason. Nothing else in this package changes verl (the CPU stand-ins are in `cpu/`).

1. `_agent_loop_registry["sglang_multiturn"]` (verl/experimental/agent_loop/agent_loop.py:461): the loop registers itself,
   so that one launch flag is enough. The registry is what verl's own `@register` writes to.
2. `load_all_tools`, at its two names (agent_loop.py:53, imported by name; verl/tools/tool_registry.py:80, imported
   inside rl_dataset.py:130). verl reads `multi_turn.tool_config_path` with it in every worker and dataset before any loop
   sees it. It refuses `config: {}` (tool_registry.py:58 wants `config.type`) and its schema classes drop everything nested
   (verl/tools/schemas.py:22), so a prompt's length would be filtered by another schema than the model is shown.
3. `RolloutReplicaRegistry` under verl's own name `sglang` (verl/workers/rollout/replica.py:391): the same replica, whose
   server can end one generation of ours (`server.SglangReplica`). verl has no way to: a conversation that hung in its
   generation would hold its step up until the model stopped by itself. Other loops' requests go through verl's code alone,
   and prefill-decode disaggregation (replica.py:402) keeps verl's own classes.
4. `AgentLoopWorker._run_agent_loop` (agent_loop.py:661), which V0's and V1's workers share: it notes what `trajectory`
   says (validation or training, the step) where a loop can find it (`purpose`), and calls verl's own. verl does not tell a
   loop; what it samples with does not say it where validation samples as training does.

A tool YAML is ours when verl's loader could not load it as meant, or when it says so:
  - it has a `rollout:` key (verl knows none), or
  - an entry has no `config.type` (verl's loader fails on those), or a key that verl's loader does not read, or
  - an entry's class is one of this package, or stands under `verl.tools.` and this verl no longer has it.
Any other YAML goes through verl's own loader unchanged; `rollout: {}` is enough to make one ours.
Tools loaded so serve the loop `sglang_multiturn`; verl's own `tool_agent` cannot execute them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import yaml

from sglang_multiturn.verl_plugin.purpose import for_purpose

if TYPE_CHECKING:
    from sglang_multiturn.config import ToolsConfig
    from sglang_multiturn.schemas import ToolSchema
    from sglang_multiturn.tools.base import Tool
    from sglang_multiturn.tools.registry import ToolRegistry

logger = logging.getLogger(__name__)

LOOP_NAME = "sglang_multiturn"
LOOP_CLASS = "sglang_multiturn.verl_plugin.agent_loop.SglangMultiturnAgentLoop"
TOOL_REGISTRY_MODULE = "verl.tools.tool_registry"
AGENT_LOOP_MODULE = "verl.experimental.agent_loop.agent_loop"
REPLICA_MODULE = "verl.workers.rollout.replica"
_VERLS_KEYS = frozenset({"class_name", "config", "tool_schema"})
"""What verl's loader reads of an entry; it passes over any other key without a word."""


def patch_tool_loader(tool_registry: ModuleType) -> None:
    """Patch 2 at its first name, which the dataset imports from each time it is built."""
    original = tool_registry.load_all_tools

    @functools.wraps(original)
    def load_all_tools(tool_config_path: str | None, function_tool_path: str | None) -> list[Any]:
        if tool_config_path is None or not is_ours(tool_config_path):
            return NativeTools(original(tool_config_path, function_tool_path), tool_config_path)
        return _load_ours(Path(tool_config_path), original(None, function_tool_path))

    tool_registry.load_all_tools = load_all_tools  # type: ignore[attr-defined]


def patch_agent_loop(agent_loop: ModuleType) -> None:
    """Patch 1, and patch 2 at its second name."""
    agent_loop._agent_loop_registry.setdefault(LOOP_NAME, {"_target_": LOOP_CLASS})
    if not callable(agent_loop.load_all_tools):
        raise TypeError(f"{AGENT_LOOP_MODULE}.load_all_tools is not a function any more")
    agent_loop.load_all_tools = sys.modules[TOOL_REGISTRY_MODULE].load_all_tools  # type: ignore[attr-defined]


def patch_replica(replica: ModuleType) -> None:
    """Patch 3."""
    registry = replica.RolloutReplicaRegistry
    original = registry._registry["sglang"]

    @functools.wraps(original)
    def load() -> type[Any]:
        verls: type[Any] = original()
        try:
            from sglang_multiturn.verl_plugin import server
        except Exception:  # this verl's server is another than ours builds on: it works without us, aborts do not
            logger.exception("sglang_multiturn could not extend verl's SGLang server; generations cannot be aborted")
            return verls
        return server.SglangReplica if verls is server.verls.SGLangReplica else verls

    registry.register("sglang", load)


def patch_agent_loop_worker(agent_loop: ModuleType) -> None:
    """Patch 4."""
    original = agent_loop.AgentLoopWorker._run_agent_loop
    inspect.signature(original).bind(None, {}, trajectory={}, agent_name="")  # TypeError: not as it was

    @functools.wraps(original)
    async def _run_agent_loop(self: Any, sampling_params: Any, trajectory: Any, **kwargs: Any) -> Any:
        with for_purpose(trajectory):
            return await original(self, sampling_params, trajectory, **kwargs)

    agent_loop.AgentLoopWorker._run_agent_loop = _run_agent_loop


def is_ours(path: str | Path) -> bool:
    """Whether a tool YAML is this package's to load; see the module docstring."""
    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return False  # verl's loader says what is wrong with it
    if not isinstance(document, Mapping):
        return False
    entries = document.get("tools") or []
    return "rollout" in document or any(isinstance(entry, Mapping) and _entry_is_ours(entry) for entry in entries)


def _entry_is_ours(entry: Mapping[str, Any]) -> bool:
    config = entry.get("config")
    if not isinstance(config, Mapping) or "type" not in config or entry.keys() - _VERLS_KEYS:
        return True
    module = str(entry.get("class_name", "")).rpartition(".")[0]
    if module.partition(".")[0] == LOOP_NAME:
        return True
    return module.startswith("verl.tools.") and importlib.util.find_spec(module) is None


class LoadedTools(list["ToolView"]):
    """What the patched loader returns for our YAML: views for verl, and beside them what the loop runs."""

    def __init__(self, registry: ToolRegistry, config: ToolsConfig) -> None:
        super().__init__(ToolView(schema.name, SchemaView(schema)) for schema in registry.schemas(None))
        self.registry = registry
        self.config = config


@dataclass(frozen=True, slots=True)
class ToolView:
    """A tool as verl's dataset and workers look at it: a name and a schema."""

    name: str
    tool_schema: SchemaView


class SchemaView:
    """A whole schema behind the one method verl calls on its own (rl_dataset.py:137, tool_agent_loop.py:116)."""

    def __init__(self, schema: ToolSchema) -> None:
        self._schema = schema

    def model_dump(self, **_exclude: Any) -> dict[str, Any]:
        """Exactly what the model is shown, whatever verl asks to leave out."""
        return self._schema.for_template()


class NativeTools(list[Any]):
    """What verl's own loader returned: the same tools, and beside them the YAML, whose schemas verl's classes cut."""

    def __init__(self, tools: Iterable[Any], path: str | None) -> None:
        super().__init__(tools)
        self._path = path

    def schemas(self) -> dict[str, ToolSchema]:
        """The schemas of the YAML, whole, by name; without those that are none."""
        from pydantic import ValidationError

        from sglang_multiturn.schemas import ToolSchema

        document = {} if self._path is None else yaml.safe_load(Path(self._path).read_text(encoding="utf-8"))
        whole = {}
        for entry in document.get("tools") or []:
            with contextlib.suppress(ValidationError):
                schema = ToolSchema.model_validate(entry.get("tool_schema"))
                whole[schema.name] = schema
        return whole


def _load_ours(path: Path, function_tools: Iterable[Any]) -> LoadedTools:
    from sglang_multiturn.config import ToolsConfig
    from sglang_multiturn.tools.registry import ToolRegistry

    config = ToolsConfig.from_yaml(path)
    configured = ToolRegistry.from_config(config, str(path))
    source = f"{path} and function_tool_path"
    functions = ToolRegistry([as_tool(tool) for tool in function_tools], source)
    return LoadedTools(ToolRegistry.from_entries([*configured.entries, *functions.entries], source), config)


def registry_of(tools: list[Any]) -> ToolRegistry:
    """The registry of whatever `load_all_tools` returned in this worker."""
    from sglang_multiturn.tools.registry import ToolRegistry

    if isinstance(tools, LoadedTools):
        return tools.registry
    whole = tools.schemas() if isinstance(tools, NativeTools) else {}
    return ToolRegistry(
        [as_tool(tool) for tool in tools], "verl's tool_config_path and function_tool_path", schemas=whole
    )


def as_tool(tool: Any) -> Tool:
    """verl's tools satisfy our contract as they are; its function tools have no lifecycle and get one."""
    from verl.tools.function_tool import FunctionTool

    if isinstance(tool, FunctionTool):
        from sglang_multiturn.verl_plugin.function_tools import VerlFunctionTool

        return VerlFunctionTool(tool)
    return tool  # type: ignore[no-any-return]
