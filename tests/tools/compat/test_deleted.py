"""What verl had and has no more: class paths in a YAML, and imports of a tool's file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("verl")

from sglang_multiturn.errors import ConfigError
from sglang_multiturn.tools.builtin.gsm8k import Gsm8kTool
from sglang_multiturn.tools.tool_classes import load_class
from sglang_multiturn.tools.verl_versions import DELETED_MODULES

COPY = (
    "copy verl/tools/{file}.py of verl 0.7.1 into a package of yours, write its `from .base_tool` and `from .schemas` as "
    "`from verl.tools.base_tool` and `from verl.tools.schemas`, and give its new path"
)
HELPERS = COPY + "; copy verl/tools/utils/ with it"


def said_of(class_path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_class(class_path, "tools.yaml:2")
    return str(caught.value)


@pytest.mark.parametrize("module", DELETED_MODULES)
def test_what_the_table_says_is_gone_is_gone(module: str) -> None:
    for end in range(2, module.count(".") + 2):  # its package may be gone too
        name = ".".join(module.split(".")[:end])
        if importlib.util.find_spec(name) is None:
            return
    pytest.fail(f"{module} is there")


def test_a_class_with_a_counterpart_is_that() -> None:
    assert load_class("verl.tools.gsm8k_tool.Gsm8kTool", "here") is Gsm8kTool


@pytest.mark.parametrize(
    ("class_path", "since", "advice"),
    [
        ("verl.tools.search_tool.SearchTool", "0.4.0", HELPERS.format(file="search_tool")),
        ("verl.tools.sandbox_fusion_tools.SandboxFusionTool", "0.4.0", COPY.format(file="sandbox_fusion_tools")),
        (
            "verl.tools.geo3k_tool.Geo3kTool",
            "0.4.1",
            COPY.format(file="geo3k_tool")
            + " (sglang_multiturn.tools.builtin.gsm8k.Gsm8kTool is the nearest here: it compares numbers)",
        ),
        ("verl.tools.mcp_base_tool.MCPBaseTool", "0.4.1", HELPERS.format(file="mcp_base_tool")),
        ("verl.tools.mcp_search_tool.MCPSearchTool", "0.4.1", HELPERS.format(file="mcp_search_tool")),
        (
            "verl.tools.image_zoom_in_tool.ImageZoomInTool",
            "0.6.0",
            "and there is nothing here to take its place: only text reaches a model",
        ),
        (
            "verl.tools.gsm8k_tool.MyTool",
            "0.4.0",
            "use sglang_multiturn.tools.builtin.gsm8k.Gsm8kTool, which behaves like it",
        ),
    ],
)
def test_a_class_without_one_is_told_who_had_it_and_what_to_do(class_path: str, since: str, advice: str) -> None:
    module = class_path.rpartition(".")[0]
    assert said_of(class_path) == (
        f"tools.yaml:2: class_name {class_path!r}: there is no module {module!r} any more: verl {since} to 0.7.1 had it, "
        f"{advice}"
    )


@pytest.mark.parametrize(
    ("line", "missing", "advice"),
    [
        (
            "from verl.tools.utils.search_r1_like_utils import perform_single_search_batch",
            "No module named 'verl.tools.utils'",
            "verl 0.4.0 to 0.7.1 had it, copy what you need of verl/tools/utils/ of verl 0.7.1 into your package",
        ),
        (
            "from verl.tools.mcp_base_tool import MCPBaseTool",
            "No module named 'verl.tools.mcp_base_tool'",
            "verl 0.4.1 to 0.7.1 had it, " + HELPERS.format(file="mcp_base_tool"),
        ),
        (
            "from verl.utils.reward_score.math import compute_score",
            "No module named 'verl.utils.reward_score.math'",
            "verl 0.4.0 to 0.5.0 had it, import it from verl.utils.reward_score.math_reward",
        ),
        (
            "from verl.interactions.base import BaseInteraction",
            "No module named 'verl.interactions'",
            "verl 0.4.1 to 0.7.1 had it, write the user or environment as an interaction of sglang_multiturn "
            "(interactions/base.py)",
        ),
    ],
)
def test_a_file_that_imports_what_is_gone_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, missing: str, advice: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "old_tool.py"
    file.write_text(f"from verl.tools.base_tool import BaseTool\n\n{line}\n")
    assert said_of("old_tool.Tool") == (
        f"tools.yaml:2: class_name 'old_tool.Tool': module 'old_tool' cannot be imported: {file}:3: {missing}: {advice}"
    )


def test_a_file_copied_out_of_verl_is_told_what_its_relative_imports_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "copied_tools"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "search.py").write_text("from .base_tool import BaseTool\n")
    assert said_of("copied_tools.search.Tool") == (
        "tools.yaml:2: class_name 'copied_tools.search.Tool': module 'copied_tools.search' cannot be imported: "
        f"{package}/search.py:1: No module named 'copied_tools.base_tool'; write verl.tools.base_tool, which stood beside "
        "this file in verl"
    )
