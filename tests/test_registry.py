"""From a YAML to tools, and what a wrong one is told, word for word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_multiturn.config import ToolsConfig, ToolSettings
from sglang_multiturn.dataset import read_rows, spec_from_row
from sglang_multiturn.errors import ConfigError, DataError
from sglang_multiturn.schemas import ToolSchema
from sglang_multiturn.tools.base import BaseTool
from sglang_multiturn.tools.builtin.calculator import CalculatorTool
from sglang_multiturn.tools.builtin.gsm8k import Gsm8kTool
from sglang_multiturn.tools.registry import ToolRegistry, ToolSource

from support import RecordingTool

ECHO = "sglang_multiturn.tools.base.BaseTool"
CALCULATOR = "sglang_multiturn.tools.builtin.calculator.CalculatorTool"
SCHEMA = """
    tool_schema:
      type: function
      function:
        name: {name}
        description: d
        parameters: {parameters}
"""
PROPERTIES = """
          type: object
          properties:
            city: {type: string}
            days: {type: integer, default: 3}
          required: [city]"""


class Untidy:
    """No tool: it has one of the methods."""

    async def create(self, instance_id: str, **kwargs: Any) -> str:
        return instance_id


class Raising(BaseTool):
    """A tool whose constructor must not run in this process."""

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        raise KeyError("index_path")


class Renamed(BaseTool):
    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self.name = "other"


def path_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__name__}"  # --import-mode=importlib gives this module a name of its own


def entry(
    class_name: str = ECHO,
    parameters: str = "{type: object, properties: {}}",
    config: str = "{}",
    name: str = "echo",
    more: str = "",
) -> str:
    lines = f"  - class_name: {class_name}\n    config: {config}{more and f'{chr(10)}    {more}'}"
    return lines + SCHEMA.format(name=name, parameters=parameters)


def yaml(tmp_path: Path, *entries: str) -> Path:
    path = tmp_path / "t.yaml"
    path.write_text("tools:\n" + "".join(entries))
    return path


def said_of(path: Path) -> str:
    """What a YAML is told, with `FILE` for its path."""
    with pytest.raises(ConfigError) as caught:
        ToolRegistry.from_yaml(path)
    return str(caught.value).replace(str(path), "FILE")


# Classes


@pytest.mark.parametrize(
    ("class_name", "said"),
    [
        (
            "no_such_package.Tool",
            "FILE:2: class_name 'no_such_package.Tool': module 'no_such_package' cannot be imported (No module named "
            "'no_such_package'); is it installed or on PYTHONPATH?",
        ),
        (
            "sglang_multiturn.tools.builtin.calculater.CalculatorTool",
            "FILE:2: class_name 'sglang_multiturn.tools.builtin.calculater.CalculatorTool': module "
            "'sglang_multiturn.tools.builtin.calculater' cannot be imported (No module named "
            "'sglang_multiturn.tools.builtin.calculater'); did you mean 'sglang_multiturn.tools.builtin.calculator'?",
        ),
        (
            "sglang_multiturn.tools.builtin.calculator.CalculatorTol",
            "FILE:2: module 'sglang_multiturn.tools.builtin.calculator' has no class 'CalculatorTol'; did you mean "
            "'CalculatorTool'?",
        ),
        ("CalculatorTool", "FILE:2: class_name 'CalculatorTool' has no module; write 'package.module.Class'"),
        (
            "fractions.Fraction",
            "FILE:2: fractions.Fraction is no tool: it has no create, execute, calc_reward, release; subclass BaseTool",
        ),
        (
            path_of(Untidy),
            f"FILE:2: {path_of(Untidy)} is no tool: it has no execute, calc_reward, release; subclass BaseTool",
        ),
        (path_of(Raising), f"FILE:2: {path_of(Raising)} could not be made: KeyError: 'index_path'"),
        (
            path_of(Renamed),
            "FILE:2: the tool calls itself 'other' and its schema calls it 'echo'; the model could not call it. Give "
            "both one name",
        ),
    ],
)
@pytest.mark.parametrize("execution", ["async", "process"])
def test_a_wrong_class_is_told(tmp_path: Path, class_name: str, said: str, execution: str) -> None:
    path = yaml(tmp_path, entry(class_name, more=f"execution: {execution}"))
    if execution == "process" and class_name in (path_of(Raising), path_of(Renamed)):
        assert ToolRegistry.from_yaml(path).names == ("echo",)  # its own process will tell
    else:
        assert said_of(path) == said


def test_a_module_that_cannot_be_imported_is_told_with_the_line_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    broken = tmp_path / "broken_on_import.py"
    start = f"FILE:2: class_name 'broken_on_import.T': module 'broken_on_import' cannot be imported: {broken}"
    for text, said in [
        ("import math\nimport nowhere_to_be_found\n", ":2: No module named 'nowhere_to_be_found'"),
        ("from math import no_such_name\n", ":1: cannot import name 'no_such_name' from 'math'"),
        ("x = 1\ny = x / 0\n", ":2: ZeroDivisionError: division by zero"),
        ("raise SystemExit('no licence')\n", ":1: SystemExit: no licence"),
        ("def f(:\n", ":1: SyntaxError: invalid syntax"),
    ]:
        broken.write_text(text)
        assert said_of(yaml(tmp_path, entry("broken_on_import.T"))).startswith(start + said)


def test_a_module_in_this_folder_is_told_that_it_is_on_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside_me.py").write_text("")
    said = said_of(yaml(tmp_path, entry("beside_me.Tool")))
    assert said.endswith(f"(No module named 'beside_me'); it stands in {tmp_path}, which is not on PYTHONPATH")


# Schemas


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        (
            "{type: object, properties: [{name: city, type: string}]}",
            "FILE:9: 'tools.0.tool_schema.function.parameters' has its properties in a list; write a mapping from each "
            "name to its schema, properties: {city: {type: string}}",
        ),
        (
            "{type: object, properties: [{city: {type: string}}], required: []}",
            "FILE:9: 'tools.0.tool_schema.function.parameters' has its properties in a list; write a mapping from each "
            "name to its schema, properties: {city: {type: string}}",
        ),
        (
            PROPERTIES.replace("\n          required: [city]", ""),
            "FILE:9: 'tools.0.tool_schema.function.parameters' does not say what is required; write required: [city], "
            "or required: [], if all of it may be left out",
        ),
        (
            PROPERTIES.replace("required: [city]", "required: [citi]"),
            "FILE:14: 'tools.0.tool_schema.function.parameters' requires 'citi', which is no property; did you mean "
            "'city'?",
        ),
        (
            PROPERTIES.replace("required: [city]", "required: [yes]"),
            "FILE:14: 'tools.0.tool_schema.function.parameters' requires True, which is no name; write names in quotes, "
            "as in required: [city]",
        ),
        (
            PROPERTIES.replace("required: [city]", "required: city"),
            "FILE:14: 'tools.0.tool_schema.function.parameters' has no list in required; write required: [city]",
        ),
        (
            PROPERTIES.replace("city: {type: string}", "city: {type: string, required: true}"),
            "FILE:12: 'tools.0.tool_schema.function.parameters.properties.city' has required: true, as draft 3 had it; "
            "name it in the list of parameters, required: [city]",
        ),
        (
            PROPERTIES.replace("city: {type: string}", "city: {type: array}"),
            "FILE:12: 'tools.0.tool_schema.function.parameters.properties.city' is an array and does not say of what; "
            "write items: {type: string}, or items: {} for anything",
        ),
        (
            PROPERTIES.replace("city: {type: string}", "city:\n              type: array\n              item: {}"),
            "FILE:13: 'tools.0.tool_schema.function.parameters.properties.city' is an array and does not say of what; "
            "'item' should be 'items'",
        ),
        (
            PROPERTIES.replace("city: {type: string}", "city: {type: text}"),
            "FILE:12: 'tools.0.tool_schema.function.parameters.properties.city' has the type 'text', which is none; did "
            "you mean 'string'?",
        ),
        (
            PROPERTIES.replace("city: {type: string}", "city: {enum: [2024-01-31]}"),
            "FILE:12: 'tools.0.tool_schema.function.parameters.properties.city.enum.0' is a date to YAML, which JSON "
            "cannot say; put it in quotes",
        ),
        (
            PROPERTIES.replace("city: {type: string}", "on: {type: string}"),
            "FILE:11: 'tools.0.tool_schema.function.parameters.properties' has a key that is no text, True; put it in "
            "quotes; YAML reads on, yes, off and no as true and false",
        ),
        (
            "{type: array, items: {}}",
            "FILE:9: 'tools.0.tool_schema.function.parameters' are of type 'array', and arguments are always an object; "
            "write type: object with properties",
        ),
        (
            "{type: object, properties: {a: {type: integer, minimum: low}}, required: []}",
            "FILE:2: tool 'echo': properties.a.minimum: 'low' is not of type 'number'; write a JSON Schema",
        ),
        (
            "{type: object, properties: {a: {$ref: 'https://example.com/a.json'}}, required: []}",
            "FILE:2: tool 'echo': $ref 'https://example.com/a.json' leads nowhere inside this schema, and nothing is "
            "fetched; write what it means under $defs, and '#/$defs/<name>'",
        ),
        (
            "{type: object, properties: {a: {$ref: '#/$defs/b'}}, required: []}",
            "FILE:2: tool 'echo': $ref '#/$defs/b' leads nowhere inside this schema, and nothing is fetched; write what "
            "it means under $defs, and '#/$defs/<name>'",
        ),
        ("{$ref: '#'}", "FILE:2: tool 'echo': a $ref leads to itself, so that no arguments can be checked"),
        (
            "{type: object, properties: {a: {pattern: '('}}, required: []}",
            "FILE:2: tool 'echo': properties.a.pattern: '(' is not a 'regex'; write a JSON Schema",
        ),
    ],
)
def test_a_wrong_schema_is_told(tmp_path: Path, parameters: str, said: str) -> None:
    assert said_of(yaml(tmp_path, entry(parameters=parameters))) == said


def test_a_misspelt_key_of_a_function_is_told(tmp_path: Path) -> None:
    text = entry(parameters=PROPERTIES).replace("parameters:", "parameter:")
    assert said_of(yaml(tmp_path, text)) == (
        "FILE:9: 'tools.0.tool_schema.function' has an unknown key 'parameter'; did you mean 'parameters'?"
    )


@pytest.mark.parametrize(
    "parameters",
    [
        "{type: object, properties: {}}",
        "{type: object, properties: {a: {type: array, items: {}}}, required: []}",
        "{type: object, properties: {a: {type: array, prefixItems: [{}]}, required: {type: boolean}}, required: [a]}",
        "{type: object, properties: {a: {$ref: '#/$defs/b'}}, $defs: {b: {type: string}}, required: [a]}",
        "{type: object, properties: {a: {}}, allOf: [{properties: {b: {}}}], required: [a, b]}",
        "{type: object, properties: {a: {type: [string, 'null'], enum: [x, null], title: T}}, required: [a]}",
    ],
)
def test_any_other_json_schema_is_taken_and_shown_whole(tmp_path: Path, parameters: str) -> None:
    import yaml as pyyaml

    (schema,) = ToolRegistry.from_yaml(yaml(tmp_path, entry(parameters=parameters))).schemas()
    assert schema.for_template()["function"]["parameters"] == pyyaml.safe_load(parameters)


def test_an_entry_for_verls_own_loader_may_say_less(tmp_path: Path) -> None:
    parameters = "{type: object, properties: {tags: {type: array}}}"
    assert ToolRegistry.from_yaml(yaml(tmp_path, entry(parameters=parameters, config="{type: native}"))).names
    assert len(said_of(yaml(tmp_path, entry(parameters=parameters))).splitlines()) == 2


def test_two_tools_of_one_name_are_told_with_both_lines(tmp_path: Path) -> None:
    path = yaml(tmp_path, entry(), entry(name="other"), entry(CALCULATOR))
    assert said_of(path) == "FILE:18: two tools are named 'echo'; the other one stands at FILE:2; rename one of them"
    with pytest.raises(ConfigError, match=r"^tools: two tools are named 'echo'; rename one of them$"):
        ToolRegistry([RecordingTool(), RecordingTool()])


def test_a_tool_without_any_schema_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="BaseTool: no tool_schema in the YAML and none in the class"):
        BaseTool({})
    assert said_of(yaml(tmp_path, f"  - class_name: {ECHO}\n    execution: process\n")) == (
        f"FILE:2: {ECHO} is made in a process of its own (`execution: process`), so its schema must be known before: "
        "write a tool_schema, or a classmethod default_schema() that returns one"
    )


# Entries


def test_an_entry_holds_what_the_yaml_says_of_a_tool(tmp_path: Path) -> None:
    path = yaml(tmp_path, entry(CALCULATOR, config="{max_exponent: 7}", more="timeout_s: 2"))
    registry = ToolRegistry.from_yaml(path)
    made = registry.entry("echo")
    assert registry.entries == (made,)
    assert isinstance(made.tool, CalculatorTool)
    assert registry.get("echo") is made.tool
    assert made.tool.config == {"max_exponent": 7}
    assert made.settings == ToolSettings(timeout_s=2)
    assert (made.source, made.place) == (None, f"{path}:2")


def test_a_tool_of_its_own_process_is_not_made_here(tmp_path: Path) -> None:
    path = yaml(
        tmp_path,
        entry(path_of(Raising), config="{index_path: big}", more="execution: process"),
        f"  - class_name: {CALCULATOR}\n    execution: ray\n    ray_options: {{num_cpus: 1}}\n",
    )
    registry = ToolRegistry.from_yaml(path)
    own_schema, class_schema = registry.entries
    assert own_schema.source == ToolSource(class_path=path_of(Raising), config={"index_path": "big"})
    assert (own_schema.tool, registry.get("echo")) == (None, None)
    assert own_schema.settings == ToolSettings(execution="process")
    assert class_schema.schema == CalculatorTool.default_schema()
    assert class_schema.settings == ToolSettings(execution="ray", ray_options={"num_cpus": 1})
    assert [schema.name for schema in registry.schemas()] == ["echo", "calculator"]
    assert registry.explain_arguments("calculator", {}) == "expression (a string) is missing"


def test_ready_tools_have_default_settings_or_their_own() -> None:
    tools = [RecordingTool("a"), RecordingTool("b")]
    registry = ToolRegistry(tools, settings={"b": ToolSettings(retries=2)})
    assert [entry.settings for entry in registry.entries] == [ToolSettings(), ToolSettings(retries=2)]
    with pytest.raises(ConfigError, match="here: settings for 'bbb', which is no tool of these; known: a, b"):
        ToolRegistry(tools, "here", settings={"bbb": ToolSettings()})
    with pytest.raises(ConfigError, match="tool 'a' was made here and cannot run as `execution: process`"):
        ToolRegistry(tools, settings={"a": ToolSettings(execution="process")})


def test_entries_of_two_registries_stand_in_one(tmp_path: Path) -> None:
    first = ToolRegistry.from_yaml(yaml(tmp_path, entry(more="execution: process"), entry(name="b", more="retries: 1")))
    both = ToolRegistry.from_entries([*first.entries, *ToolRegistry([RecordingTool("c")]).entries], "both")
    assert both.names == ("echo", "b", "c")
    assert both.entries[:2] == first.entries
    with pytest.raises(ConfigError, match="both: two tools are named 'b'; rename one of them"):
        ToolRegistry.from_entries([*first.entries, *ToolRegistry([RecordingTool("b")]).entries], "both")


def test_class_paths_that_verl_dropped_are_ours_now(tmp_path: Path) -> None:
    registry = ToolRegistry.from_yaml(yaml(tmp_path, entry("verl.tools.gsm8k_tool.Gsm8kTool")))
    assert isinstance(registry.get("echo"), Gsm8kTool)


def test_a_name_that_is_not_configured_is_told_with_a_suggestion() -> None:
    registry = ToolRegistry([RecordingTool("search"), RecordingTool("echo")])
    assert [schema.name for schema in registry.schemas()] == ["search", "echo"]
    assert [schema.name for schema in registry.schemas(["echo"])] == ["echo"]
    assert registry.get("serch") is None
    for asked in (lambda: registry.schemas(["serch"]), lambda: registry.entry("serch")):
        with pytest.raises(ConfigError, match=r"tool 'serch' is not configured; did you mean 'search'\?"):
            asked()


# Rows


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ('{"tool_selection": ["echo", "serch"]}', "extra_info.tool_selection names 'serch', which is not configured; did you mean 'search'?"),
        ('{"tools_kwargs": {"web": {}}}', "extra_info.tools_kwargs names 'web', which is not configured; known: echo, search"),
    ],
)  # fmt: skip
def test_a_row_that_names_a_tool_nobody_configured_is_told(tmp_path: Path, info: str, said: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "hi"}\n{"prompt": "hi", "extra_info": ' + info + "}\n")
    registry = ToolRegistry([RecordingTool("search"), RecordingTool("echo")])
    first, second = (
        (place, spec_from_row(row, place=place, request_id="r", uid="u")) for place, row in read_rows(rows)
    )
    registry.check_row(first[1], first[0])
    with pytest.raises(DataError) as caught:
        registry.check_row(second[1], second[0])
    assert str(caught.value) == f"{rows}:2: {said}"


def test_arguments_for_tools_are_passed_over_where_there_are_no_tools() -> None:
    row = {"prompt": "hi", "extra_info": {"tools_kwargs": {"web": {}}}}
    ToolRegistry().check_row(spec_from_row(row, place="p", request_id="r", uid="u"), "p")


def test_every_tool_yaml_of_the_repository_loads() -> None:
    found = [*Path("tool_configs").glob("*.yaml"), *Path("tests/doctor/healthy").glob("tools.yaml")]
    assert len(found) == 3
    for path in found:
        assert ToolRegistry.from_config(ToolsConfig.from_yaml(path), str(path)).names
