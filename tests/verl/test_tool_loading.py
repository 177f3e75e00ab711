"""Tool YAMLs through verl's two names of `load_all_tools`, and verl's dataset on top of them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf
from verl.experimental.agent_loop import agent_loop
from verl.tools import tool_registry
from verl.tools.base_tool import BaseTool as VerlBaseTool
from verl.tools.function_tool import FunctionTool

from sglang_multiturn.errors import ConfigError
from sglang_multiturn.tools.base import BaseTool, ToolResponse
from sglang_multiturn.verl_plugin.compat import LoadedTools, is_ours, registry_of
from sglang_multiturn.verl_plugin.function_tools import VerlFunctionTool

NESTED = {
    "type": "function",
    "function": {
        "name": "book",
        "description": "Books seats.",
        "parameters": {
            "type": "object",
            "properties": {
                "seats": {"type": "array", "items": {"type": "object", "properties": {"row": {"type": "integer"}}}},
                "class": {"type": "string", "default": None, "enum": ["a", "b"]},
            },
            "required": ["seats"],
        },
    },
}


class BookTool(BaseTool):
    """A tool of this package."""


class NativeTool(VerlBaseTool):  # type: ignore[misc]
    """A tool written for verl."""


FUNCTIONS = '''
from verl.tools.function_tool import function_tool

@function_tool
def add(a: int, b: int) -> str:
    """Adds.

    Args:
        a: one
        b: other
    """
    return str(a + b)
'''

both_names = pytest.mark.parametrize("module", [tool_registry, agent_loop], ids=["dataset's name", "worker's name"])


def write_yaml(folder: Path, *entries: dict[str, Any], **more: Any) -> str:
    path = folder / "tools.yaml"
    OmegaConf.save(OmegaConf.create({"tools": list(entries), **more}), path)
    return str(path)


def entry(cls: type, config: dict[str, Any]) -> dict[str, Any]:
    # --import-mode=importlib gives this module a name of its own; verl imports by that name
    return {"class_name": f"{cls.__module__}.{cls.__name__}", "config": config, "tool_schema": NESTED}


@both_names
def test_our_yaml_loads_with_its_whole_schema(module: Any, tmp_path: Path) -> None:
    (tool,) = module.load_all_tools(tool_config_path=write_yaml(tmp_path, entry(BookTool, {})), function_tool_path=None)
    assert tool.name == "book"
    assert tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) == NESTED


@both_names
def test_a_native_yaml_goes_through_verls_own_loader(module: Any, tmp_path: Path) -> None:
    path = write_yaml(tmp_path, entry(NativeTool, {"type": "native"}))
    (patched,) = module.load_all_tools(tool_config_path=path, function_tool_path=None)
    (own,) = inspect.unwrap(module.load_all_tools)(path, None)
    assert type(patched) is type(own) is NativeTool
    assert patched.config == own.config == {"type": "native"}
    assert patched.tool_schema == own.tool_schema


@pytest.mark.parametrize(
    ("config", "more", "ours"),
    [
        ({}, {}, True),
        ({"type": "native"}, {}, False),
        ({"type": "native"}, {"rollout": {}}, True),
        ({"type": "native", "x": 1}, {}, False),
    ],
)
def test_whose_yaml_it_is(tmp_path: Path, config: dict[str, Any], more: dict[str, Any], ours: bool) -> None:
    assert is_ours(write_yaml(tmp_path, entry(NativeTool, config), **more)) is ours


@pytest.mark.parametrize(
    ("class_name", "ours"),
    [
        ("sglang_multiturn.tools.builtin.calculator.CalculatorTool", True),
        ("verl.tools.gsm8k_tool.Gsm8kTool", True),
        ("verl.tools.base_tool.BaseTool", False),
        ("my_tools.Tool", False),
    ],
)
def test_classes_that_verl_cannot_load_as_meant_make_a_native_yaml_ours(
    tmp_path: Path, class_name: str, ours: bool
) -> None:
    native = {"class_name": class_name, "config": {"type": "native"}, "tool_schema": NESTED}
    assert is_ours(write_yaml(tmp_path, native)) is ours


@pytest.mark.parametrize("text", ["- a list", "tools: 3", ": broken: [", ""])
def test_a_file_that_is_no_tool_yaml_is_left_to_verls_loader(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tools.yaml"
    path.write_text(text)
    if text != "tools: 3":
        assert not is_ours(path)
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever verl raises
        tool_registry.load_all_tools(str(path), None)


def test_a_wrong_setting_stops_the_worker_with_file_line_and_suggestion(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, entry(BookTool, {}), rollout={"max_asistant_turns": 3})
    with pytest.raises(ConfigError, match=r"tools.yaml:\d+: unknown key.*did you mean 'max_assistant_turns'"):
        tool_registry.load_all_tools(path, None)


async def test_function_tools_stand_beside_our_yaml_and_answer(tmp_path: Path) -> None:
    functions = tmp_path / "functions.py"
    functions.write_text(FUNCTIONS)
    tools = agent_loop.load_all_tools(write_yaml(tmp_path, entry(BookTool, {})), str(functions))
    assert isinstance(tools, LoadedTools)
    assert [tool.name for tool in tools] == ["book", "add"]
    add = registry_of(tools).get("add")
    assert isinstance(add, VerlFunctionTool)
    assert await add.execute("i", {"a": 2, "b": 3}) == (ToolResponse(text="5"), 0.0, {})


def test_native_and_function_tools_make_a_registry_too(tmp_path: Path) -> None:
    def multiply(a: int) -> int:
        """Doubles.

        Args:
            a: one
        """
        return 2 * a

    (native,) = tool_registry.load_all_tools(write_yaml(tmp_path, entry(NativeTool, {"type": "native"})), None)
    function = FunctionTool("twice", multiply, _schema_of(multiply))
    assert registry_of([native, function]).names == ("book", "twice")


def _schema_of(function: Any) -> Any:
    from verl.tools.function_tool import _build_schema_from_fn

    return _build_schema_from_fn(function, "twice")


def test_two_tools_of_one_name_in_both_places_are_refused(tmp_path: Path) -> None:
    functions = tmp_path / "doubled.py"
    functions.write_text(FUNCTIONS.replace("def add", "def book"))
    with pytest.raises(ConfigError, match="'book'"):
        tool_registry.load_all_tools(write_yaml(tmp_path, entry(BookTool, {})), str(functions))


def test_the_dataset_counts_a_prompt_with_the_schema_the_model_is_shown(tmp_path: Path, tiny_model: Path) -> None:
    from transformers import AutoTokenizer
    from verl.utils.dataset.rl_dataset import RLHFDataset

    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": [{"role": "user", "content": "Hello"}], "data_source": "d"}\n')
    config = OmegaConf.create(
        {
            "tool_config_path": write_yaml(tmp_path, entry(BookTool, {})),
            "max_prompt_length": 512,
            "filter_overlong_prompts": False,
            "cache_dir": str(tmp_path / "cache"),
        }
    )
    dataset = RLHFDataset(str(rows), AutoTokenizer.from_pretrained(tiny_model), config)
    assert dataset.tool_schemas == [NESTED]
