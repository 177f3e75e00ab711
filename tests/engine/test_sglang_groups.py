"""Batches of groups on the real engine, with more asked of its cache than it is allowed to hold."""

from __future__ import annotations

from typing import Any, Self

import pytest
from engine.subjects import TINY_MODEL, new_id

from sglang_multiturn import HFChatTemplate, Message, RequestSpec, RolloutConfig, RolloutEngine, ToolRegistry
from sglang_multiturn.config import GroupConfig
from sglang_multiturn.engine.sglang_engine import SGLangEngine
from sglang_multiturn.groups.sampler import GroupSampler
from sglang_multiturn.tools.builtin.calculator import CalculatorTool

pytestmark = pytest.mark.slow
pytest.importorskip("transformers")

STEPS, GROUPS, SAMPLES = 3, 2, 3
QUESTION = "Tom has {} bags with 34 apples each. How many apples does he have?"


class Lent:
    """An engine that goes on serving others when a rollout engine has done with it."""

    def __init__(self, engine: SGLangEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("rest", ["abort", "carry"])
async def test_batches_are_whole_and_between_them_nothing_is_in_the_engine(
    sglang_engine: SGLangEngine, rest: Any
) -> None:
    lent: Any = Lent(sglang_engine)
    rollouts = RolloutEngine(
        lent,
        template=HFChatTemplate.from_pretrained(TINY_MODEL),
        tools=ToolRegistry([CalculatorTool({})]),
        config=RolloutConfig(
            max_response_tokens=96, max_turn_tokens=48, max_errors_in_a_row=16, max_tokens_in_flight=900
        ),
    )
    config = GroupConfig(samples_per_group=SAMPLES, groups_per_batch=GROUPS, over_sampling_groups=2, rest=rest)
    name = new_id(rest)
    prompts = [
        RequestSpec(
            request_id=f"{name}-{i}", uid=f"{name}-{i}", messages=(Message(role="user", content=QUESTION.format(i)),)
        )
        for i in range(100)
    ]
    batches = []
    async with rollouts, GroupSampler(rollouts, prompts, config) as sampler:
        for _ in range(STEPS):
            batches.append(await sampler.next_batch())
            async with rollouts.suspended():
                await sglang_engine.flush_cache()  # refused while anything is in flight
                version = sglang_engine.weight_version + 1
                await sglang_engine.update_weights_from_disk(str(TINY_MODEL), weight_version=version)
    await sglang_engine.flush_cache()
    assert [len(batch.groups) for batch in batches] == [GROUPS] * STEPS
    trained = [trajectory for batch in batches for trajectory in batch.trajectories]
    assert len({trajectory.request_id for trajectory in trained}) == STEPS * GROUPS * SAMPLES
    assert any(trajectory.metrics.queue_s > 0 for trajectory in trained)
    for trajectory in trained:
        trajectory.check(end_ids=rollouts.template.end_ids)
        versions = [version for version in trajectory.response_weight_versions if version is not None]
        assert versions == sorted(versions)
    totals = sampler.totals
    assert totals.started == totals.trained + totals.aborted
    assert (totals.trained, totals.carried) == (STEPS * GROUPS, 0)
