"""The loop inside verl's own worker, in this process: the model is scripted, all else is real."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, AgentLoopWorker

from sglang_multiturn.chat.hf_template import HFChatTemplate
from sglang_multiturn.engine.base import GenerationId
from sglang_multiturn.engine.scripted import ScriptedTurn
from sglang_multiturn.errors import ConfigError
from sglang_multiturn.run_folder.marks import read_marks
from sglang_multiturn.tools.base import BaseTool
from sglang_multiturn.tools.registry import ToolRegistry
from sglang_multiturn.verl_plugin.row_keeping import GroupCount
from sglang_multiturn.verl_plugin.worker import _CONTEXTS, WorkerContext

from in_worker import (
    CALL,
    SAMPLING,
    SHOWN,
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


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path, calculator_yaml: Path) -> DictConfig:
    return demo_config(tmp_path, tiny_model, calculator_yaml)


async def test_a_conversation_becomes_a_row_and_a_line_of_the_journal(
    config: DictConfig, template: HFChatTemplate, tmp_path: Path
) -> None:
    async with scripted(template, two_turns("The answer is 4.")) as engine:
        (row,) = await v1_session(RawWorker(config, ScriptedServers(engine)))
    (line,) = journal(tmp_path)
    assert isinstance(row, AgentLoopOutput)
    assert (row.reward_score, row.num_turns) == (1.0, 4)
    assert row.extra_fields["request_id"] == line.request_id == "u1-s0-g5"
    assert (row.prompt_ids, row.response_ids, row.response_mask) == (
        line.prompt_ids,
        line.response_ids,
        line.response_mask,
    )
    assert row.response_ids[-1] in template.stop_token_ids
    assert (row.extra_fields["min_global_steps"], row.extra_fields["max_global_steps"]) == (4, 4)
    line.check()


async def test_a_number_only_the_calculator_said_is_worth_nothing(
    config: DictConfig, template: HFChatTemplate, tmp_path: Path
) -> None:
    """The tool's answer is the right one and stands in the row; the model never says it."""
    config.actor_rollout_ref.rollout.multi_turn.tool_config_path = tool_yaml(tmp_path, AnsweringTool)
    async with scripted(template, two_turns("I do not know.")) as engine:
        (row,) = await v1_session(RawWorker(config, ScriptedServers(engine)))
    assert "The answer is 4." in template.decode(row.response_ids)
    assert row.reward_score == 0.0


class AnsweringTool(BaseTool):
    """A calculator that words its result as the reward function wants to read it."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[str, float, dict]:
        return "The answer is 4.", 0.0, {}


async def test_a_failed_conversation_is_no_row_under_v1(
    config: DictConfig, template: HFChatTemplate, tmp_path: Path
) -> None:
    config.actor_rollout_ref.rollout.multi_turn.tool_config_path = tool_yaml(tmp_path)
    broken = {"tools_kwargs": {"calculator": {"create_kwargs": {"broken": True}}}}
    async with scripted(template, two_turns("The answer is 4.")) as engine:
        worker = RawWorker(config, ScriptedServers(engine))
        rows = [await v1_session(worker, i, **(broken if i == 3 else {})) for i in range(5)]
    assert [len(row) for row in rows] == [1, 1, 1, 0, 1]
    assert {line.request_id: line.state.value for line in journal(tmp_path)}["u1-s3-g5"] == "FAILED"


async def test_a_failed_conversation_is_one_masked_row_where_that_was_asked_for(
    config: DictConfig, template: HFChatTemplate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config.actor_rollout_ref.rollout.multi_turn.tool_config_path = tool_yaml(tmp_path, failed_rows="mask")
    broken = {"calculator": {"create_kwargs": {"broken": True}}}
    async with scripted(template, two_turns("The answer is 4.")) as engine:
        worker = RawWorker(config, ScriptedServers(engine))
        rows = [await v1_session(worker, i, tools_kwargs=broken) for i in range(3)]
    assert [row.response_mask for (row,) in rows] == [[0]] * 3
    assert sum("shifts its group's mean" in record.message for record in caplog.records) == 2  # the 1st and the 2nd


async def test_v0_gets_exactly_one_row_for_every_conversation(
    config: DictConfig, template: HFChatTemplate, tmp_path: Path
) -> None:
    """Through verl's own padding and batching, a failed one and an answered one side by side."""
    config.actor_rollout_ref.rollout.multi_turn.tool_config_path = tool_yaml(tmp_path)
    rows = [question(), question() | {"tools_kwargs": {"calculator": {"create_kwargs": {"broken": True}}}}]
    async with scripted(template, two_turns("The answer is 4.")) as engine:
        done = await AgentLoopWorker(config, ScriptedServers(engine)).generate_sequences(v0_batch(rows))
    assert done.batch["response_mask"].sum(dim=1).tolist()[1] == 0
    assert done.batch["response_mask"].sum(dim=1).tolist()[0] > 10
    assert done.batch["rm_scores"].sum(dim=1).tolist() == [1.0, 0.0]
    assert done.non_tensor_batch["acc"].tolist() == [1.0, 0.0]
    assert done.non_tensor_batch["stop_reason"].tolist() == ["answered", "error"]


