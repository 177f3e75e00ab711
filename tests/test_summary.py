"""What is said of many conversations: what went wrong, an example of each kind, and what tools left over."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_multiturn import RolloutConfig
from sglang_multiturn.chat.calls import BrokenKind
from sglang_multiturn.failures import FailureExample, FailureLog, printable
from sglang_multiturn.metrics import RolloutMetrics
from sglang_multiturn.request import ErrorRecord
from sglang_multiturn.summary import RunSummary
from sglang_multiturn.tools.host import HostLeaks
from sglang_multiturn.trajectory import CallOutcome, Rewards, ToolCallRecord, Trajectory

from support import FailingTool, HangingTool, RecordingTool, ToolError, call, roll

CLEAN = {"not_released": 0, "lost_instances": 0, "release_errors": 0, "left_behind_calls": 0, "live_processes": 0}


def summary_of(*trajectories: Trajectory) -> RunSummary:
    summary = RunSummary()
    for trajectory in trajectories:
        summary.add(trajectory)
    return summary


def record(outcome: CallOutcome, **changes: Any) -> ToolCallRecord:
    given = {"call_id": "call00000", "turn": 2, "name": "search", "arguments": {"q": "x"}, "answer": "Error: no"}
    return ToolCallRecord(**{**given, "outcome": outcome, **changes})


async def plain(request_id: str = "r", **changes: Any) -> Trajectory:
    return replace(await roll(["hello"], request_id="r"), request_id=request_id, **changes)


async def test_a_clean_run_has_no_examples_and_no_leaks() -> None:
    summary = summary_of(await roll([call("echo"), "done"], [RecordingTool()]))
    assert summary.to_dict()["failure_examples"] == {}
    assert summary.to_dict()["leaks"] == CLEAN
    assert summary.leaks.clean
    assert summary.failures.lines() == []


async def test_the_first_of_each_kind_is_kept_and_all_are_counted() -> None:
    slow = RolloutConfig(tool_timeout_s=0.02)
    summary = summary_of(
        await roll([call("echo", n=1) + call("echo", n=2), "sorry"], [HangingTool()], slow),
        await roll([call("echo"), "never"], [FailingTool(RuntimeError("boom"))]),
        await roll([call("echo"), "sorry"], [FailingTool(ToolError("none"))]),
        await roll([call("ecko"), call("echo", n=3), "sorry"], [HangingTool()], slow),
    )
    assert summary.to_dict()["failure_examples"] == {
        "timeout": {
            "count": 3,
            "request_id": "r",
            "turn": 0,
            "tool": "echo",
            "arguments": '{"n": 1}',
            "answer": "Error: the tool did not answer within 0.02 seconds",
        },
        "raised": {
            "count": 1,
            "request_id": "r",
            "turn": 0,
            "tool": "echo",
            "arguments": "{}",
            "answer": "Error: the tool failed",
        },
        "error:RuntimeError": {"count": 1, "request_id": "r", "answer": "boom"},
        "tool_error": {
            "count": 1,
            "request_id": "r",
            "turn": 0,
            "tool": "echo",
            "arguments": "{}",
            "answer": "Error: none",
        },
        "unknown_tool": {
            "count": 1,
            "request_id": "r",
            "turn": 0,
            "tool": "ecko",
            "arguments": "{}",
            "answer": "Error: there is no tool 'ecko'; did you mean 'echo'?",
        },
    }


async def test_every_outcome_and_every_way_of_being_broken_is_a_kind_of_its_own() -> None:
    calls = [record(outcome) for outcome in CallOutcome if outcome not in (CallOutcome.OK, CallOutcome.MALFORMED)]
    calls += [record(CallOutcome.MALFORMED, broken=kind, arguments=None) for kind in BrokenKind]
    log = FailureLog()
    log.add(await plain(tool_calls=(record(CallOutcome.OK), *calls)))
    assert set(log.counts) == {
        "unknown_tool", "invalid_arguments", "skipped", "tool_error", "timeout", "died", "raised",
        "malformed_json", "malformed_name", "malformed_arguments", "malformed_envelope", "malformed_truncated",
    }  # fmt: skip
    assert set(log.counts.values()) == {1}


async def test_errors_of_release_and_calc_reward_are_kinds_too() -> None:
    trajectory = await plain(
        rewards=Rewards(calc_errors={"search": ErrorRecord(type="OSError", message="gone")}),
        release_errors={"run": ErrorRecord(type="KeyError", message="'x'")},
    )
    trajectory.metrics.release_errors = 2
    assert Trajectory.from_json(trajectory.to_json()) == trajectory
    assert FailureLog().add(trajectory) == [
        (FailureExample(kind="calc_reward", request_id="r", tool="search", answer="OSError: gone"), 1),
        (FailureExample(kind="release", request_id="r", tool="run", answer="KeyError: 'x'"), 1),
        (FailureExample(kind="release", request_id="r"), 2),
    ]


async def test_an_example_is_bounded_and_one_line_whatever_was_said() -> None:
    huge = record(
        CallOutcome.UNKNOWN_TOOL, name="x" * 10_000, arguments={"a": "y" * 10_000}, answer="\x1b[2J\n" + "z" * 10_000
    )
    log = FailureLog()
    log.add(await plain("q" * 10_000, tool_calls=(huge,)))
    example = log.examples["unknown_tool"]
    assert [len(part or "") for part in (example.request_id, example.tool, example.arguments, example.answer)] == [
        503, 503, 503, 503,
    ]  # fmt: skip
    (line,) = log.lines()
    assert line.startswith("unknown_tool: 1, for example request qqq")
    assert ": \\x1b[2J\\nzzz" in line
    assert len(line) < 2200


async def test_an_example_reads_as_one_sentence() -> None:
    log = FailureLog()
    log.add(await plain("r3", tool_calls=(record(CallOutcome.TIMEOUT, answer="Error: too slow"),)))
    assert log.lines() == ['timeout: 1, for example request r3, turn 2: search {"q": "x"}: Error: too slow']


async def test_of_many_kinds_the_most_frequent_are_printed() -> None:
    log = FailureLog()
    for n in range(30):
        for _ in range(30 - n):
            log.add(await plain(error=ErrorRecord(type=f"E{n}", message="m")))
    lines = log.lines()
    assert len(lines) == 21
    assert lines[0] == "error:E0: 30, for example request r: m"
    assert lines[-1] == "... and 10 more kinds of failures"


@given(st.text())
def test_what_is_printed_has_no_control_characters(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert shown.encode().decode() == shown
    if text.isprintable():
        assert shown == text


def test_control_characters_are_spelt_out() -> None:
    assert printable("a\x1b[31mb\r\n\u202e\x9b\ud800é") == "a\\x1b[31mb\\r\\n\\u202e\\x9b\\ud800é"


# Leaks


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tool_instances_created": 3, "tool_instances_released": 3}, CLEAN),
        (
            {"tool_instances_created": 3, "tool_instances_released": 1, "lost_instances": 2},
            CLEAN | {"lost_instances": 2},
        ),
        (
            {"tool_instances_created": 3, "tool_instances_released": 1, "lost_instances": 1},
            CLEAN | {"lost_instances": 1, "not_released": 1},
        ),
        ({"release_errors": 1}, CLEAN | {"release_errors": 1}),
    ],
)
async def test_leaks_are_what_was_neither_released_nor_ended(changes: dict[str, int], expected: dict[str, int]) -> None:
    trajectory = await plain()
    for name, value in changes.items():
        setattr(trajectory.metrics, name, value)
    summary = summary_of(trajectory)
    assert summary.to_dict()["leaks"] == expected
    assert summary.leaks.clean is (expected == CLEAN)


async def test_leaks_are_also_what_hosts_still_hold_after_the_batch() -> None:
    summary = summary_of(await plain())
    summary.held = HostLeaks.total([HostLeaks(left_behind=1), HostLeaks(left_behind=3, live_processes=2)])
    assert summary.to_dict()["leaks"] == CLEAN | {"left_behind_calls": 4, "live_processes": 2}
    assert not summary.leaks.clean


# On the command line

TOOLS = """\
import asyncio
from typing import Any
from sglang_multiturn import BaseTool


