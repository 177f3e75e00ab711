"""Tools and YAMLs written for each version of verl run unchanged, a whole conversation through.

`versions/` holds one of each: what it says is what people's files say. Each is played as our loader loads it, as verl's
own does where the YAML is left to verl, and in a process that has no verl at all.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_multiturn import RolloutConfig, ScriptedEngine, ToolRegistry, run_one
from sglang_multiturn.request import ToolKwargs

from support import TEMPLATE, call, context, spec

VERSIONS = Path(__file__).parent / "versions"
TESTS = Path(__file__).parents[2]
TURNS = [call("guess", guess=7), call("guess", guess=42), "It is 42."]
ANSWERS = ["7 is wrong", "42 is right"]

FLAT = ToolKwargs(
    create_kwargs={"ground_truth": 42, "low": 1},
    execute_kwargs={"unit": "points"},
    calc_reward_kwargs={"scale": 2},
    release_kwargs={"why": "done"},
)
NESTED = ToolKwargs(create_kwargs={"ground_truth": 42, "low": 1})
EXECUTED = ["execute", {"unit": "points"}]
JUDGED, RELEASED = ["calc_reward", {"scale": 2}], ["release", {"why": "done"}]
ROW = {"ground_truth": 42, "low": 1}

TABLE: dict[str, tuple[ToolKwargs, list[Any], list[dict[str, Any]]]] = {
    # version: the row's arguments, what the tool was called with, the metrics of its two answers
    "v0_4_0": (FLAT, [["create", {"low": 1}], EXECUTED, EXECUTED, JUDGED, RELEASED], [{"low": 1}, {"low": 1}]),
    "v0_4_1": (FLAT, [["create", {"low": 1}], EXECUTED, EXECUTED, JUDGED, RELEASED], [{}, {}]),
    "v0_5_0": (
        FLAT,
        [["create", {"low": 1}], EXECUTED, EXECUTED, JUDGED, RELEASED],
        [{"type": "native"}, {"type": "native"}],
    ),
    "v0_6_1": (
        NESTED,
        [
            ["create", {"low": 1, "create_kwargs": ROW}],
            ["execute", {}],
            ["execute", {}],
            ["calc_reward", {}],
            ["release", {}],
        ],
        [{}, {}],
    ),
    "v0_7_1": (
        NESTED,
        [
            ["create", ROW],
            ["execute", {"tried": [7], "turns": 1}],
            ["execute", {"tried": [7, 42], "turns": 2}],
            ["calc_reward", {}],
            ["release", {}],
        ],
        [{"tried": 1}, {"tried": 2}],
    ),
    "v0_9_1": (
        NESTED,
        [
            ["create", ROW],
            ["execute", {"said": ["user", "assistant"], "rewards": [], "request": "r"}],
            [
                "execute",
                {"said": ["user", "assistant", "tool", "assistant"], "rewards": [-0.05], "request": "r"},
            ],
            ["calc_reward", {}],
            ["release", {}],
        ],
        [{}, {}],
    ),
}


async def play(registry: ToolRegistry, version: str) -> dict[str, Any]:
    """The scripted conversation with the tool of a version: what the model was told, and what the tool was called with."""
    log: list[Any] = importlib.import_module(version).LOG
    log.clear()
    config = RolloutConfig(calc_rewards="sum", step_rewards="sum")
    async with ScriptedEngine.playing(TEMPLATE, {"r": TURNS}) as engine:
        played = dataclasses.replace(context(engine, config=config), tools=registry, tool_runtime=None)
        trajectory = await run_one(spec(tools_kwargs={"guess": TABLE[version][0]}), played)
    trajectory.check(end_ids=TEMPLATE.end_ids)
    records = trajectory.tool_calls
    return {
        "error": str(trajectory.error),
        "answers": [record.answer for record in records],
        "rewards": [record.reward for record in records],
        "metrics": [record.metrics for record in records],
        "calc_rewards": trajectory.rewards.calc_rewards,
        "log": json.loads(json.dumps(log)),
        "shown": [schema.for_template() for schema in registry.schemas()],
    }


def expected(version: str) -> dict[str, Any]:
    _, log, metrics = TABLE[version]
    return {
        "error": "None",
        "answers": ANSWERS,
        "rewards": [-0.05, 0.0],
        "metrics": metrics,
        "calc_rewards": {"guess": 1.0},
        "log": log,
        "shown": [in_yaml(version)],
    }


def in_yaml(version: str) -> dict[str, Any]:
    """The schema as it stands in a version's YAML; 0.4.1's stands in its class, in the very same words."""
    import yaml

    entry = yaml.safe_load((VERSIONS / f"{version}.yaml").read_text())["tools"][0]
    schema: dict[str, Any] = entry["tool_schema"] if "tool_schema" in entry else in_yaml("v0_4_0")
    return schema


@pytest.fixture(autouse=True)
def versions_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(VERSIONS)


def test_the_table_holds_every_version_there_is_a_tool_of() -> None:
    assert sorted(TABLE) == sorted(path.stem for path in VERSIONS.glob("*.py"))


@pytest.mark.parametrize("version", TABLE)
async def test_a_tool_of_each_version_runs_a_whole_conversation(version: str) -> None:
    pytest.importorskip("verl")
    registry = ToolRegistry.from_yaml(VERSIONS / f"{version}.yaml")
    assert await play(registry, version) == expected(version)


@pytest.mark.parametrize("version", TABLE)
async def test_so_it_does_as_verls_trainer_loads_it(version: str) -> None:
    pytest.importorskip("verl")
    from verl.tools import tool_registry

    from sglang_multiturn.verl_plugin.compat import LoadedTools, registry_of

    tools = tool_registry.load_all_tools(str(VERSIONS / f"{version}.yaml"), None)
    assert isinstance(tools, LoadedTools) == (version in ("v0_4_0", "v0_4_1"))
    assert await play(registry_of(tools), version) == expected(version)


@pytest.mark.parametrize("version", ["v0_4_0", "v0_5_0", "v0_6_1"])
async def test_so_it_does_in_a_process_of_its_own(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("verl")
    monkeypatch.setenv("PYTHONPATH", f"{VERSIONS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    text = (VERSIONS / f"{version}.yaml").read_text().replace("    config:", "    execution: process\n    config:")
    (tmp_path / "tools.yaml").write_text(text)
    played = await play(ToolRegistry.from_yaml(tmp_path / "tools.yaml"), version)
    assert played == {**expected(version), "log": []}  # which is kept in the other process


WITHOUT_VERL = """
import sys
from importlib.machinery import PathFinder

