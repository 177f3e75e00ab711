"""Runs that are killed at any moment and resumed: every trajectory exactly once, as if nothing had happened."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_multiturn import Trajectory
from sglang_multiturn.journal import read_run
from sglang_multiturn.run_folder.marks import read_marks

ROWS, SAMPLES = 12, 2
KILLS, KILLS_A_RUN = 50, 5

TOOLS = """
tools:
  - class_name: sglang_multiturn.tools.builtin.calculator.CalculatorTool
    config: {}
    faults: {latency_s: 0.02, error_rate: 0.2, seed: 7}
  - class_name: booking.Booking
    config: {}
    execution: EXECUTION
rollout: {max_concurrent: 4, calc_rewards: sum}
"""
BOOKING = '''
import os
from pathlib import Path

from sglang_multiturn import BaseTool, ToolError
from sglang_multiturn.schemas import FunctionSchema, ToolSchema

LOG, BROKEN = Path(__file__).with_name("bookings.log"), Path(__file__).with_name("broken")


class Booking(BaseTool):
    """A place somewhere else, which stays taken until it is released."""

    @classmethod
    def default_schema(cls):
        return ToolSchema(function=FunctionSchema(name="booking"))

    def __init__(self, config, tool_schema=None):
        super().__init__(config, tool_schema or self.default_schema())

    def note(self, verb, instance_id):
        with LOG.open("a") as log:
            log.write(f"{verb} {instance_id}\\n")

    async def create(self, instance_id=None, **kwargs):
        self.note("create", instance_id)
        return instance_id

    async def execute(self, instance_id, parameters, **kwargs):
        if BROKEN.exists():
            raise RuntimeError("the desk is closed")
        return f"place {instance_id} is taken", 0.5, {}

    async def calc_reward(self, instance_id, **kwargs):
        return 0.25

    async def release(self, instance_id, **kwargs):
        self.note("release", instance_id)
'''
SCRIPT = """
from pathlib import Path

from sglang_multiturn import ScriptedTurn
from sglang_multiturn.errors import EngineDiedError
from sglang_multiturn.engine.scripts import call_text

DEAD = Path(__file__).with_name("dead")


def plan(spec):
    number = spec.input_index
    if number == 9 and DEAD.exists():
        return [ScriptedTurn(error=EngineDiedError("the GPU is gone"))]
    calls = [call_text("calculator", {"expression": f"{number}*{n}+1"}) for n in range(1 + number % 3)]
    place = [call_text("booking", {})] if number % 2 == 0 or number < 8 else []
    return [*place, *calls, f"It is {number}."]


def score(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str) / 7
"""


@dataclasses.dataclass(frozen=True)
class Workshop:
    """A folder with rows, tools and a script, and what an uninterrupted run of them comes to."""

    folder: Path
    expected: dict[str, Trajectory] = dataclasses.field(default_factory=dict)
    summary: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def options(self) -> list[str]:
        return (
            f"--engine scripted --script {self.folder}/mine.py:plan --reward {self.folder}/mine.py:score "
            f"--tools {self.folder}/tools.yaml --data {self.folder}/rows.jsonl --samples {SAMPLES}"
        ).split()

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")])
        return subprocess.Popen(
            [sys.executable, "-m", "sglang_multiturn", "rollout", *map(str, arguments)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip

    def run(self, *arguments: object) -> tuple[int, str]:
        process = self.start(*arguments)
        _, said = process.communicate(timeout=240)
        return process.returncode, " ".join(said.split())

    def open_bookings(self) -> Counter[str]:
        """Places that were taken and not released, and how often."""
        log = self.folder / "bookings.log"
        verbs = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        taken = Counter(name for verb, name in verbs if verb == "create")
        taken.subtract(name for verb, name in verbs if verb == "release")
        return +taken


def workshop(folder: Path, execution: str = "async") -> Workshop:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(ROWS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tools.yaml").write_text(TOOLS.replace("EXECUTION", execution))
    (folder / "booking.py").write_text(BOOKING)
    (folder / "mine.py").write_text(SCRIPT)
    return Workshop(folder)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    made = workshop(tmp_path_factory.mktemp("uninterrupted"))
    code, said = made.run(*made.options, "--out", made.folder / "run")
    assert code == 0, said
    assert sorted(path.name for path in (made.folder / "run").iterdir()) == [
        "run.json", "summary.json", "tools.yaml", "trajectories.jsonl",
    ]  # fmt: skip
    summary = json.loads((made.folder / "run" / "summary.json").read_text())
    return Workshop(made.folder, results(made.folder / "run"), summary)


def results(run: Path) -> dict[str, Trajectory]:
    """All that must be the same, by request; the journal must hold none twice."""
    read = list(read_run(run, say=pytest.fail))
    by_id = {trajectory.request_id: result(trajectory) for trajectory in read}
    assert len(by_id) == len(read)
    return by_id


def result(trajectory: Trajectory) -> Trajectory:
    """Without what a clock says."""
    trajectory.check()
    seconds = {name: 0.0 for name in dataclasses.asdict(trajectory.metrics) if name.endswith("_s")}
    return dataclasses.replace(
        trajectory,
        metrics=dataclasses.replace(trajectory.metrics, **seconds),
        tool_calls=tuple(dataclasses.replace(record, duration_s=0.0) for record in trajectory.tool_calls),
    )


def without_times(summary: dict[str, Any]) -> dict[str, Any]:
    metrics = {key: value for key, value in summary["metrics"].items() if not key.endswith("_s")}
    return {**summary, "metrics": metrics, "wall_s": None}


# kill -9

Moment = Callable[[Path, Callable[[], bool]], None]


def until(is_so: Callable[[], bool], is_alive: Callable[[], bool]) -> None:
    """Another process's file is looked at; there is nothing to wait for."""
    deadline = time.monotonic() + 120
    while not is_so() and is_alive() and time.monotonic() < deadline:
        time.sleep(0.0005)


