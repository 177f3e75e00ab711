"""What `import verl` does in a process of its own, with this package installed."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

Python = Callable[..., "subprocess.CompletedProcess[str]"]
pytestmark = pytest.mark.skipif(
    not any(point.value == "sglang_multiturn.verl_plugin.hook" for point in entry_points(group="verl.plugins")),
    reason="the package is not installed here, so verl has no entry point to find: pip install -e .",
)

STATE = """
import json, sys, torch, torch.distributed
torch_before = (torch.distributed.init_process_group, torch.distributed.is_available)
{before}
import verl
import verl.plugin.platform.platform_manager as manager
from verl.plugin.platform import get_platform
ours = sorted(name for name in sys.modules if name.startswith("sglang_multiturn"))
heavy = [name for name in ("sglang", "verl.experimental.agent_loop", "torch.distributed.fsdp") if name in sys.modules]
print(json.dumps(dict(
    platform=type(get_platform()).__name__,
    torch_untouched=torch_before == (torch.distributed.init_process_group, torch.distributed.is_available),
    ours=ours,
    heavy=heavy,
)))
"""
PRETEND_A_GPU = "torch.cuda.is_available = lambda: True"


def state_after_import(run_python: Python, before: str = "", **environment: str) -> dict[str, Any]:
    done = run_python(STATE.format(before=before), **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_nothing_heavy_and_no_cpu_part_comes_in_uninvited(run_python: Python) -> None:
    state = state_after_import(run_python)
    assert state["platform"] == "PlatformCUDA"
    assert state["torch_untouched"]
    assert not [name for name in state["ours"] if ".cpu" in name or ".tools" in name or ".agent_loop" in name]
    assert state["heavy"] == state_after_import(run_python, VERL_USE_EXTERNAL_PLUGINS="none")["heavy"]


@pytest.mark.parametrize("seen_by", ["torch", "nvidia-smi"])
def test_with_a_gpu_verl_stays_as_it_is_even_when_the_cpu_parts_are_asked_for(
    run_python: Python, tmp_path: Path, seen_by: str
) -> None:
    """A Ray actor that reserved no GPU sees none in torch, though the host has one."""
    before = PRETEND_A_GPU if seen_by == "torch" else ""
    path = os.environ["PATH"] if seen_by == "torch" else path_with_smi(tmp_path)
    without = state_after_import(run_python, before, VERL_USE_EXTERNAL_PLUGINS="none")
    asked = state_after_import(run_python, before, SGLANG_MULTITURN_CPU="1", PATH=path)
    assert (asked["platform"], asked["torch_untouched"]) == (without["platform"], True) == ("PlatformCUDA", True)
    assert asked["heavy"] == without["heavy"]


def test_on_a_cpu_the_platform_is_ours_when_asked_for_and_torch_is_untouched(run_python: Python) -> None:
    state = state_after_import(run_python, SGLANG_MULTITURN_CPU="1")
    assert (state["platform"], state["torch_untouched"]) == ("CpuPlatform", True)


def test_the_loop_is_registered_and_the_loader_patched_once_verl_imports_them(run_python: Python) -> None:
    done = run_python(
        "import verl\n"
        "from verl.experimental.agent_loop import agent_loop\n"
        "print(agent_loop._agent_loop_registry['sglang_multiturn'], agent_loop.load_all_tools.__module__,"
        " hasattr(agent_loop.load_all_tools, '__wrapped__'))",
        SGLANG_MULTITURN_CPU="1",
    )
    assert done.stdout.splitlines()[-1] == (
        "{'_target_': 'sglang_multiturn.verl_plugin.agent_loop.SglangMultiturnAgentLoop'} verl.tools.tool_registry True"
    )


def test_a_failure_of_the_hook_is_an_error_in_the_log_and_verl_is_imported(run_python: Python) -> None:
    done = run_python(
        "import sglang_multiturn.verl_plugin.compat as compat\n"
        "del compat.patch_tool_loader\n"
        "import verl; print(verl.__version__)"
    )
    assert done.returncode == 0
    assert "sglang_multiturn's verl plugin failed" in done.stderr
    assert "Traceback" in done.stderr


def test_a_patch_whose_target_vanished_is_an_error_in_the_log_and_the_module_is_imported(run_python: Python) -> None:
    done = run_python(
        "import verl, verl.tools, sys, types\n"
        "from sglang_multiturn.verl_plugin.after_import import after_import\n"
        "def vanish(module): module.gone\n"
        "after_import('verl.tools.schemas', vanish)\n"
        "import verl.tools.schemas; print(verl.tools.schemas.ToolResponse)"
    )
    assert done.returncode == 0, done.stderr
    assert "could not adapt verl.tools.schemas" in done.stderr


def test_the_loader_of_an_adapted_module_is_still_its_own(run_python: Python) -> None:
    done = run_python(
        "import inspect, verl\nimport verl.tools.tool_registry as module\n"
        "print(type(module.__loader__).__name__, 'def load_all_tools' in inspect.getsource(module))"
    )
    assert done.stdout.splitlines()[-1] == "SourceFileLoader True"


def path_with_smi(folder: Path) -> str:
    smi = folder / "nvidia-smi"
    smi.write_text("#!/bin/sh\nexit 0\n")
    smi.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"