class WithoutVerl:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] == "verl" else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [WithoutVerl if finder is PathFinder else finder for finder in sys.meta_path]
"""
PLAY = """
import asyncio, json
from sglang_multiturn import ToolRegistry
from test_versions import VERSIONS, play

played = {v: asyncio.run(play(ToolRegistry.from_yaml(VERSIONS / f"{v}.yaml"), v)) for v in sys.argv[1:]}
left = [name for name in sys.modules if name.partition(".")[0] == "verl"]
print(json.dumps([played, left]))
"""


def without_verl(code: str, *arguments: str, **env: str) -> str:
    """What a program prints that runs where verl is not installed."""
    path = os.pathsep.join(map(str, (TESTS, Path(__file__).parent, VERSIONS, *filter(None, [env.get("PYTHONPATH")]))))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_VERL + code, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_so_it_does_where_verl_is_not_installed() -> None:
    played, left = json.loads(without_verl(PLAY, *TABLE))
    assert left == []
    for version in TABLE:
        assert played[version] == expected(version), version


LOAD = """
from sglang_multiturn.errors import ConfigError
from sglang_multiturn.tools.tool_classes import load_class
try:
    print(load_class(sys.argv[1], "here"))
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("class_path", "said"),
    [
        ("verl.tools.base_tool.BaseTool", "<class 'sglang_multiturn.tools.verl_versions._BaseTool'>"),
        ("verl.tools.gsm8k_tool.Gsm8kTool", "<class 'sglang_multiturn.tools.builtin.gsm8k.Gsm8kTool'>"),
        (
            "verl.experimental.my_tool.Tool",
            "here: class_name 'verl.experimental.my_tool.Tool': module 'verl.experimental.my_tool' cannot be imported (No "
            "module named 'verl.experimental'): verl is not installed: pip install 'sglang_multiturn[verl]'",
        ),
        (
            "needs_more.Tool",
            "here: class_name 'needs_more.Tool': module 'needs_more' cannot be imported: {folder}/needs_more.py:2: No "
            "module named 'verl.utils.reward_score'; without verl a tool can import verl.tools.base_tool, "
            "verl.tools.schemas and verl.utils.rollout_trace only: pip install 'sglang_multiturn[verl]'",
        ),
    ],
)
def test_what_needs_the_rest_of_verl_says_so(tmp_path: Path, class_path: str, said: str) -> None:
    (tmp_path / "needs_more.py").write_text(
        "from verl.tools.base_tool import BaseTool\nfrom verl.utils.reward_score import gsm8k\n"
    )
    told = without_verl(LOAD, class_path, PYTHONPATH=str(tmp_path))
    assert told == said.replace("{folder}", str(tmp_path))