class Odd(BaseTool):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        raise RuntimeError("bad\\x1b[2J luck")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        raise OSError("busy")
"""
YAML = """\
tools:
  - class_name: odd_tools.Odd
    tool_schema: {type: function, function: {name: odd, parameters: {type: object, properties: {}}}}
"""


def test_the_command_prints_examples_and_leaks_after_the_table(tmp_path: Path) -> None:
    (tmp_path / "odd_tools.py").write_text(TOOLS)
    (tmp_path / "tools.yaml").write_text(YAML)
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n' * 2)
    options = "rollout --engine scripted --script calls:1 --tools tools.yaml --data rows.jsonl --out out"
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "sglang_multiturn", *options.split()],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    printed = [line for line in lines if line.startswith(("tool instances", "raised", "error:", "release"))]
    assert [line.split(" request ")[0] for line in printed] == [
        "tool instances: 2 created, 2 released, 0 lost with their process, 0 not released; "
        "2 releases failed, 0 calls were left behind, 0 processes are still there",
        "raised: 2, for example",
        "release: 2, for example",
        "error:RuntimeError: 2, for example",
    ]
    assert printed[-1].endswith("bad\\x1b[2J luck")
    assert "\x1b[2J" not in "\n".join(printed)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["leaks"] == CLEAN | {"release_errors": 2}
    assert summary["failure_examples"]["error:RuntimeError"]["answer"] == "bad\x1b[2J luck"


async def test_a_summary_does_not_depend_on_the_order_in_which_trajectories_end() -> None:
    failed = await roll([call("echo"), "sorry"], [FailingTool(ToolError("none"))])
    broken = await roll([call("echo"), "never"], [FailingTool(RuntimeError("boom"))])
    told = [
        replace(one, request_id=name, input_index=index, rewards=Rewards(reward=reward), metrics=RolloutMetrics(tool_calls=1))
        for index, (name, one, reward) in enumerate(
            [("a", failed, 0.1), ("b", failed, 1e16), ("c", broken, 0.2), ("d", broken, -1e16)]
        )
    ]  # fmt: skip
    summaries = [json.dumps(summary_of(*order).to_dict()) for order in itertools.permutations(told)]
    assert len(set(summaries)) == 1
    summary = json.loads(summaries[0])
    assert summary["reward_mean"] == pytest.approx(0.075, rel=1e-15)  # a sum of floats would have lost the small ones
    assert summary["stop_reasons"] == {"answered": 2, "error": 2}
    assert {kind: example["request_id"] for kind, example in summary["failure_examples"].items()} == {
        "tool_error": "a", "raised": "c", "error:RuntimeError": "c",
    }  # fmt: skip
