"""How SGLang's process begins and ends, and that nothing of it ever stays behind.

The ends of processes that are not ours are awaited with a pidfd, which becomes readable when its process ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine.subjects import TEST_TIMEOUT_S, TINY_MODEL

from sglang_multiturn.engine.base import GenerationId, SamplingParams
from sglang_multiturn.engine.sglang_engine import SGLangEngine
from sglang_multiturn.errors import EngineDiedError, EngineError, EngineStartError

pytestmark = pytest.mark.slow
pytest.importorskip("uvloop")  # sglang's own, and cheap to look for
psutil: Any = pytest.importorskip("psutil")

START_TIMEOUT_S = 240.0

PARENT = """
import asyncio, sys
from sglang_multiturn.engine.sglang_engine import SGLangEngine

async def main():
    engine = SGLangEngine(sys.argv[1], device="cpu")
    starting = asyncio.create_task(engine.start())
    while engine.pid is None:
        await asyncio.sleep(0)
    if sys.argv[2] == "serving":
        await starting
    print(engine.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_when_the_scheduler_dies_everything_in_flight_learns_why() -> None:
    engine = SGLangEngine(str(TINY_MODEL), device="cpu")
    await engine.start()
    assert engine.pid is not None
    tree = psutil.Process(engine.pid).children(recursive=True)
    ends = [_end_of(process.pid) for process in tree]
    flights = [
        asyncio.create_task(engine.generate(GenerationId(f"r{i}", 0), [45] * 3, SamplingParams(max_new_tokens=900)))
        for i in range(3)
    ]
    await engine.generate(GenerationId("probe", 0), [45], SamplingParams(max_new_tokens=1))
    _kill_scheduler(tree)
    async with asyncio.timeout(TEST_TIMEOUT_S):
        await asyncio.wait(flights)
        await asyncio.wait(ends)
    messages = {str(flight.exception()) for flight in flights if isinstance(flight.exception(), EngineDiedError)}
    assert len(messages) == 1
    message = messages.pop()
    assert message.startswith("SGLang's process ")
    assert "was killed by SIGKILL; the last lines of its log " in message
    assert "Subprocess scheduler_0" in message
    with pytest.raises(EngineDiedError, match="was killed by SIGKILL"):
        await engine.generate(GenerationId("late", 0), [45], SamplingParams(max_new_tokens=1))
    with pytest.raises(EngineDiedError, match="was killed by SIGKILL"):
        await engine.update_weights([], weight_version=1)
    await engine.close()
    await engine.close()


async def test_closing_ends_what_is_in_flight_and_every_process() -> None:
    engine = SGLangEngine(str(TINY_MODEL), device="cpu")
    await engine.start()
    assert engine.pid is not None
    ends = [_end_of(process.pid) for process in psutil.Process(engine.pid).children(recursive=True)]
    ends.append(_end_of(engine.pid))
    flight = asyncio.create_task(engine.generate(GenerationId("r", 0), [45] * 3, SamplingParams(max_new_tokens=900)))
    await engine.generate(GenerationId("probe", 0), [45], SamplingParams(max_new_tokens=1))
    async with asyncio.timeout(TEST_TIMEOUT_S):
        await engine.close()
        await asyncio.wait([flight])
        await asyncio.wait(ends)
    assert isinstance(flight.exception(), EngineDiedError)
    assert str(flight.exception()) == "the sglang engine was closed"
    with pytest.raises(EngineDiedError, match="the sglang engine was closed"):
        await engine.generate(GenerationId("r", 1), [45], SamplingParams(max_new_tokens=1))
    await engine.close()


@pytest.mark.parametrize("moment", ["starting", "serving"])
async def test_when_the_parent_is_killed_no_process_stays(moment: str) -> None:
    # Not asyncio's own: importing SGLang's server leaves uvloop's policy behind, which has no child watcher for other loops.
    command = [sys.executable, "-c", PARENT, str(TINY_MODEL), moment]
    parent = await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.PIPE, env=_environment())
    assert parent.stdout is not None
    async with asyncio.timeout(START_TIMEOUT_S):
        child_pid = int(await asyncio.to_thread(parent.stdout.readline))
    ends = [_end_of(process.pid) for process in psutil.Process(child_pid).children(recursive=True)]
    ends.append(_end_of(child_pid))
    parent.kill()
    async with asyncio.timeout(TEST_TIMEOUT_S):
        await asyncio.to_thread(parent.wait)
        await asyncio.wait(ends)
    parent.stdout.close()


@pytest.mark.parametrize("model_path", ["./nowhere", "/nowhere/at/all", "nowhere"])
async def test_a_missing_model_folder_is_named_before_anything_starts(model_path: str) -> None:
    engine = SGLangEngine(model_path)
    with pytest.raises(EngineStartError, match=f"model folder {model_path} does not exist"):
        await engine.start()
    assert engine.pid is None


async def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=r"has no config\.json"):
        await SGLangEngine(str(tmp_path)).start()


async def test_an_unknown_server_argument_is_refused_with_a_suggestion() -> None:
    engine = SGLangEngine(str(TINY_MODEL), device="cpu", server_args={"max_runing_requests": 4})
    with pytest.raises(EngineStartError, match="no 'max_runing_requests'; did you mean 'max_running_requests'"):
        await engine.start()
    assert engine.pid is None


async def test_a_start_that_takes_too_long_leaves_no_process() -> None:
    engine = SGLangEngine(str(TINY_MODEL), device="cpu", start_timeout_s=0.2)
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)  # the process is started in the task's first step
    assert engine.pid is not None
    end = _end_of(engine.pid)
    with pytest.raises(EngineStartError, match=r"did not come up within 0\.2 s"):
        await starting
    async with asyncio.timeout(TEST_TIMEOUT_S):
        await asyncio.wait([end])
    assert engine.pid is None


async def test_a_cancelled_start_leaves_no_process() -> None:
    engine = SGLangEngine(str(TINY_MODEL), device="cpu")
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)  # the process is started in the task's first step
    assert engine.pid is not None
    end = _end_of(engine.pid)
    starting.cancel()
    async with asyncio.timeout(TEST_TIMEOUT_S):
        await asyncio.wait([starting])
        await asyncio.wait([end])
    assert starting.cancelled()
    assert engine.pid is None


async def test_an_engine_that_was_not_started_says_so() -> None:
    engine = SGLangEngine(str(TINY_MODEL))
    with pytest.raises(EngineError, match=r"not started; await start\(\) first"):
        await engine.generate(GenerationId("r", 0), [1], SamplingParams(max_new_tokens=1))
    await engine.close()


def _end_of(pid: int) -> asyncio.Future[None]:
    """Done when the process is."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        ended.set_result(None)
        return ended

    def readable() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        ended.set_result(None)

    loop.add_reader(descriptor, readable)
    return ended


def _kill_scheduler(tree: list[Any]) -> None:
    (scheduler,) = [process for process in tree if process.name().startswith("sglang::schedul")]
    scheduler.send_signal(signal.SIGKILL)


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
