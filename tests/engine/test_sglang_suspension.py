"""Real weights that change fifty times under conversations of the real engine: each token's log-probability is that of
the weights its version names, computed anew by transformers from everything before it."""

from __future__ import annotations

import asyncio
import collections
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from engine.subjects import TINY_MODEL, Subject, new_id

from sglang_multiturn import HFChatTemplate, Message, RequestSpec, RolloutConfig, RolloutContext, Trajectory
from sglang_multiturn.chat.parsing import HermesParser
from sglang_multiturn.cpu.sglang_kernels import declare_torchvision_operators
from sglang_multiturn.engine.sglang_engine import SGLangEngine
from sglang_multiturn.request import RequestState
from sglang_multiturn.rollout import Rollout
from sglang_multiturn.tokens import Origin, TokenLedger
from sglang_multiturn.tools.builtin.calculator import CalculatorTool
from sglang_multiturn.tools.registry import ToolRegistry

pytestmark = pytest.mark.slow
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.numpy")

MOMENTS = 50
SIDE_BY_SIDE = 4
MAX_DIFFERENCE = 1e-4
NOISE = 0.02
QUESTION = "Tom has 12 bags with 34 apples each. How many apples does he have?"


def weights_of(version: int, base: int) -> dict[str, np.ndarray]:
    """Those of the folder at `base`; of every later version with noise of its own."""
    weights: dict[str, np.ndarray] = safetensors.load_file(TINY_MODEL / "model.safetensors")
    if version == base:
        return weights
    rng = np.random.default_rng(version)
    return {
        name: (array + NOISE * array.std() * rng.standard_normal(array.shape)).astype(array.dtype)
        for name, array in weights.items()
    }


@pytest_asyncio.fixture(loop_scope="session")
async def engine(sglang_subject: Subject) -> AsyncIterator[SGLangEngine]:
    engine = sglang_subject.engine
    assert isinstance(engine, SGLangEngine)
    yield engine
    await engine.update_weights_from_disk(str(TINY_MODEL), weight_version=engine.weight_version + 1)


class Lane:
    """Conversations one after the other, with the one that runs now in reach."""

    def __init__(self, context: RolloutContext, may_begin: asyncio.Event) -> None:
        self._context = context
        self._may_begin = may_begin
        self.now: Rollout | None = None
        self.finished: list[Trajectory] = []

    async def play(self, over: asyncio.Event) -> None:
        while not over.is_set():
            await self._may_begin.wait()
            name = new_id("suspended")
            asked = RequestSpec(request_id=name, uid=name, messages=(Message(role="user", content=QUESTION),))
            self.now = Rollout(asked, self._context)
            self.finished.append(await self.now.run())


async def test_every_span_has_the_log_probabilities_of_its_weights(engine: SGLangEngine) -> None:
    base, rng = engine.weight_version, random.Random(0)
    config = RolloutConfig(max_response_tokens=96, max_turn_tokens=48, max_errors_in_a_row=16)
    context = RolloutContext(
        generator=engine,
        template=HFChatTemplate.from_pretrained(TINY_MODEL),
        tools=ToolRegistry([CalculatorTool({})]),
        parser=HermesParser(),
        config=config,
        max_model_len=engine.info.max_model_len,
    )
    over, may_begin = asyncio.Event(), asyncio.Event()
    lanes = [Lane(context, may_begin) for _ in range(SIDE_BY_SIDE)]
    may_begin.set()
    where: collections.Counter[RequestState | None] = collections.Counter()
    async with asyncio.TaskGroup() as group:
        for lane in lanes:
            group.create_task(lane.play(over))
        for version in range(base + 1, base + 1 + MOMENTS):
            await asyncio.sleep(rng.uniform(0.05, 0.3))  # which moment it is, and no waiting for anything
            may_begin.clear()
            chosen = [lane.now for lane in lanes if lane.now is not None]
            await suspend_all(chosen)
            where.update(rollout.request.suspended_in for rollout in chosen)
            await engine.flush_cache()  # refused while anything of theirs is in flight
            await engine.update_weights(weights_of(version, base).items(), weight_version=version)
            for rollout in chosen:
                rollout.resume()
            may_begin.set()
        over.set()
    finished = [trajectory for lane in lanes for trajectory in lane.finished]
    for trajectory in finished:
        trajectory.check(end_ids=context.template.end_ids)
        versions = [version for version in trajectory.response_weight_versions if version is not None]
        assert versions == sorted(versions)
        assert len(trajectory.response_ids) <= config.max_response_tokens
    assert where[RequestState.RUNNING] > MOMENTS
    assert continued_turns(finished) > MOMENTS
    assert largest_difference(finished, base) <= MAX_DIFFERENCE


async def suspend_all(rollouts: Sequence[Rollout]) -> None:
    async with asyncio.TaskGroup() as group:
        for rollout in rollouts:
            group.create_task(rollout.suspend())


def continued_turns(trajectories: Sequence[Trajectory]) -> int:
    """Turns that went on under other weights."""
    pairs = (pair for trajectory in trajectories for pair in itertools.pairwise(trajectory.turns))
    return sum(one.turn == other.turn and one.weight_version != other.weight_version for one, other in pairs)


def largest_difference(trajectories: Sequence[Trajectory], base: int) -> float:
    """Between what the engine said of a sampled token and what transformers says of it under the same weights."""
    declare_torchvision_operators()  # transformers imports torchvision, which PyPI has for CUDA only
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32).eval()
    by_version: collections.defaultdict[int, list[TokenLedger]] = collections.defaultdict(list)
    for row in (row for trajectory in trajectories for row in trajectory.rows):
        for version in {segment.weight_version for segment in row.segments if segment.weight_version is not None}:
            by_version[version].append(row)
    largest = 0.0
    for version, rows in sorted(by_version.items()):
        tensors = {name: torch.from_numpy(array) for name, array in weights_of(version, base).items()}
        model.load_state_dict(tensors, strict=False)
        largest = max([largest, *(difference(model, row, version) for row in rows)])
    return largest


def difference(model: Any, row: TokenLedger, version: int) -> float:
    ids = torch.tensor([row.input_ids])
    with torch.no_grad():
        logprobs = model(ids).logits[0].float().log_softmax(-1)
    at, largest = 0, 0.0
    for segment in row.segments:
        if segment.origin is Origin.SAMPLED and segment.weight_version == version and len(segment.ids):
            assert segment.logprobs is not None
            said = torch.tensor(segment.logprobs.tolist())
            positions = torch.arange(at - 1, at - 1 + len(segment.ids))
            expected = logprobs[positions, torch.tensor(segment.ids.tolist())]
            largest = max(largest, (said - expected).abs().max().item())
        at += len(segment.ids)
    return largest
