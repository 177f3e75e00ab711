"""Generations that can be aborted by our own id, on verl's real SGLang server class around a real SGLang.

The server lives in a child process (`server_child.py`), which runs every scenario once; what came of each is compared here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

pytestmark = pytest.mark.slow

CHILD = Path(__file__).with_name("server_child.py")
Results = dict[str, Any]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("sglang is not installed")
    folder = tmp_path_factory.mktemp("server")
    with (folder / "log.txt").open("w") as log:
        done = subprocess.run(
            [sys.executable, str(CHILD), str(folder / "results.json")],
            env=os.environ | {"SGLANG_MULTITURN_CPU": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=560,
            check=False,
        )
    assert done.returncode == 0, (folder / "log.txt").read_text(errors="replace")[-6000:]
    results: Results = json.loads((folder / "results.json").read_text())
    return results


@pytest.fixture
def result(request: pytest.FixtureRequest, results: Results) -> Results:
    """What came of the scenario that the test is named after; afterwards SGLang was idle in every one."""
    scenario: Results = results[request.node.name.removeprefix("test_")]
    assert "failed" not in scenario, scenario
    assert scenario["idle"] is True
    return scenario


def ended(stop_reason: str, tokens: int, version: int) -> Results:
    return {"stop_reason": stop_reason, "tokens": tokens, "logprobs": tokens, "version": version}


def test_with_and_without_a_rid(result: Results) -> None:
    assert result["named"] == ended("length", 6, 0)
    assert result["same"] is True


def test_aborted_while_it_runs(result: Results) -> None:
    output = result["output"]
    assert output["stop_reason"] == "request_aborted"
    assert 0 < output["tokens"] == output["logprobs"] < result["budget"]
    assert result["ended"] is True  # when `abort_rids` returned, and the other one ran on


def test_aborted_before_it_arrives(result: Results) -> None:
    assert result["output"] == ended("request_aborted", 0, 0)
    assert result["again"] == ended("length", 6, 0)


def test_aborted_right_behind(result: Results) -> None:
    assert result["ends"] == ["request_aborted"] * 18


def test_aborted_in_a_pause(result: Results) -> None:
    """SGLang itself cannot: it remembers what waits there, and sends it to the scheduler once the pause is over."""
    assert result["waits_in_sglang"] is True
    assert result["output"] == ended("request_aborted", 0, 0)
    assert (result["forgotten"], result["flushed"], result["still_waiting"]) == (True, True, True)
    assert result["other"] == ended("length", 6, 0)


def test_turned_away_in_a_pause(result: Results) -> None:
    assert result["turned_away"] == ended("engine_turned_away", 0, 0)
    assert result["aborted"] == ended("request_aborted", 0, 0)
    assert result["waits"] is True
    assert result["again"] == ended("length", 6, 0)


def test_aborted_while_a_pause_begins(result: Results) -> None:
    assert result["old"]["stop_reason"] == "engine_paused"
    assert result["new"] == ended("request_aborted", 0, 0)


def test_sixty_four_at_once(result: Results) -> None:
    assert result["aborted"] == ["request_aborted"]
    assert result["partial"] > 0
    assert result["aligned"] is True
    assert result["kept"] == [20]


def test_paused_and_gone_on(result: Results) -> None:
    parts, rests = result["parts"], result["rests"]
    assert {part["stop_reason"] for part in parts} == {"engine_paused"}
    assert all(part["tokens"] > 0 for part in parts)
    assert {part["version"] for part in parts} == {6}
    assert result["waited"] is True
    assert [rest["tokens"] for rest in rests] == [400 - part["tokens"] for part in parts]
    assert {(rest["stop_reason"], rest["version"]) for rest in rests} == {("length", 7)}
    assert result["as_uninterrupted"] == len(parts) == 8


def test_of_another_loop(result: Results) -> None:
    assert result["paused"]["stop_reason"] == "abort"
    assert (result["untouched"], result["waits"]) == (True, True)
    assert result["resumed"]["stop_reason"] == "length"


def test_asked_twice_at_once(result: Results) -> None:
    assert "is in flight already" in result["refused"]
    assert result["first"]["stop_reason"] == "request_aborted"


def test_slept_and_woken(result: Results) -> None:
    assert result["output"]["stop_reason"] == "length"


def test_versions_under_load(result: Results) -> None:
    """A span of one version has the log-probabilities of that version's weights, and not those of the next."""
    assert result["reasons"] == ["engine_paused", "length", "stop"] or result["reasons"] == ["engine_paused", "length"]
    assert len(result["versions"]) > 3
    assert result["spans"] > len(result["versions"])
    assert result["worst"] <= 1e-4 < 1e-2 < result["worst_under_other_weights"]
