"""Settings: what a wrong YAML is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_multiturn.config import RolloutConfig, ToolsConfig, validate_config
from sglang_multiturn.errors import ConfigError

GOOD = """\
tools:
  - class_name: sglang_multiturn.tools.builtin.calculator.CalculatorTool
    config: {}
    tool_schema:
      type: function
      function:
        name: calculator
        parameters:
          type: object
          properties:
            steps: {type: array, items: {type: object, properties: {n: {type: integer, default: 3}}}}
rollout:
  max_turns: 4
  format: qwen
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tools.yaml"
    path.write_text(text)
    return path


def test_nested_schemas_are_kept_as_they_were_written(tmp_path: Path) -> None:
    config = ToolsConfig.from_yaml(write(tmp_path, GOOD))
    schema = config.tools[0].tool_schema
    assert schema is not None
    assert schema.for_template() == {
        "type": "function",
        "function": {
            "name": "calculator",
            "parameters": {
                "type": "object",
                "properties": {
                    "steps": {
                        "type": "array",
                        "items": {"type": "object", "properties": {"n": {"type": "integer", "default": 3}}},
                    }
                },
            },
        },
    }


def test_old_names_become_ours(tmp_path: Path) -> None:
    rollout = ToolsConfig.from_yaml(write(tmp_path, GOOD)).rollout
    assert (rollout.max_assistant_turns, rollout.tool_parser) == (4, "hermes")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  max_turns: 4", "  max_turn: 4", "{}:13: unknown key 'rollout.max_turn'; did you mean 'max_turns'?"),
        ("    config: {}", "    confg: {}", "{}:3: unknown key 'tools.0.confg'; did you mean 'config'?"),
        ("rollout:", "roll_out:", "{}:12: unknown key 'roll_out'; did you mean 'rollout'?"),
        (
            "  max_turns: 4",
            "  max_turns: -1",
            "{}:12: 'rollout.max_assistant_turns': Input should be greater than or equal to 1, got -1",
        ),
        (
            "  - class_name: sglang_multiturn.tools.builtin.calculator.CalculatorTool\n    config",
            "  - config",
            "{}:2: 'tools.0.class_name' is missing",
        ),
    ],
)
def test_a_mistake_is_told_with_file_line_key_and_suggestion(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = write(tmp_path, GOOD.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        ToolsConfig.from_yaml(path)
    assert str(caught.value) == message.format(path)


def test_a_missing_file_broken_yaml_and_a_list_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: cannot be read"):
        ToolsConfig.from_yaml(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match="not valid YAML"):
        ToolsConfig.from_yaml(write(tmp_path, "tools: [unclosed"))
    with pytest.raises(ConfigError, match="expected a mapping at the top, got list"):
        ToolsConfig.from_yaml(write(tmp_path, "- 1"))


def test_settings_from_elsewhere_name_their_source() -> None:
    with pytest.raises(ConfigError, match="launch config: unknown key 'tool_timout_s'; did you mean 'tool_timeout_s'"):
        validate_config({"tool_timout_s": 3}, RolloutConfig, "launch config")


@pytest.mark.parametrize("path", sorted(Path("tool_configs").glob("*.yaml")), ids=str)
def test_shipped_tool_configs_load(path: Path) -> None:
    from sglang_multiturn.tools.registry import ToolRegistry

    assert ToolRegistry.from_yaml(path).names
