"""What verl's own logger is given of a training step's rollouts: numbers by hand, through verl's own code."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import numpy as np
import ray
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, open_dict
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.trainer.ppo.metric_utils import compute_timing_metrics
from verl.trainer.ppo.v1 import AgentLoopWorkerTQ, get_trainer_cls
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.trainer.ppo.v1.utils import MetricsAggregator
from verl.utils import tensordict_utils

from sglang_multiturn.chat.hf_template import HFChatTemplate
from sglang_multiturn.config import RolloutConfig
from sglang_multiturn.errors import ConfigError
from sglang_multiturn.metrics import RolloutMetrics
from sglang_multiturn.request import StopReason, final_state
from sglang_multiturn.trajectory import Rewards, Trajectory
from sglang_multiturn.verl_plugin.row_keeping import RowKeeper
from sglang_multiturn.verl_plugin.rows import RowRules, VersionSpan
from sglang_multiturn.verl_plugin.step_metrics import CountingManager, replay_buffer
from sglang_multiturn.verl_plugin.tally import Tally

from in_worker import (
    OwnServers,
    RawWorker,
    ScriptedServers,
    demo_config,
    journal,
    question,
    scripted,
    tool_yaml,
    two_turns,
    v0_batch,
    v1_session,
)

ROOT = Path(__file__).parents[2]
BROKEN = {"tools_kwargs": {"calculator": {"create_kwargs": {"broken": True}}}}
V1_FLAGS = (
    "trainer.v1.sampler.custom_sampler.path=pkg://sglang_multiturn.verl_plugin.step_metrics",
    "trainer.v1.sampler.custom_sampler.name=replay_buffer",
)


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path, calculator_yaml: Path) -> DictConfig:
    return demo_config(tmp_path, tiny_model, calculator_yaml, *V1_FLAGS)


def ended(reason: StopReason, *, score: float | None = None, **metrics: Any) -> Trajectory:
    return Trajectory(
        request_id="r",
        uid="u",
        sample_index=0,
        input_index=0,
        state=final_state(reason),
        stop_reason=reason,
        disposition=RolloutConfig().disposition(reason),
        segments=(),
        turns=(),
        messages=(),
        rewards=Rewards(reward=score, score=score),
        metrics=RolloutMetrics(**metrics),
    )


ANSWERED = ended(
    StopReason.ANSWERED,
    score=1.0,
    assistant_turns=3,
    tool_calls=4,
    malformed_calls=1,
    tool_errors=2,
    tool_retries=1,
    generate_s=6.0,
    tool_s=1.0,
    queue_s=0.5,
    total_s=8.0,
    cut_tool_results=1,
    drift_special_tokens=2,
    drift_boundary_tokens=1,
    suspensions=1,
)
CUT = ended(StopReason.MAX_RESPONSE_TOKENS, score=0.0, assistant_turns=1, generate_s=2.0, total_s=2.0)
FAILED = ended(StopReason.ERROR, tool_crashes=1, tool_calls=1, total_s=5.0)
LATE = ended(StopReason.TIMEOUT, total_s=9.0)


def tallies() -> list[dict[str, float]]:
    """One that trained, one masked, one dropped, one whose row is a stand-in."""
    return [
        Tally.of(ANSWERED, has_row=True, trains=True, versions=3).numbers,
        Tally.of(CUT, has_row=True, trains=False, versions=1).numbers,
        Tally.of(FAILED, has_row=False, trains=False, versions=1).numbers,
        Tally.of(LATE, has_row=True, trains=False, versions=1).numbers,
    ]


# Numbers


def test_the_figures_of_four_rollouts() -> None:
    figures = Tally.total(tallies()).figures()
    told = {name.removeprefix("rollout/"): value for name, value in figures.items() if value}
    assert told == {
        "rollouts_total": 4,
        "with_tool_calls": 0.5,
        "dropped_total": 1,
        "dropped_total/error": 1,
        "masked_total": 2,
        "masked_total/limit_response_tokens": 1,
        "masked_total/timeout": 1,
        "stop_reason/answered": 0.25,
        "stop_reason/limit_response_tokens": 0.25,
        "stop_reason/error": 0.25,
        "stop_reason/timeout": 0.25,
        "turns/mean": 1.0,
        "tool_calls/mean": 1.25,
        "tool_retries/mean": 0.25,
        "cut_tool_results/mean": 0.25,
        "drift_tokens/mean": 0.75,
        "suspensions/mean": 0.25,
        "call_errors/malformed": 0.2,
        "call_errors/tool_error": 0.4,
        "call_errors/raised": 0.2,
        "seconds/generate/mean": 2.0,
        "seconds/generate/max": 6.0,
        "seconds/queue/mean": 0.125,
        "seconds/tools/mean": 0.25,
        "seconds/tools/max": 1.0,
        "seconds/conversation/mean": 6.0,
        "seconds/conversation/max": 9.0,
        "versions/mean": 1.5,
        "versions/max": 3,
        "score/mean": 0.5,
    }


def test_a_step_without_rollouts_has_no_figures() -> None:
    assert Tally.total([{}, {}]).figures() == {}


def test_figures_have_the_same_names_whatever_happened() -> None:
    names = [set(Tally.total([one]).figures()) for one in tallies()]
    optional = {name for name in set.union(*names) if re.search(r"_total/|score/", name)}
    assert len({frozenset(one - optional) for one in names}) == 1
    assert {f"rollout/stop_reason/{reason}".replace("/max_", "/limit_") for reason in StopReason} <= names[0]


def test_verl_combines_the_steps_between_two_syncs_as_each_figure_means_it() -> None:
    """`separate_async` logs several samples as one step and combines figures by their names."""
    every = tallies()
    halves = [Tally.total(every[:2]).figures(), Tally.total(every[2:]).figures()]
    whole = Tally.total(every).figures()
    aggregator = MetricsAggregator()
    for half in halves:
        aggregator.add_step_metrics(half, sample_count=2)
    logged = aggregator.get_aggregated_metrics()
    by_calls = {
        name for name in whole if "/call_errors/" in name
    }  # 4 of the calls fell into one half, 1 into the other
    assert logged.keys() == whole.keys()
    assert {name: logged[name] for name in whole.keys() - by_calls} == {
        name: whole[name] for name in whole.keys() - by_calls
    }


def test_every_figure_is_documented_and_nothing_else() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(rollout/[^`]+)` \|", page, re.MULTILINE))
    given = {name for one in tallies() for name in Tally.total([one]).figures()}
    generic = {re.sub(r"(stop_reason|dropped_total|masked_total|call_errors)/.*", r"\1/...", name) for name in given}
    assert listed == generic


# V1


async def test_a_dropped_rollout_is_counted_with_the_next_row_of_its_worker_and_once(
    config: DictConfig, template: HFChatTemplate, tmp_path: Path
) -> None:
    config.actor_rollout_ref.rollout.multi_turn.tool_config_path = tool_yaml(tmp_path)
    async with scripted(template, two_turns("The answer is 4.")) as engine:
        worker = RawWorker(config, ScriptedServers(engine))
        assert [await v1_session(worker, n, **BROKEN) for n in range(2)] == [[], []]
        (validated,) = await v1_session(worker, uid="v", validate=True)
        rows = [row for n in range(2, 4) for row in await v1_session(worker, n)]
    assert validated.extra_fields["rollout_tally"] == {}
    first, second = (row.extra_fields["rollout_tally"] for row in rows)
    assert (first["rollouts"], first["dropped/error"], first["stop_reason/answered"]) == (3, 2, 1)
    assert (second["rollouts"], second.get("dropped/error")) == (1, None)
    assert first["tool_calls"] == second["tool_calls"] == 1


ENDINGS = st.sampled_from([ANSWERED, CUT, FAILED, LATE])


@settings(max_examples=200, deadline=None)
@given(
    sessions=st.lists(st.tuples(ENDINGS, st.booleans(), st.booleans()), max_size=20),
    failed_rows=st.sampled_from(["drop", "mask"]),
)
def test_every_training_rollout_is_counted_once_whatever_becomes_of_it(
    sessions: list[tuple[Trajectory, bool, bool]], failed_rows: str
) -> None:
    """Of V1 and V0, with validation in between: what rode on rows and what still waits is everything, in any order."""
    policy = RolloutConfig.model_validate({"failed_rows": failed_rows})
    rules = RowRules(scored_here=True, with_logprobs=False, max_prompt_tokens=8, filler_id=9, settings=policy)
    keeper = RowKeeper(rules, group_size=None)
    ridden, expected = Tally(), Tally()
    for ending, validate, takes_rows in sessions:
        one = dataclasses.replace(ending, validate=validate, turns=())
        rows = keeper.rows(one, VersionSpan(2, 4), takes_rows=takes_rows)
        assert len(rows) == 1 or (takes_rows and not validate and failed_rows == "drop" and rows == [])
        for row in rows:
            ridden.add(row.extra_fields["rollout_tally"])
            assert not (validate and row.extra_fields["rollout_tally"])
        if not validate:
            expected.add(Tally.of(one, has_row=bool(rows), trains=False, versions=3).numbers)
    ridden.add(keeper._waiting.numbers)
    assert ridden.numbers == expected.numbers


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("sync", ReplayBuffer), ("colocate_async", ReplayBufferAsync), ("separate_async", ReplayBufferAsync)],
)
def test_the_replay_buffer_is_verls_own_with_everything_verl_gives_it(
    config: DictConfig, mode: str, kind: type
) -> None:
    """verl gives a custom sampler no group filter; through ours it stays on."""
    with open_dict(config):
        config.trainer.v1.trainer_mode = mode
        config.trainer.v1.separate_async.parameter_sync_step = 1  # this and the next two are what that mode asserts
        config.actor_rollout_ref.rollout.nnodes = 1
        config.actor_rollout_ref.rollout.checkpoint_engine.backend = "nccl"
        config.algorithm.filter_groups = {"enable": True, "metric": "acc", "max_inflight_gen_batches": 3}
    trainer = get_trainer_cls(mode)(config)
    buffer = trainer.replay_buffer
    assert type(buffer) is kind
    assert (buffer.filter_groups_metric, buffer.refill_fn) == ("acc", trainer._add_prompts_to_generate)
    if mode == "sync":
        assert (buffer.train_batch_size, buffer.max_inflight_gen_batches) == (config.data.train_batch_size, 3)
    assert config.trainer.v1.sampler.custom_sampler.path.startswith("pkg://")


def test_a_verl_that_builds_its_buffer_otherwise_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave the custom sampler out"):
        replay_buffer(refill_fn=lambda count: count, trainer_mode="sync")


@pytest.fixture(scope="module")
def ray_job() -> Iterator[None]:
    paths = os.pathsep.join(str(ROOT / part) for part in ("tests", "tests/verl", "examples/gsm8k_tool"))
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100_000_000,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}},
    )
    yield
    ray.shutdown()


def test_what_the_v1_trainer_logs_of_a_step(
    config: DictConfig, tiny_model: Path, tmp_path: Path, ray_job: None
) -> None:
    """verl's worker, in a process of its own, puts rows into TransferQueue, and the trainer's buffer samples them.

    Two prompts of three sessions each, one of which fails, and a validation that samples as training does.
    """
    import transfer_queue

    rollout = config.actor_rollout_ref.rollout
    rollout.multi_turn.tool_config_path = tool_yaml(tmp_path)
    rollout.n = 3
    rollout.val_kwargs.temperature = rollout.temperature
    transfer_queue.init(config.transfer_queue)
    try:
        trainer = get_trainer_cls("sync")(config)
        trainer.replay_buffer.poll_interval = 0.05
        worker = AgentLoopWorkerTQ.remote(config, OwnServers(tiny_model, "The answer is 4."))
        run_prompt(worker, question("a") | BROKEN, "train")
        run_prompt(worker, question("c"), "val")
        _, validation = trainer.replay_buffer.sample(global_steps=5, partition_id="val", batch_size=1)
        run_prompt(worker, question("b"), "train")
        batch, metrics = trainer.replay_buffer.sample(global_steps=5, partition_id="train", batch_size=2)
        fields = transfer_queue.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["extra_fields"])
    finally:
        transfer_queue.close()
    assert sorted(batch.keys) == ["b_0_0", "b_1_0", "b_2_0"]
    assert len(list(fields["extra_fields"])) == 3
    assert validation == {}
    told = {name: value for name, value in metrics.items() if value and "seconds" not in name and "tokens" not in name}
    assert told == {
        "rollout/rollouts_total": 6,
        "rollout/dropped_total": 3,
        "rollout/dropped_total/error": 3,
        "rollout/stop_reason/answered": 0.5,
        "rollout/stop_reason/error": 0.5,
        "rollout/with_tool_calls": 0.5,
        "rollout/turns/mean": 1.0,
        "rollout/tool_calls/mean": 0.5,
        "rollout/versions/mean": 1.0,
        "rollout/versions/max": 1,
        "rollout/score/mean": 1.0,
    }
    assert metrics["rollout/seconds/conversation/max"] > 0
    assert [line.uid for line in journal(tmp_path, "validation-*")] == ["c"]
    assert sorted(line.uid for line in journal(tmp_path, "worker-*")) == ["a"] * 3 + ["b"] * 3


def run_prompt(worker: Any, row: dict[str, Any], partition: str) -> None:
    """As the trainer registers a prompt and hands it to a worker (trainer_base.py:1496, agent_loop_tq.py:210)."""
    import transfer_queue

    batch = tensordict_utils.get_tensordict({key: object_array([value]) for key, value in row.items()})
    tensordict_utils.assign_non_tensor_data(batch, "global_steps", 5)
    if partition == "val":
        tensordict_utils.assign_non_tensor_data(batch, "validate", True)
    tag = {"is_prompt": True, "status": "pending", "global_steps": 5}
    transfer_queue.kv_batch_put(keys=[row["uid"]], partition_id=partition, tags=[tag])
    ray.get(worker.generate_sequences.remote(batch))


def object_array(values: list[Any]) -> Any:
    return np.fromiter(values, dtype=object, count=len(values))


# V0


async def test_what_the_v0_trainer_logs_of_a_step(config: DictConfig, template: HFChatTemplate, tmp_path: Path) -> None:
    config.actor_rollout_ref.rollout.multi_turn.tool_config_path = tool_yaml(tmp_path)
    rows = [question() | BROKEN, question("u2"), question("u3")]
    manager = CountingManager(config, None)
    async with scripted(template, two_turns("The answer is 4.")) as engine:
        worker = AgentLoopWorker(config, ScriptedServers(engine))
        trained = await worker.generate_sequences(v0_batch(rows))
        validated = await worker.generate_sequences(v0_batch(rows, validate=True))
    timing = manager._performance_metrics([trained.meta_info["metrics"]], trained)
    logged = compute_timing_metrics(trained, timing)
    assert logged["timing_s/agent_loop/num_preempted/mean"] == -1  # verl's own are there too
    told = {name.removeprefix("timing_s/rollout/"): value for name, value in logged.items() if "/rollout/" in name}
    assert (told["rollouts_total"], told["masked_total"], told["masked_total/error"]) == (3, 1, 1)
    assert math.isclose(told["stop_reason/answered"], 2 / 3)
    assert (told["dropped_total"], told["score/mean"]) == (0, 1.0)
    assert "rollout_tally" not in trained.non_tensor_batch
    assert not any(
        "rollout/" in name for name in manager._performance_metrics([validated.meta_info["metrics"]], validated)
    )
