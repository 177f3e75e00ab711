"""Validation inside verl: known exactly, kept apart in journal, reward and faults, and told in verl's own metrics."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import numpy as np
from hydra.errors import InstantiationException
from omegaconf import DictConfig
from verl.experimental.agent_loop import agent_loop
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from sglang_multiturn.chat.hf_template import HFChatTemplate
from sglang_multiturn.engine.scripted import Script

from in_worker import (
    CALL,
    SAMPLING,
    BrokenTool,
    PayingTool,
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

BROKEN = {"tools_kwargs": {"calculator": {"create_kwargs": {"broken": True}}}}
ALWAYS_FAULTY = {"error_rate": 1.0}


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path, calculator_yaml: Path) -> DictConfig:
    """Of a run whose validation samples exactly as its training does."""
    config = demo_config(tmp_path, tiny_model, calculator_yaml)
    for key in ("temperature", "top_p", "top_k"):
        config.actor_rollout_ref.rollout.val_kwargs[key] = config.actor_rollout_ref.rollout[key]
    return config


async def v0_session(worker: AgentLoopWorker, *, validate: bool, sample: int = 0, step: int = 5, **row: Any) -> Any:
    info = {"step": step, "sample_index": 0, "rollout_n": sample, "validate": validate}
    return await worker._run_agent_loop(
        SAMPLING, info, agent_name="sglang_multiturn", trace=False, **{**question(), **row}
    )


# Known exactly


async def test_verl_says_what_a_conversation_is_for_and_not_its_sampling(
    config: DictConfig, template: HFChatTemplate, tmp_path: Path
) -> None:
    async with scripted(template, two_turns("The answer is 4.")) as engine:
        worker = RawWorker(config, ScriptedServers(engine))
        await v1_session(worker, 2, uid="v1-train")
        await v1_session(worker, 3, uid="v1-val", validate=True)
        await v0_session(worker, uid="v0-train", validate=False, sample=2, step=7)
        await v0_session(worker, uid="v0-val", validate=True, sample=3, step=0)
        await v0_session(worker, uid="no-step", validate=False, step=-1)
    said = {line.uid: (line.validate, line.step, line.sample_index) for line in journal(tmp_path)}
    assert said == {
        "v1-train": (False, 5, 2),
        "v1-val": (True, 5, 3),
        "v0-train": (False, 7, 2),
        "v0-val": (True, 0, 3),
        "no-step": (False, 0, 0),
    }


async def test_training_and_validation_side_by_side_are_not_mixed_up(
    config: DictConfig, template: HFChatTemplate, tmp_path: Path
) -> None:
    async with scripted(template, two_turns("The answer is 4.")) as engine:
        worker = RawWorker(config, ScriptedServers(engine))
        async with asyncio.TaskGroup() as group:
            for n in range(20):
                group.create_task(v1_session(worker, uid=f"u{n}", validate=n % 3 == 0))
    assert {line.uid: line.validate for line in journal(tmp_path)} == {f"u{n}": n % 3 == 0 for n in range(20)}


async def test_each_has_a_journal_file_of_its_own(config: DictConfig, template: HFChatTemplate, tmp_path: Path) -> None:
    async with scripted(template, two_turns("The answer is 4.")) as engine:
        worker = RawWorker(config, ScriptedServers(engine))
        await v1_session(worker, uid="t")
        assert [path.name.partition("-")[0] for path in (tmp_path / "journal").glob("*.jsonl")] == ["worker"]
        await v1_session(worker, uid="v", validate=True)
        await v1_session(worker, uid="unreadable", validate=True, raw_prompt=[{"role": "wizard", "content": "?"}])
    assert [line.uid for line in journal(tmp_path, "worker-*")] == ["t"]
    assert [(line.uid, line.step) for line in journal(tmp_path, "validation-*")] == [("v", 5), ("unreadable", 5)]
    assert len(journal(tmp_path)) == 3


async def test_where_verl_was_not_adapted_its_sampling_tells_them_apart(
    config: DictConfig, template: HFChatTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.actor_rollout_ref.rollout.val_kwargs.temperature = 0.0
    unpatched = inspect.unwrap(AgentLoopWorker._run_agent_loop)
    assert unpatched is not AgentLoopWorker._run_agent_loop
    monkeypatch.setattr(AgentLoopWorker, "_run_agent_loop", unpatched)
    async with scripted(template, two_turns("The answer is 4.")) as engine:
        worker = RawWorker(config, ScriptedServers(engine))
        await v1_session(worker)
        await v1_session(worker, uid="u2", sampling=SAMPLING | {"temperature": 0.0})
    assert {line.uid: (line.validate, line.step) for line in journal(tmp_path)} == {"u1": (False, 5), "u2": (True, 5)}


def test_verl_still_tells_its_worker_what_the_loop_is_not_told() -> None:
    source = inspect.getsource(inspect.unwrap(AgentLoopWorker._run_agent_loop))
    assert "await agent_loop.run(sampling_params, **kwargs)" in source
    assert (
        "{'step': step, 'sample_index': index[i], 'rollout_n': rollout_n, 'validate': validate}"
        in inspect.getsource(agent_loop.get_trajectory_info).replace('"', "'")
    )


# Faults


async def test_faults_are_put_into_training_alone(config: DictConfig, template: HFChatTemplate, tmp_path: Path) -> None:
    config.actor_rollout_ref.rollout.multi_turn.tool_config_path = tool_yaml(tmp_path, faults=ALWAYS_FAULTY)
    async with scripted(template, two_turns("The answer is 4.")) as engine:
        worker = RawWorker(config, ScriptedServers(engine))
        await v1_session(worker, uid="t")
        await v1_session(worker, uid="v", validate=True)
    assert {line.uid: line.metrics.injected_faults for line in journal(tmp_path)} == {"t": 1, "v": 0}


async def test_faults_are_refused_where_validation_cannot_be_told(
    config: DictConfig, template: HFChatTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AgentLoopWorker, "_run_agent_loop", inspect.unwrap(AgentLoopWorker._run_agent_loop))
    config.actor_rollout_ref.rollout.multi_turn.tool_config_path = tool_yaml(tmp_path, faults=ALWAYS_FAULTY)
    config.trainer.val_before_train = True
    async with scripted(template, two_turns("4")) as engine:
        with pytest.raises(InstantiationException, match="faults of tool 'calculator' would leak into validation"):
            await v1_session(RawWorker(config, ScriptedServers(engine)))


# The reward


async def test_the_reward_of_validation_is_the_score_alone(
    config: DictConfig, template: HFChatTemplate, tmp_path: Path
) -> None:
    """In training 0.25 for the call and 2.0 of `calc_reward` stand beside twice the score."""
    shaped = {"step_rewards": "sum", "calc_rewards": "sum", "score_weight": 2.0}
    config.actor_rollout_ref.rollout.multi_turn.tool_config_path = tool_yaml(tmp_path, PayingTool, **shaped)
    async with scripted(template, two_turns("The answer is 4.")) as engine:
        worker = RawWorker(config, ScriptedServers(engine))
        (train,) = await v1_session(worker, uid="t")
        (val,) = await v1_session(worker, uid="v", validate=True)
    assert (train.reward_score, val.reward_score) == (4.25, 1.0)
    assert val.as_dict()["rm_scores"].tolist() == [0.0] * (len(val.response_ids) - 1) + [1.0]
    said = val.extra_fields["reward_extra_info"]
    assert {name: said[name] for name in ("score", "acc", "step_reward", "calc_reward")} == {
        "score": 1.0,
        "acc": 1.0,
        "step_reward": 0.25,
        "calc_reward": 2.0,
    }
    assert {line.uid: (line.reward, line.rewards.score) for line in journal(tmp_path)} == {"t": (4.25, 1), "v": (1, 1)}


async def test_without_a_reward_function_what_tools_pay_is_the_reward_in_validation_too(
    config: DictConfig, template: HFChatTemplate, tmp_path: Path
) -> None:
    config.reward.custom_reward_function.path = None
    shaped = {"step_rewards": "sum", "calc_rewards": "sum"}
    config.actor_rollout_ref.rollout.multi_turn.tool_config_path = tool_yaml(tmp_path, PayingTool, **shaped)
    async with scripted(template, two_turns("The answer is 4.")) as engine:
        (val,) = await v1_session(RawWorker(config, ScriptedServers(engine)), validate=True)
    assert val.reward_score == 2.25
    assert sorted(value for value in val.as_dict()["rm_scores"].tolist() if value) == [0.25, 2.0]


@pytest.mark.parametrize("overlong", ["train", "mask", "drop"])
async def test_length_takes_nothing_away_in_validation(
    config: DictConfig, template: HFChatTemplate, tmp_path: Path, overlong: str
) -> None:
    limits = {"max_assistant_turns": 1, "overlong": overlong}
    config.actor_rollout_ref.rollout.multi_turn.tool_config_path = tool_yaml(tmp_path, **limits)
    said = f"The answer is 4. {CALL}"
    async with scripted(template, lambda _generation_id, _ids: said) as engine:
        worker = RawWorker(config, ScriptedServers(engine))
        (val,) = await v1_session(worker, validate=True)
        train = await v1_session(worker, uid="t")
    assert val.extra_fields["stop_reason"] == "max_assistant_turns"
    assert (val.reward_score, set(val.response_mask)) == (1.0, {1})
    assert [set(row.response_mask) for row in train] == {"train": [{1}], "mask": [{0}], "drop": []}[overlong]


# Nothing is dropped


@pytest.mark.parametrize("failed_rows", ["drop", "mask"])
async def test_a_failed_validation_rollout_is_a_row_of_reward_0(
    config: DictConfig, template: HFChatTemplate, tmp_path: Path, caplog: pytest.LogCaptureFixture, failed_rows: str
) -> None:
    config.actor_rollout_ref.rollout.multi_turn.tool_config_path = tool_yaml(tmp_path, failed_rows=failed_rows)
    async with scripted(template, two_turns("The answer is 4.")) as engine:
        worker = RawWorker(config, ScriptedServers(engine))
        (failed,) = await v1_session(worker, validate=True, **BROKEN)
        (unreadable,) = await v1_session(worker, 1, validate=True, raw_prompt=[{"role": "wizard", "content": "?"}])
    for row in (failed, unreadable):
        assert (row.response_mask, row.reward_score) == ([0], 0.0)
        said = row.extra_fields["reward_extra_info"]
        assert (said["acc"], said["score"], said["failed"], said["timed_out"]) == (0.0, 0.0, 1.0, 0.0)
    assert "1 trajectories ended as error in this worker; counted as reward 0 in validation" in caplog.messages


async def test_a_validation_rollout_without_log_probabilities_is_scored_like_any_other(
    config: DictConfig, template: HFChatTemplate, tmp_path: Path
) -> None:
    class WithoutLogprobs(ScriptedServers):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            return (await super().generate(*args, **kwargs)).model_copy(update={"log_probs": None})

    async with scripted(template, two_turns("The answer is 4.")) as engine:
        worker = RawWorker(config, WithoutLogprobs(engine))
        assert await v1_session(worker, uid="t") == []
        (val,) = await v1_session(worker, uid="v", validate=True)
    assert (val.reward_score, val.response_logprobs) == (1.0, None)
    assert 1 in val.response_mask


# verl's metrics


def careless(answer: str) -> Script:
    """A call that does not parse, then one of a tool that is not there beside a good one, then the answer."""
    turns = [
        CALL.replace("}}", "}"),
        CALL.replace("calculator", "abacus") + CALL,
        answer,
    ]
    return lambda generation_id, _ids: turns[generation_id.turn]


FIGURES = ("failed", "timed_out", "tool_calls", "failed_calls", "malformed_calls")


async def test_what_verl_logs_of_a_v1_validation(config: DictConfig, template: HFChatTemplate, tmp_path: Path) -> None:
    """Two samples of one prompt, one careless and right, one failed; verl's own code makes the metrics of them."""
    config.actor_rollout_ref.rollout.multi_turn.tool_config_path = tool_yaml(tmp_path)
    async with scripted(template, careless("The answer is 4.")) as engine:
        worker = RawWorker(config, ScriptedServers(engine))
        rows = [*await v1_session(worker, 0, validate=True), *await v1_session(worker, 1, validate=True, **BROKEN)]
    infos: dict[str, list[Any]] = {"reward": [row.reward_score for row in rows]}
    for name in rows[0].extra_fields["reward_extra_info"]:
        infos[name] = [row.extra_fields["reward_extra_info"][name] for row in rows]
    logged = PPOTrainer._val_metrics_update(
        None, ["sums"] * 2, ["u1"] * 2, infos, [row.num_turns for row in rows], {("sums", "u1"): 2}
    )
    assert {name: logged[f"val-aux/sums/{name}/mean@2"] for name in FIGURES} == {
        "failed": 0.5,
        "timed_out": 0.0,
        "tool_calls": 1.5,
        "failed_calls": 1.0,
        "malformed_calls": 0.5,
    }
    (line, _) = journal(tmp_path)
    assert logged["val-aux/sums/response_tokens/mean@2"] == len(line.response_ids) / 2
    assert (logged["val-core/sums/acc/mean@2"], logged["val-aux/sums/reward/mean@2"]) == (0.5, 0.5)
    assert logged["val-aux/sums/acc_success_only/mean@2"] == 0.5  # there is a row of every rollout