@pytest.mark.parametrize("agent_loop", ["v1", "v0"])
async def test_a_row_that_is_no_conversation_does_not_stop_its_siblings(
    config: DictConfig, template: HFChatTemplate, tmp_path: Path, agent_loop: str
) -> None:
    async with scripted(template, two_turns("The answer is 4.")) as engine:
        worker = RawWorker(config, ScriptedServers(engine))
        if agent_loop == "v1":
            assert await v1_session(worker, raw_prompt=[{"role": "wizard", "content": "?"}]) == []
        else:
            row = question() | {"raw_prompt": [{"role": "wizard", "content": "?"}]}
            info = {"step": 5, "sample_index": 0, "rollout_n": 0, "validate": False}
            output = await worker._run_agent_loop(SAMPLING, info, agent_name="sglang_multiturn", trace=False, **row)
            assert output.response_mask == [0]
    (line,) = journal(tmp_path)
    assert line.error is not None
    assert "wizard" in line.error.message


async def test_the_last_session_of_an_empty_group_leaves_a_masked_row_for_the_group_filter(
    config: DictConfig, template: HFChatTemplate, tmp_path: Path
) -> None:
    config.actor_rollout_ref.rollout.multi_turn.tool_config_path = tool_yaml(tmp_path)
    config.actor_rollout_ref.rollout.n = 3
    with open_dict(config):
        config.algorithm.filter_groups = {"enable": True, "metric": "acc"}
    broken = {"calculator": {"create_kwargs": {"broken": True}}}
    async with scripted(template, two_turns("The answer is 4.")) as engine:
        worker = RawWorker(config, ScriptedServers(engine))
        empty = [await v1_session(worker, i, tools_kwargs=broken) for i in range(3)]
        one_left = [await v1_session(worker, i, tools_kwargs=broken if i else {}, uid="u2") for i in range(3)]
    assert [len(rows) for rows in empty] == [0, 0, 1]
    assert empty[2][0].response_mask == [0]
    assert empty[2][0].extra_fields["reward_extra_info"]["acc"] == 0.0
    assert [len(rows) for rows in one_left] == [1, 0, 0]


async def test_what_tools_pay_stands_in_verls_rows(
    config: DictConfig, template: HFChatTemplate, tmp_path: Path
) -> None:
    """0.5 for the call, on the last token of its turn; 2.0 of calc_reward and 1.0 of the score on the last."""
    weights = {"step_rewards": "sum", "step_reward_weight": {"calculator": 2.0}, "calc_rewards": "last"}
    config.actor_rollout_ref.rollout.multi_turn.tool_config_path = tool_yaml(tmp_path, PayingTool, **weights)
    async with scripted(template, two_turns("The answer is 4.")) as engine:
        (row,) = await v1_session(RawWorker(config, ScriptedServers(engine)))
    (line,) = journal(tmp_path)
    scores = row.as_dict()["rm_scores"].tolist()
    assert {at: score for at, score in enumerate(scores) if score} == {
        line.turns[0].sampled_tokens - 1: 0.5,
        -1 % len(scores): 3.0,
    }
    assert (row.reward_score, line.reward) == (3.5, 3.5)
    assert row.extra_fields["reward_extra_info"] == {"score": 1.0, "acc": 1.0, "step_reward": 0.5, "calc_reward": 2.0}


