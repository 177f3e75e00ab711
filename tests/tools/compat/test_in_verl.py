"""What verl's plugin makes of a YAML's further keys, and of rows that name tools nobody configured."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

from verl.tools import tool_registry

from sglang_multiturn.config import ToolSettings
from sglang_multiturn.engine.base import SamplingParams
from sglang_multiturn.tools.registry import ToolSource
from sglang_multiturn.verl_plugin.compat import LoadedTools, registry_of
from sglang_multiturn.verl_plugin.requests import RequestNames, request_spec

VERSIONS = Path(__file__).parent / "versions"
FUNCTIONS = '''
from verl.tools.function_tool import function_tool

@function_tool
def double(n: int) -> int:
    """Doubles.

    Args:
        n: a number
    """
    return 2 * n
'''


@pytest.fixture(autouse=True)
def versions_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(VERSIONS)


@pytest.mark.parametrize("execution", ["thread", "process"])
def test_a_key_that_verls_loader_does_not_read_makes_a_yaml_ours(tmp_path: Path, execution: str) -> None:
    text = (VERSIONS / "v0_7_1.yaml").read_text().replace("    config:", f"    execution: {execution}\n    config:")
    (tmp_path / "tools.yaml").write_text(text)
    functions = tmp_path / f"functions_{execution}.py"
    functions.write_text(FUNCTIONS.replace("double", f"double_in_{execution}"))
    tools = tool_registry.load_all_tools(str(tmp_path / "tools.yaml"), str(functions))
    assert isinstance(tools, LoadedTools)
    guess, double = registry_of(tools).entries
    assert guess.settings == ToolSettings(execution=execution)
    assert (guess.tool is None) == (execution == "process")
    if execution == "process":
        assert guess.source == ToolSource(class_path="v0_7_1.GuessTool", config={"type": "native"})
    assert (double.name, double.settings) == (f"double_in_{execution}", ToolSettings())
    assert [tool.name for tool in tools] == ["guess", f"double_in_{execution}"]


def test_rows_that_bring_arguments_for_a_tool_nobody_configured_are_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    row: dict[str, Any] = {
        "raw_prompt": [{"role": "user", "content": "hi"}],
        "extra_info": {"tools_kwargs": {"serch": {"create_kwargs": {"k": 1}}, "calculator": {}}},
    }
    names, known = RequestNames(), ("calculator", "search")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            request_spec(row, names=names, sampling=SamplingParams(), known_tools=known, validate=False)
    assert [record.getMessage() for record in caplog.records] == [
        "rows bring extra_info.tools_kwargs for 'serch', which is not configured; did you mean 'search'?"
    ]
