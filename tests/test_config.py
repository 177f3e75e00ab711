"""Settings: what a wrong YAML is told, word for word."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_multiturn.config import RolloutConfig, ToolsConfig, ToolSettings, validate_config
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
          required: [steps]
    timeout_s: 3
    faults: {latency_s: 0.1}
rollout:
  max_turns: 4
  format: qwen
  on_failure: {timeout: end}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tools.yaml"
    path.write_text(text)
    return path


def said_of(path: Path) -> str:
    """What a YAML is told, with `FILE` for its path."""
    with pytest.raises(ConfigError) as caught:
        ToolsConfig.from_yaml(path)
    return str(caught.value).replace(str(path), "FILE")


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
                "required": ["steps"],
            },
        },
    }


def test_old_names_become_ours(tmp_path: Path) -> None:
    rollout = ToolsConfig.from_yaml(write(tmp_path, GOOD)).rollout
    assert (rollout.max_assistant_turns, rollout.tool_parser) == (4, "hermes")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  max_turns: 4", "  max_turn: 4", "FILE:16: unknown key 'rollout.max_turn'; did you mean 'max_turns'?"),
        ("    config: {}", "    confg: {}", "FILE:3: unknown key 'tools.0.confg'; did you mean 'config'?"),
        ("rollout:", "roll_out:", "FILE:15: unknown key 'roll_out'; did you mean 'rollout'?"),
        (
            "latency_s: 0.1",
            "latency: 0.1",
            "FILE:14: unknown key 'tools.0.faults.latency'; did you mean 'latency_s'?",
        ),
        (
            "{timeout: end}",
            "{time_out: end}",
            "FILE:18: unknown key 'rollout.on_failure.time_out'; did you mean 'timeout'?",
        ),
        ("rollout:", "journal_dir: x\nrollout:", "FILE:15: unknown key 'journal_dir'; it belongs under 'rollout'"),
        ("  max_turns: 4", "  execution: thread", "FILE:16: unknown key 'rollout.execution'; it belongs under 'tools'"),
        (
            "  max_turns: 4",
            "  max_turns: -1",
            "FILE:16: 'rollout.max_turns': Input should be greater than or equal to 1, got -1",
        ),
        (
            "{timeout: end}",
            "{timeout: tel}",
            "FILE:18: 'rollout.on_failure.timeout': Input should be 'tell', 'end' or 'fail', got 'tel'; "
            "did you mean 'tell'?",
        ),
        (
            "  format: qwen",
            "  step_reward_weight: lots",
            "FILE:17: 'rollout.step_reward_weight': Input should be a valid number, unable to parse string as a number "
            "or must be a mapping (key: value), got 'lots'",
        ),
        (
            "    config: {}",
            "    config: [3]",
            "FILE:3: 'tools.0.config': must be a mapping (key: value), got [3]",
        ),
        ("    config: {}", "    config:", "FILE:3: 'tools.0.config' is empty; give it a value, or leave the key out"),
        (
            "  - class_name: sglang_multiturn.tools.builtin.calculator.CalculatorTool\n    config",
            "  - config",
            "FILE:2: 'tools.0.class_name' is missing",
        ),
        (
            "  format: qwen",
            "  max_turns: 5",
            "FILE:17: the key 'rollout.max_turns' stands in line 16 already; remove one of them",
        ),
    ],
)
def test_a_mistake_is_told_with_file_line_key_and_suggestion(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert said_of(write(tmp_path, GOOD.replace(old, new))) == said


def test_every_mistake_of_a_file_is_told_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("    config: {}", "    confg: {}").replace("  max_turns: 4", "  max_turns: 0")
    assert said_of(write(tmp_path, text)).splitlines() == [
        "FILE:3: unknown key 'tools.0.confg'; did you mean 'config'?",
        "FILE:16: 'rollout.max_turns': Input should be greater than or equal to 1, got 0",
    ]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            "max_memory_mb: 512",
            "FILE:13: 'tools.0.max_memory_mb' has no effect on `execution: async`; write `execution: process` or `ray`, "
            "or leave the key out",
        ),
        (
            "execution: thread\n    max_processes: 4",
            "FILE:14: 'tools.0.max_processes' has no effect on `execution: thread`; write `execution: process` or `ray`, "
            "or leave the key out",
        ),
        (
            "execution: process\n    ray_options: {num_cpus: 1}",
            "FILE:14: 'tools.0.ray_options' has no effect on `execution: process`; write `execution: ray`, or leave the "
            "key out",
        ),
        (
            "retry_backoff_s: 2",
            "FILE:13: 'tools.0.retry_backoff_s' has no effect without retries; write `retries: 2`, or leave the key out",
        ),
    ],
)
def test_a_setting_that_does_nothing_is_told(tmp_path: Path, lines: str, said: str) -> None:
    assert said_of(write(tmp_path, GOOD.replace("timeout_s: 3", lines))) == said


@pytest.mark.parametrize(
    "lines",
    [
        "execution: process\n    max_memory_mb: 512\n    max_processes: 4",
        "execution: ray\n    max_memory_mb: 512\n    ray_options: {num_cpus: 1}",
        "retries: 2\n    retry_backoff_s: 2",
        "faults: {error_rate: 0.05}",
    ],
)
def test_settings_that_belong_together_are_taken(tmp_path: Path, lines: str) -> None:
    text = GOOD.replace("    timeout_s: 3\n    faults: {latency_s: 0.1}", f"    {lines}")
    assert ToolsConfig.from_yaml(write(tmp_path, text)).tools[0] != ToolSettings()


def test_every_place_of_a_file_is_known(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    config = ToolsConfig.from_yaml(path)
    assert config.place("tools", 0, otherwise="") == f"{path}:2"
    assert config.place("tools", 0, "tool_schema", "function", "name", otherwise="") == f"{path}:7"
    assert config.place("tools", 0, "not there", otherwise="") == f"{path}:2"
    assert ToolsConfig().place("tools", otherwise="here") == "here"


def test_a_missing_file_broken_yaml_and_a_list_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: cannot be read"):
        ToolsConfig.from_yaml(tmp_path / "nothing.yaml")
    assert said_of(write(tmp_path, "tools: [unclosed")).startswith(
        "FILE: not valid YAML: while parsing a flow sequence"
    )
    assert said_of(write(tmp_path, "- 1")) == "FILE: expected a mapping at the top, got list"
    assert said_of(write(tmp_path, "")) == "FILE: expected a mapping at the top, got NoneType"
    (tmp_path / "tools.yaml").write_bytes(b"tools: \xff\xfe")
    assert said_of(tmp_path / "tools.yaml") == (
        "FILE: cannot be read (it is no UTF-8: invalid start byte); give the path of a YAML file"
    )


def test_settings_from_elsewhere_name_their_source() -> None:
    with pytest.raises(ConfigError, match="launch config: unknown key 'tool_timout_s'; did you mean 'tool_timeout_s'"):
        validate_config({"tool_timout_s": 3}, RolloutConfig, "launch config")


@pytest.mark.parametrize("path", sorted(Path("tool_configs").glob("*.yaml")), ids=str)
def test_shipped_tool_configs_load(path: Path) -> None:
    from sglang_multiturn.tools.registry import ToolRegistry

    assert ToolRegistry.from_yaml(path).names