async def test_a_weight_for_a_tool_that_is_not_configured_is_refused_at_the_start(
    config: DictConfig, template: HFChatTemplate, tmp_path: Path
) -> None:
    path = tool_yaml(tmp_path, step_rewards="sum", step_reward_weight={"calculater": 2.0})
    config.actor_rollout_ref.rollout.multi_turn.tool_config_path = path
    async with scripted(template, two_turns("4")) as engine:
        with pytest.raises(
            InstantiationException, match="tool 'calculater' is not configured; did you mean 'calculator'"
        ):
            await v1_session(RawWorker(config, ScriptedServers(engine)))


async def test_a_worker_shows_the_first_of_each_kind_of_failure_and_counts_the_rest(
    config: DictConfig, template: HFChatTemplate, caplog: pytest.LogCaptureFixture
) -> None:
    unknown = CALL.replace("calculator", "calc\\nulator")

    def script(generation_id: GenerationId, _: Any) -> str:
        return unknown if generation_id.turn < 3 else "The answer is 4."

    async with scripted(template, script) as engine:
        worker = RawWorker(config, ScriptedServers(engine))
        for session in range(2):
            await v1_session(worker, session)
    said = [r.getMessage() for r in caplog.records if r.name == "sglang_multiturn.verl_plugin.row_keeping"]
    first, *more = [line for line in said if "unknown_tool" in line]
    assert first.startswith("the first unknown_tool in this worker: request u1-s0-g5, turn 0: calc\\nulator {")
    assert "there is no tool" in first
    assert more == ["2 times unknown_tool in this worker by now", "4 times unknown_tool in this worker by now"]


@pytest.fixture
def forgetful_model(tmp_path: Path, tiny_model: Path) -> Path:
    """The tiny model, with a generation prompt that history does not show: what thinking models do with thinking off."""
    shutil.copytree(tiny_model, model := tmp_path / "model")
    source = (model / "chat_template.jinja").read_text(encoding="utf-8")
    opening = r"{{- '<|im_start|>assistant\n' }}"
    assert source.count(opening) == 1
    opened = source.replace(opening, r"{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}")
    (model / "chat_template.jinja").write_text(opened, encoding="utf-8")
    return model


async def test_a_split_conversation_is_several_rows_under_v1_and_refused_under_v0(
    config: DictConfig, forgetful_model: Path, tmp_path: Path
) -> None:
    config.actor_rollout_ref.model.path = str(forgetful_model)
    config.actor_rollout_ref.rollout.multi_turn.tool_config_path = tool_yaml(tmp_path, history="split")
    template = HFChatTemplate.from_pretrained(forgetful_model)
    assert not template.keeps_history("tool")
    async with scripted(template, two_turns("The answer is 4.")) as engine:
        first, second = await v1_session(RawWorker(config, ScriptedServers(engine)))
        worker = RawWorker(config, ScriptedServers(engine))
        info = {"step": 5, "sample_index": 0, "rollout_n": 0, "validate": False}
        with pytest.raises(ConfigError, match=r"history: split: this trainer takes one row .*trainer.use_v1=true"):
            await worker._run_agent_loop(SAMPLING, info, agent_name="sglang_multiturn", trace=False, **question())
        config.trainer.use_v1 = False
        with pytest.raises(InstantiationException, match="history: split: this trainer takes one row"):
            await v1_session(RawWorker(config, ScriptedServers(engine)))
    (line,) = journal(tmp_path)
    assert [row.prompt_ids for row in line.rows] == [first.prompt_ids, second.prompt_ids]
    assert template.decode(first.response_ids) == CALL
    assert template.decode(second.response_ids) == "The answer is 4."
    assert second.prompt_ids == template.encode_prompt(
        line.messages[:3], ToolRegistry([BrokenTool({}, SHOWN)]).schemas()
    )
    assert (first.reward_score, second.reward_score) == (1.0, 1.0)
    tallies = [row.extra_fields.pop("rollout_tally") for row in (first, second)]
    assert (tallies[0]["rollouts"], tallies[1]) == (1.0, {})  # a conversation is counted once, whatever its rows
    assert first.extra_fields == second.extra_fields
    line.check(end_ids=template.end_ids)


