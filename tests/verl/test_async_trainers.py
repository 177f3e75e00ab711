"""verl's asynchronous trainers with this package's loop, as far as a CPU runs them: `make verl-matrix`.

But in one test the engine is scripted, so that a conversation is in the middle of a turn exactly when verl pauses it.
What is verl's own (pausing, refilling, staleness) is used as it is; ours is that no token is lost, sampled twice or given
another version.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

import word_problems  # type: ignore[import-not-found]  # examples/gsm8k_tool
from launch import main_ppo_overrides  # type: ignore[import-not-found]
from scripted_runs import run_plans
from stop_reasons import INTERRUPTED_AFTER, SAMPLES
from training import EXAMPLE, HERE, TINY_MODEL, Run, assert_learned, assert_rows_are_the_journals, assert_stepped, train

from sglang_multiturn.tokens import Origin
from sglang_multiturn.trajectory import Trajectory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.matrix,
]

PLANS = ["answered", "interrupted", "tool_stop", "max_tool_turns"]
"""In one sample of the second one the engine says nothing more until it is paused."""
PROMPTS, STEPS = 2, 3
STANDALONE = [
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=cpu_store",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=sglang_multiturn.cpu.checkpoint_engine",
    "ray_kwargs.ray_init.num_gpus=2",
    "ray_kwargs.ray_init.num_cpus=32",  # slots, not hardware; fully_async reserves more than twenty for itself
]
"""A rollout server that stands apart, and weights that reach it without a device."""


def run_async(folder: Path, mode: str, overrides: list[str]) -> Run:
    return run_plans(
        folder,
        PLANS,
        v1=True,
        workers=2,
        steps=STEPS,
        prompts=PROMPTS,
        overrides=["trainer.save_freq=-1", f"trainer.v1.trainer_mode={mode}", *overrides],
    )


def interrupted(run: Run) -> list[Trajectory]:
    """Conversations whose turn was cut by a pause and went on."""
    twice = [Origin.PROMPT, Origin.SAMPLED, Origin.SAMPLED]
    return [line for line in run.training().values() if [segment.origin for segment in line.segments] == twice]


def assert_exact(line: Trajectory) -> bool:
    """What was sampled before the pause and after it has a version each; whether the second is newer.

    It is not where verl took a server away in the middle, and another one that has not been updated yet went on.
    """
    line.check()
    (before,), (after,) = ({*part} for part in _around(line.response_weight_versions))
    assert before is not None
    assert after is not None
    assert before <= after
    return before < after


def _around(versions: Sequence[int | None]) -> tuple[Sequence[int | None], Sequence[int | None]]:
    return versions[:INTERRUPTED_AFTER], versions[INTERRUPTED_AFTER:]


def assert_exact_across_updates(run: Run, *, steps: int, servers_leave: bool = False) -> None:
    assert_learned(run, steps=steps)
    assert assert_rows_are_the_journals(run) == len(run.rows) > steps * PROMPTS
    lines = interrupted(run)
    assert lines
    across = [line for line in lines if assert_exact(line)]
    assert across if servers_leave else across == lines
    rows = {row["request_id"]: row["versions"] for row in run.rows}
    spans = [rows[line.request_id] for line in across if line.request_id in rows]
    assert all(oldest < newest for oldest, newest in spans)
    assert max(run.step(step)["training/off_policy/trajectory_spans/max"] for step in range(1, steps + 1)) > 1


def test_a_turn_that_verl_interrupts_goes_on_under_the_new_weights(tmp_path: Path) -> None:
    """`colocate_async`: verl pauses the engine once a batch is complete, trains, updates the weights and goes on."""
    assert_exact_across_updates(run_async(tmp_path, "colocate_async", []), steps=STEPS)


def test_real_sglang_is_interrupted_and_goes_on(tmp_path: Path) -> None:
    """`colocate_async` with real SGLang: whole tokens, and a version for each.

    Calls queue for their tool, so that conversations end one after another: when a batch is complete, others are not.
    """
    prompts, samples = 8, 4
    train_file = tmp_path / "train.parquet"
    word_problems.write(word_problems.rows(seed=1, count=(STEPS + 1) * prompts, split="train"), train_file)
    overrides = main_ppo_overrides(
        model=TINY_MODEL,
        train=train_file,
        heldout=train_file,
        tools=slow_calculator(tmp_path),
        reward=EXAMPLE / "reward.py",
        run_dir=tmp_path,
        steps=STEPS,
        seed=1,
    )
    sizes = [
        f"data.train_batch_size={prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={prompts * samples}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={prompts * samples}",
        f"actor_rollout_ref.rollout.n={samples}",
        "trainer.v1.trainer_mode=colocate_async",
        "trainer.save_freq=-1",
    ]
    run = train(tmp_path, [*overrides, *sizes], v1=True)
    assert_stepped(run, steps=STEPS)  # those that end first answer without a call, and often all of them wrongly
    assert assert_rows_are_the_journals(run) == STEPS * prompts * samples
    for row in run.rows:
        line = run.journal[row["request_id"]]
        line.check()
        versions = [version for version in line.response_weight_versions if version is not None]
        assert versions == sorted(versions)
        assert row["versions"] == [versions[0], versions[-1]]
        assert None not in [segment.weight_version for segment in line.segments if segment.origin is Origin.SAMPLED]
        assert {segment.min_weight_version for segment in line.segments} == {None}  # a span is exact, never a range
    assert any(oldest < newest for oldest, newest in (row["versions"] for row in run.rows))


def slow_calculator(folder: Path) -> Path:
    """The shipped one, which takes half a second and four calls at a time."""
    written = yaml.safe_load((HERE.parents[1] / "tool_configs" / "calculator.yaml").read_text(encoding="utf-8"))
    (tool,) = written["tools"]
    tool |= {"max_concurrent": 4, "faults": {"latency_s": 0.5}}
    path = folder / "tools.yaml"
    path.write_text(yaml.safe_dump(written), encoding="utf-8")
    return path


def test_a_server_that_stands_apart_goes_on_while_verl_trains(tmp_path: Path) -> None:
    """`separate_async`: the server is paused only while it takes new weights."""
    overrides = [*STANDALONE, "trainer.v1.separate_async.parameter_sync_step=1"]
    assert_exact_across_updates(run_async(tmp_path, "separate_async", overrides), steps=STEPS, servers_leave=True)


def test_one_step_off_samples_a_batch_while_it_trains_on_the_one_before(tmp_path: Path) -> None:
    """`verl.experimental.one_step_off_policy`."""
    run = run_plans(
        tmp_path,
        ["answered", "tool_stop", "error", "max_tool_turns"],
        v1=False,
        workers=2,
        steps=STEPS,
        prompts=PROMPTS,
        entry_point="verl.experimental.one_step_off_policy.main_ppo",
        overrides=[
            "trainer.save_freq=-1",
            "hydra.searchpath=[pkg://verl.trainer.config]",
            "actor_rollout_ref.hybrid_engine=False",
            "rollout.n_gpus_per_node=1",
            *STANDALONE,
        ],
    )
    assert_learned(run, steps=STEPS)
    assert len(run.rows) == STEPS * PROMPTS * SAMPLES  # V0's workers: a masked row for what is dropped
    assert_rows_are_the_journals(run)
    # verl hands weights over before it trains: what it calls version 1 is the model that training began with.
    assert [row["versions"] for row in run.rows[:: PROMPTS * SAMPLES]] == [[step, step] for step in range(STEPS)]


def test_fully_async_goes_on_sampling_across_updates(tmp_path: Path) -> None:
    """`verl.experimental.fully_async_policy`: sampling and training never wait for each other's end."""
    run = run_plans(
        tmp_path,
        PLANS,
        v1=False,
        workers=2,
        steps=STEPS,
        prompts=PROMPTS,
        entry_point="verl.experimental.fully_async_policy.fully_async_main",
        overrides=[
            "trainer.save_freq=-1",
            "data.train_batch_size=0",
            "data.gen_batch_size=1",
            "actor_rollout_ref.hybrid_engine=False",
            "rollout.n_gpus_per_node=1",
            f"rollout.n={SAMPLES}",
            f"rollout.total_rollout_steps={STEPS * PROMPTS}",
            "async_training.trigger_parameter_sync_step=1",
            "async_training.staleness_threshold=1",
            "actor_rollout_ref.rollout.multi_turn.enable=True",  # else it takes its own single_turn_agent (detach_utils.py:67)
            *STANDALONE,
        ],
    )
    assert assert_rows_are_the_journals(run) == STEPS * PROMPTS * SAMPLES
    lines = interrupted(run)
    assert lines
    assert all(assert_exact(line) for line in lines)
    rows = {row["request_id"]: row["versions"] for row in run.rows}
    cut = [rows[line.request_id] for line in lines]
    logged = [logged for logged in run.metrics if "actor/pg_loss" in logged]  # verl logs all steps but the last
    assert len(logged) == STEPS - 1
    assert all(math.isfinite(step["actor/pg_loss"]) for step in logged)
    assert sum(step["fully_async/partial/total_partial_num"] for step in logged) <= len(cut)
    assert all(oldest < newest for oldest, newest in cut)