async def test_a_v0_validation_has_the_same_columns_of_every_row(
    config: DictConfig, template: HFChatTemplate, tmp_path: Path
) -> None:
    config.actor_rollout_ref.rollout.multi_turn.tool_config_path = tool_yaml(tmp_path, BrokenTool)
    rows = [question() | BROKEN, question("u2")]
    async with scripted(template, careless("The answer is 4.")) as engine:
        worker = AgentLoopWorker(config, ScriptedServers(engine))
        done = await worker.generate_sequences(v0_batch(rows, validate=True))
    assert {name: done.non_tensor_batch[name].tolist() for name in FIGURES} == {
        "failed": [1.0, 0.0],
        "timed_out": [0.0, 0.0],
        "tool_calls": [0.0, 3.0],
        "failed_calls": [0.0, 2.0],
        "malformed_calls": [0.0, 1.0],
    }
    assert set(FIGURES) < set(done.meta_info["reward_extra_keys"])
    assert done.batch["rm_scores"].sum(dim=1).tolist() == [0.0, 1.0]
    assert all(np.issubdtype(done.non_tensor_batch[name].dtype, np.floating) for name in FIGURES)


async def test_figures_of_validation_can_be_left_out_and_training_has_none(
    config: DictConfig, template: HFChatTemplate, tmp_path: Path
) -> None:
    config.actor_rollout_ref.rollout.multi_turn.tool_config_path = tool_yaml(tmp_path, validation_figures=False)
    async with scripted(template, two_turns("The answer is 4.")) as engine:
        worker = RawWorker(config, ScriptedServers(engine))
        (left_out,) = await v1_session(worker, validate=True)
        (train,) = await v1_session(worker, uid="t")
    assert left_out.extra_fields["reward_extra_info"] == {"score": 1.0, "acc": 1.0}
    assert train.extra_fields["reward_extra_info"] == {"score": 1.0, "acc": 1.0}
    assert (left_out.extra_fields["rollout_tally"], train.extra_fields["rollout_tally"]["rollouts"]) == ({}, 1.0)


class HangingTool(BrokenTool):
    """Never answers; only the conversation's own deadline ends it."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[str, float, dict]:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


async def test_a_validation_rollout_that_ran_out_of_time_is_marked(
    config: DictConfig, template: HFChatTemplate, tmp_path: Path
) -> None:
    deadlines = {"rollout_timeout_s": 0.1, "tool_timeout_s": None}
    config.actor_rollout_ref.rollout.multi_turn.tool_config_path = tool_yaml(tmp_path, HangingTool, **deadlines)
    async with scripted(template, two_turns("The answer is 4.")) as engine:
        (row,) = await v1_session(RawWorker(config, ScriptedServers(engine)), validate=True)
    said = row.extra_fields["reward_extra_info"]
    assert (said["timed_out"], said["failed"], row.reward_score) == (1.0, 0.0, 0.0)
