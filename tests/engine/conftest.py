"""The engines under test. The real SGLang takes about half a minute to start, so one serves the whole session."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from engine.subjects import SGLANG_SLOTS, TINY_MODEL, LetterTemplate, Subject, alphabet, new_id

from sglang_multiturn.engine.base import Engine, FinishReason, Generation, GenerationId, SamplingParams
from sglang_multiturn.engine.scripted import ScriptedEngine
from sglang_multiturn.engine.sglang_engine import SGLangEngine


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def scripted_subject() -> AsyncIterator[Subject]:
    async with ScriptedEngine(LetterTemplate(), alphabet, max_running=SGLANG_SLOTS) as engine:
        yield Subject(engine=engine, prompt=[65, 66, 67], endless=[65], endless_tokens=20)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def sglang_engine() -> AsyncIterator[SGLangEngine]:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("sglang is not installed")
    server_args = {"max_running_requests": SGLANG_SLOTS}
    async with SGLangEngine(str(TINY_MODEL), device="cpu", server_args=server_args) as engine:
        yield engine


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def sglang_subject(sglang_engine: SGLangEngine) -> Subject:
    budget = sglang_engine.info.max_model_len - 8
    async with asyncio.TaskGroup() as tasks:
        tried = {seed: tasks.create_task(_greedy(sglang_engine, [seed] * 3, budget)) for seed in range(40, 56)}
    endless = [seed for seed, task in tried.items() if task.result().finish_reason is FinishReason.LENGTH]
    return Subject(engine=sglang_engine, prompt=list(range(100, 140)), endless=[endless[0]] * 3, endless_tokens=budget)


async def _greedy(engine: Engine, input_ids: list[int], max_new_tokens: int) -> Generation:
    params = SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens)
    return await engine.generate(GenerationId(new_id("greedy"), 0), input_ids, params)


@pytest.fixture(params=["scripted", pytest.param("sglang", marks=pytest.mark.slow)])
def subject(request: pytest.FixtureRequest) -> Subject:
    """Every engine in turn."""
    subject: Subject = request.getfixturevalue(f"{request.param}_subject")
    return subject


@pytest.fixture
def engine(subject: Subject) -> Engine:
    """The engine of `subject`."""
    return subject.engine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Last of all, since SGLang's scheduler spins on a core for as long as it lives; what starts its own engines before."""
    here = Path(__file__).parent
    items.sort(key=lambda item: (here in item.path.parents, item.path.name != "test_sglang_process.py"))
