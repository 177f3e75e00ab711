"""From a YAML to tools, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_multiturn.errors import ConfigError
from sglang_multiturn.tools.base import BaseTool
from sglang_multiturn.tools.builtin.gsm8k import Gsm8kTool
from sglang_multiturn.tools.registry import ToolRegistry

from support import RecordingTool

SCHEMA = """
    tool_schema:
      type: function
      function:
        name: {name}
        description: d
        parameters: {parameters}
"""


def yaml(
    tmp_path: Path, class_name: str, parameters: str = "{type: object, properties: {}}", config: str = "{}"
) -> Path:
    path = tmp_path / "t.yaml"
    path.write_text(
        f"tools:\n  - class_name: {class_name}\n    config: {config}\n"
        + SCHEMA.format(name="echo", parameters=parameters)
    )
    return path


@pytest.mark.parametrize(
    ("class_name", "said"),
    [
        ("no_such_package.Tool", "module 'no_such_package' cannot be imported"),
        (
            "sglang_multiturn.tools.builtin.calculator.CalculatorTol",
            "has no class 'CalculatorTol'; did you mean 'CalculatorTool'?",
        ),
        ("CalculatorTool", "has no module; write 'package.module.Class'"),
        ("fractions.Fraction", "is no tool: it has no create, execute, calc_reward, release"),
    ],
)
def test_a_wrong_class_path_is_told(tmp_path: Path, class_name: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ToolRegistry.from_yaml(yaml(tmp_path, class_name))
    assert said in str(caught.value)
    assert "t.yaml" in str(caught.value)


def test_class_paths_that_verl_dropped_are_ours_now(tmp_path: Path) -> None:
    registry = ToolRegistry.from_yaml(yaml(tmp_path, "verl.tools.gsm8k_tool.Gsm8kTool"))
    assert isinstance(registry.get("echo"), Gsm8kTool)


def test_a_schema_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tool 'echo': type: 'objekt' is not valid .*write a JSON Schema"):
        ToolRegistry.from_yaml(
            yaml(tmp_path, "sglang_multiturn.tools.builtin.calculator.CalculatorTool", "{type: objekt}")
        )


def test_two_tools_of_one_name_are_told() -> None:
    with pytest.raises(ConfigError, match="two tools are named 'echo'"):
        ToolRegistry([RecordingTool(), RecordingTool()])


def test_a_tool_without_any_schema_is_told() -> None:
    with pytest.raises(ConfigError, match="BaseTool: no tool_schema in the YAML and none in the class"):
        BaseTool({})


def test_a_name_that_is_not_configured_is_told_with_a_suggestion() -> None:
    registry = ToolRegistry([RecordingTool("search"), RecordingTool("echo")])
    assert [schema.name for schema in registry.schemas()] == ["search", "echo"]
    assert [schema.name for schema in registry.schemas(["echo"])] == ["echo"]
    with pytest.raises(ConfigError, match="tool 'serch' is not configured; did you mean 'search'"):
        registry.schemas(["serch"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"x": 1, "tags": [{"n": 1}]}, None),
        ({"x": "three"}, "x: 'three' is not of type 'integer'"),
        ({}, "'x' is a required property"),
        ({"x": 1, "tags": [{"n": "a"}]}, "tags.0.n: 'a' is not of type 'integer'"),
        ({"x": 1, "y": 2}, "Additional properties are not allowed ('y' was unexpected)"),
        ({"x": "z" * 5000}, "x: 'zzzz"),
    ],
)
def test_arguments_that_break_the_schema_become_one_sentence(arguments: dict[str, object], said: str | None) -> None:
    parameters = {
        "type": "object",
        "properties": {
            "x": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "integer"}}}},
        },
        "required": ["x"],
        "additionalProperties": False,
    }
    explained = ToolRegistry([RecordingTool("f", parameters)]).explain_arguments("f", arguments)
    if said is None:
        assert explained is None
    else:
        assert explained is not None
        assert explained.startswith(said)
        assert len(explained) < 300