def test_groups_are_counted_and_forgotten() -> None:
    groups = GroupCount(2)
    assert [groups.is_empty_after(uid, kept=kept) for uid, kept in [("a", False), ("b", True), ("a", False)]] == [
        False,
        False,
        True,
    ]
    assert groups.is_empty_after("b", kept=False) is False
    assert (groups.ended, groups.kept) == (Counter(), Counter())


async def test_a_cancelled_conversation_is_cancelled(config: DictConfig, template: HFChatTemplate) -> None:
    engine = scripted(template, lambda _generation_id, _ids: ScriptedTurn(text="never", hang_after=1))
    async with engine:
        servers = ScriptedServers(engine)
        session = asyncio.create_task(v1_session(RawWorker(config, servers)))
        await servers.started.wait()
        session.cancel()
        await engine.abort_all()
        with pytest.raises(asyncio.CancelledError):
            await session


async def test_all_conversations_of_a_worker_share_one_context_and_another_entry_has_its_own(
    config: DictConfig, template: HFChatTemplate, tmp_path: Path
) -> None:
    entries = OmegaConf.load(config.actor_rollout_ref.rollout.agent.agent_loop_config_path)
    short = OmegaConf.merge(entries[0], {"name": "short", "max_assistant_turns": 1})
    OmegaConf.save(OmegaConf.create([entries[0], short]), tmp_path / "two.yaml")
    config.actor_rollout_ref.rollout.agent.agent_loop_config_path = str(tmp_path / "two.yaml")
    async with scripted(template, two_turns("The answer is 4.")) as engine:
        worker = RawWorker(config, ScriptedServers(engine))
        info = {"step": 5, "sample_index": 0, "rollout_n": 0, "validate": False}
        for number, name in enumerate(["sglang_multiturn", "sglang_multiturn", "short"]):
            row = question(f"u{number}") | {"session_id": 0, "global_steps": 5}
            await worker._run_agent_loop(SAMPLING, info, agent_name=name, trace=False, **row)
    assert {line.uid: line.stop_reason.value for line in journal(tmp_path)} == {
        "u0": "answered",
        "u1": "answered",
        "u2": "max_assistant_turns",
    }
    assert len(list((tmp_path / "journal").glob("*.jsonl"))) == 2


async def test_what_a_worker_has_in_flight_is_known_and_written_down(
    config: DictConfig, template: HFChatTemplate, tmp_path: Path
) -> None:
    engine = scripted(template, lambda _generation_id, _ids: ScriptedTurn(text="never", hang_after=1))
    async with engine:
        servers = ScriptedServers(engine)
        session = asyncio.create_task(v1_session(RawWorker(config, servers)))
        await servers.started.wait()
        (context,) = (made for client, made in _CONTEXTS.values() if client is servers)
        assert isinstance(context, WorkerContext)
        assert [(one.request_id, one.state.value, one.spec.step) for one in context.in_flight()] == [
            ("u1-s0-g5", "RUNNING", 5)
        ]
        assert [name for mark in (tmp_path / "journal").glob("*.marks") for name in begun(mark)] == ["u1-s0-g5"]
        session.cancel()
        await engine.abort_all()
        with pytest.raises(asyncio.CancelledError):
            await session
        assert list(context.in_flight()) == []


def begun(marks: Path) -> list[str]:
    return [name for attempt in read_marks(marks) for name in attempt.begun]