def size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def a_moment(chance: random.Random, whole_bytes: int) -> Moment:
    """During the start, at a byte of the journal, at a byte of the marks, or while the summary is written."""
    kind = chance.choice(["start", "early", "bytes", "bytes", "marks", "end"])
    after_s = chance.uniform(0, 0.03)
    part = chance.uniform(0, 0.3)

    def wait(run: Path, is_alive: Callable[[], bool]) -> None:
        journal, marks = run / "trajectories.jsonl", run / "trajectories.marks"
        before, marked = size(journal), size(marks)
        if kind == "start":
            time.sleep(chance.uniform(0, 0.6))
        elif kind == "early":
            until(lambda: size(marks) > marked, is_alive)
        elif kind == "bytes":
            until(lambda: size(journal) > before + part * whole_bytes, is_alive)
        elif kind == "marks":
            until(lambda: size(marks) > marked + part * 5000, is_alive)
        else:
            until(lambda: size(journal) >= whole_bytes * 0.98, is_alive)
        time.sleep(after_s)

    return wait


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(KILLS // KILLS_A_RUN))
def test_a_run_that_is_killed_five_times_ends_as_one_that_was_not(
    tmp_path: Path, uninterrupted: Workshop, seed: int
) -> None:
    chance = random.Random(seed)
    mine = workshop(tmp_path, "process" if seed % 5 == 4 else "async")
    whole_bytes = size(uninterrupted.folder / "run" / "trajectories.jsonl")
    killed, number = 0, 0
    while killed < KILLS_A_RUN:
        number += 1
        run = tmp_path / f"run-{number}"
        ended = False
        done: dict[str, Trajectory] = {}
        while killed < KILLS_A_RUN and not ended:
            process = go_on(mine, run)
            a_moment(chance, whole_bytes)(run, lambda: process.poll() is None)  # noqa: B023 - called at once
            process.kill()
            _, said = process.communicate(timeout=60)
            ended = process.returncode == 0
            assert ended or process.returncode == -signal.SIGKILL, said
            killed += not ended
            done = still_holds(run, done)
        finish(mine, run, uninterrupted)


def go_on(mine: Workshop, run: Path) -> subprocess.Popen[str]:
    """As a user would: resume what was begun."""
    return mine.start("--resume", run) if (run / "run.json").exists() else mine.start(*mine.options, "--out", run)


def still_holds(run: Path, before: dict[str, Trajectory]) -> dict[str, Trajectory]:
    """What had its line has it still; only the last line may be torn."""
    if not (run / "trajectories.jsonl").exists():
        assert before == {}
        return before
    now = {trajectory.request_id: result(trajectory) for trajectory in read_run(run, say=lambda torn: None)}
    assert {name: now.get(name) for name in before} == before
    return now


def finish(mine: Workshop, run: Path, uninterrupted: Workshop) -> None:
    process = go_on(mine, run)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert results(run) == uninterrupted.expected
    assert without_times(json.loads((run / "summary.json").read_text())) == without_times(uninterrupted.summary)
    assert {path.name for path in run.iterdir()} - {"trajectories.marks"} == {
        "run.json", "summary.json", "tools.yaml", "trajectories.jsonl",
    }  # fmt: skip
    held = Counter(
        instance.instance_id
        for attempt in read_marks(run / "trajectories.marks")
        for instance in attempt.held.values()
        if instance.tool == "booking"
    )
    # A kill may come between the release of a place and its mark, so the marks may name more than is taken, never less.
    assert mine.open_bookings() <= held
    (mine.folder / "bookings.log").unlink(missing_ok=True)


# Other ends


@pytest.fixture
def slow(tmp_path: Path, uninterrupted: Workshop) -> Iterator[tuple[Workshop, subprocess.Popen[str], Path]]:
    """A run that has written some trajectories and is at work."""
    mine, run = workshop(tmp_path), tmp_path / "run"
    tools = mine.folder / "tools.yaml"
    tools.write_text(tools.read_text().replace("latency_s: 0.02", "latency_s: 0.3"))
    process = mine.start(*mine.options, "--out", run)
    until(lambda: size(run / "trajectories.jsonl") > 0, lambda: process.poll() is None)
    yield mine, process, run
    process.kill()
    process.communicate()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_stopped_releases_its_tools_and_says_how_to_go_on(
    slow: tuple[Workshop, subprocess.Popen[str], Path], uninterrupted: Workshop, number: int, code: int
) -> None:
    mine, process, run = slow
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    done = len(list(read_run(run, say=pytest.fail)))
    assert 0 < done < ROWS * SAMPLES
    assert f"{done} of {ROWS * SAMPLES} are done and kept." in said
    assert said.rstrip().endswith(f"sglang-multiturn rollout --resume {run}")
    assert mine.open_bookings() == Counter()
    (attempt,) = read_marks(run / "trajectories.marks")
    assert attempt.held == {}
    in_flight = [name for name in attempt.begun if name not in results(run)]
    code, said = mine.run("--resume", run)
    assert code == 0
    assert f"{done} of {ROWS * SAMPLES} are done, {len(in_flight)} were in flight ({', '.join(in_flight)})" in said
    assert results(run) == uninterrupted.expected
    assert not (run / "trajectories.marks").exists()


def test_what_a_killed_process_held_is_said_when_its_run_is_resumed(
    slow: tuple[Workshop, subprocess.Popen[str], Path],
) -> None:
    mine, process, run = slow
    until(lambda: bool(mine.open_bookings()), lambda: process.poll() is None)
    process.kill()
    process.communicate(timeout=60)
    taken = mine.open_bookings()
    assert taken
    code, said = mine.run("--resume", run)
    assert code == 0
    assert "tool instances were not released when their process was killed: " in said
    assert all(f"booking of {name} (instance {name})" in said for name in taken)
    held = [instance for attempt in read_marks(run / "trajectories.marks") for instance in attempt.held.values()]
    assert taken <= Counter(one.instance_id for one in held if one.tool == "booking")


def test_a_run_that_is_at_work_is_left_alone(slow: tuple[Workshop, subprocess.Popen[str], Path]) -> None:
    mine, process, run = slow
    process.send_signal(signal.SIGSTOP)  # so that it is at work however long the others take
    for arguments in (["--resume", run], [*mine.options, "--out", run], [*mine.options, "--out", run, "--overwrite"]):
        code, said = mine.run(*arguments)
        assert code == 1
        assert f"{run}/trajectories.jsonl is being written by process {process.pid} on" in said
    process.send_signal(signal.SIGCONT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert len(results(run)) == ROWS * SAMPLES


def test_an_engine_that_died_ends_nothing_but_the_run(tmp_path: Path, uninterrupted: Workshop) -> None:
    mine, run = workshop(tmp_path), tmp_path / "run"
    (tmp_path / "dead").touch()
    code, said = mine.run(*mine.options, "--out", run)
    assert code == 1
    done = results(run)
    assert all(trajectory.error is None for trajectory in done.values())
    assert "the GPU is gone" in said
    assert said.endswith(f"{len(done)} of 24 are done and kept. To go on with the rest: "
                         f"sglang-multiturn rollout --resume {run}")  # fmt: skip
    (tmp_path / "dead").unlink()
    assert mine.run("--resume", run)[0] == 0
    assert results(run) == uninterrupted.expected


def test_those_that_failed_are_asked_again_where_one_says_so(tmp_path: Path, uninterrupted: Workshop) -> None:
    mine, run = workshop(tmp_path), tmp_path / "run"
    (tmp_path / "broken").touch()
    code, said = mine.run(*mine.options, "--out", run)
    assert code == 1
    assert "rollouts failed; stopping" in said
    assert "Add --retry-failed to ask those that FAILED again." in said
    failed = {name for name, trajectory in results(run).items() if trajectory.error is not None}
    assert failed
    (tmp_path / "broken").unlink()
    code, said = mine.run("--resume", run, "--retry-failed")
    assert code == 0
    assert f"{len(failed)} had FAILED and are asked again" in said
    assert results(run) == uninterrupted.expected
    assert {trajectory.request_id for trajectory in read_run(run / "trajectories.retried")} == failed
