"""What the package promises as a whole: a light import, its public names, and its layers."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import sglang_multiturn

ROOT = Path(sglang_multiturn.__file__).parent
HEAVY = ("torch", "transformers", "sglang", "ray", "verl", "aiohttp")

LAYERS = {
    "errors": 0,
    "schemas": 0,
    "engine.base": 1,
    "metrics": 1,
    "tokens": 1,
    "request": 1,
    "config": 1,
    "run_folder.durable": 1,
    "loading": 1,
    "trajectory": 1,
    "chat.template": 1,
    "chat.dialect": 1,
    "chat.encoding": 1,
    "chat.formats": 1,
    "chat.frames": 1,
    "chat.hf_template": 1,
    "chat.value_schemas": 1,
    "chat.traits": 1,
    "chat.tagged_calls": 1,
    "chat.reasoning": 1,
    "chat.python_calls": 1,
    "chat.proof": 1,
    "chat.marked_calls": 1,
    "chat.literals": 1,
    "chat.listed_calls": 1,
    "chat.harmony": 1,
    "chat.drift": 1,
    "chat.calls": 1,
    "chat.call_formats": 1,
    "chat.appending": 1,
    "chat.byte_chatml": 1,
    "chat.truncation": 1,
    "chat.parsing": 1,
    "tools.base": 1,
    "tools.host": 1,
    "tools.agent_data": 1,
    "yaml_reading": 1,
    "interactions.base": 1,
    "cpu.determinism": 2,
    "cpu.sglang_kernels": 2,
    "chat.parsers": 2,
    "engine": 2,
    "tools": 2,
    "interactions": 2,
    "conversation": 3,
    "failures": 3,
    "rewards": 3,
    "dataset": 3,
    "journal": 3,
    "groups": 3,
    "run_folder.marks": 3,
    "run_folder.in_flight": 3,
    "run_folder.in_flight_writer": 3,
    "rollout": 3,
    "runner": 3,
    "summary": 4,
    "run_folder": 4,
    "standalone": 4,
    "status": 4,
    "doctor": 4,
    "verl_plugin": 4,
    "cpu": 4,
    "cli": 5,
    "__main__": 5,
}


def test_importing_the_package_is_light_and_fast() -> None:
    code = (
        "import sys, time; start = time.process_time(); import sglang_multiturn; "
        f"heavy = [m for m in {HEAVY!r} if m in sys.modules]; "
        "print(time.process_time() - start, heavy)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    cpu_s, _, heavy = printed.strip().partition(" ")
    assert heavy == "[]"
    assert float(cpu_s) < 0.4


def test_every_public_name_is_there_without_anything_heavy() -> None:
    code = (
        "import sys, sglang_multiturn as s; [getattr(s, name) for name in s.__all__]; "
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def test_the_public_names_are_these() -> None:
    assert sorted(sglang_multiturn.__all__) == sorted(
        """AsyncRolloutRequest BaseTool ByteChatML Disposition Engine FinishReason Generation GenerationId
        GroupConfig GroupSampler HFChatTemplate Message RequestSpec RequestState RolloutConfig RolloutContext RolloutEngine
        SGLangEngine SamplingParams ScriptedEngine ScriptedTurn SglangMultiturnError StopReason TokenLedger ToolError ToolRegistry
        ToolResponse Trajectory __version__ read_run read_trajectories run_one""".split()
    )


def test_modules_import_their_own_layer_or_lower() -> None:
    wrong = [
        f"{module} (layer {layer(module)}) imports {imported} (layer {layer(imported)})"
        for module, tree in modules()
        for imported in imports_of(tree, at_run_time_only=True)
        if layer(imported) > layer(module)
    ]
    assert wrong == []


def test_only_the_verl_plugin_and_the_cpu_parts_import_verl() -> None:
    wrong = [
        module
        for module, tree in modules()
        if not module.startswith(("verl_plugin", "cpu"))
        and any(name.split(".")[0] == "verl" for name in third_party_of(tree))
    ]
    assert wrong == []


def modules() -> list[tuple[str, ast.Module]]:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "stand_in" in parts or parts == ("__init__",):
            continue
        name = ".".join(part for part in parts if part != "__init__")
        found.append((name, ast.parse(path.read_text(encoding="utf-8"))))
    return found


def layer(module: str) -> int:
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        known = LAYERS.get(".".join(parts[:end]))
        if known is not None:
            return known
    return 0 if module in ("", "chat") else 99


def imports_of(tree: ast.Module, *, at_run_time_only: bool) -> list[str]:
    skipped = {
        id(node)
        for guard in ast.walk(tree)
        if at_run_time_only and isinstance(guard, ast.If) and ast.unparse(guard.test) == "TYPE_CHECKING"
        for node in ast.walk(guard)
    }
    return [
        module if (ROOT / module.replace(".", "/")).with_suffix(".py").exists() else f"{module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and node.module
        and node.module.startswith("sglang_multiturn")
        and id(node) not in skipped
        for module in [node.module.removeprefix("sglang_multiturn").removeprefix(".")]
        for alias in node.names
    ]


def third_party_of(tree: ast.Module) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
    return names
