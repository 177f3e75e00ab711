"""What else verl's trainers do with rows, one or two real steps each: `make verl-matrix`.

The engine is scripted, so that every figure that depends on rows alone is known; trainer, workers and FSDP are real.
"""

from __future__ import annotations

import copy
import itertools
import math
import shutil
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

import word_problems  # type: ignore[import-not-found]  # examples/gsm8k_tool
from launch import main_ppo_overrides  # type: ignore[import-not-found]
from scripted_runs import prompt_ids, run_plans, tokenizer
from stop_reasons import END, FIRST, KEPT, PLANNED, SAMPLES, SCHEMA, THOUGHT, call
from training import EXAMPLE, HERE, TINY_MODEL, Run, assert_learned, assert_rows_are_the_journals, train

from sglang_multiturn.request import StopReason

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.matrix,
]

PLANS = ["answered", "tool_stop", "max_assistant_turns", "error"]
"""The last one is dropped: a group of three, under V1."""
ROWS = {True: len(PLANS) * SAMPLES - 1, False: len(PLANS) * SAMPLES}
trainers = pytest.mark.parametrize("v1", [True, False], ids=["v1", "v0"])

FP32 = "{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}"
REFERENCE = [
    f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={len(PLANS) * SAMPLES}",
    "actor_rollout_ref.ref.fsdp_config.use_torch_compile=False",
    f"+actor_rollout_ref.ref.fsdp_config.mixed_precision={FP32}",
]
CRITIC = [
    f"critic.model.path={TINY_MODEL}",
    "critic.strategy=fsdp2",
    "critic.optim.lr=1e-4",
    f"critic.ppo_micro_batch_size_per_gpu={len(PLANS) * SAMPLES}",
    "critic.model.use_remove_padding=False",
    "critic.model.enable_gradient_checkpointing=False",
    "+critic.model.override_config.attn_implementation=sdpa",
    "critic.fsdp.use_torch_compile=False",
    f"+critic.fsdp.mixed_precision={FP32}",
]


def steps_of(folder: Path, *, v1: bool, overrides: Sequence[str], steps: int = 1, **more: Any) -> Run:
    run = run_plans(
        folder,
        more.pop("plans", PLANS),
        v1=v1,
        workers=2,
        steps=steps,
        overrides=["trainer.save_freq=-1", *overrides],
        **more,
    )
    assert_learned(run, steps=steps)
    return run


def forgetful(template: str) -> str:
    """The tiny model's template, but for what stands before the end of a thought in earlier assistant turns."""
    macro = """{%- macro spoken(message, last) -%}
    {{- text(message.content) if last or message.role != 'assistant' else text(message.content).split('</think>\\n\\n')[-1] }}
{%- endmacro %}
"""
    before, loop = template.split("{%- set has_system", 1)
    for said in ("if text(message.content)", "+ text(message.content) }}", "+ text(message.content) + '<|im_end|>"):
        assert loop.count(said) == 1
        loop = loop.replace(said, said.replace("text(message.content)", "spoken(message, loop.last)"))
    return f"{before}{macro}{{%- set has_system{loop}"


def trained(row: dict[str, Any], name: str) -> list[float]:
    """A column at the tokens that the model sampled."""
    return [value for value, mask in zip(row[name], row["response_mask"], strict=True) if mask]


@trainers
def test_a_kl_reference_sees_the_rows_and_counts_in_reward_and_loss(tmp_path: Path, v1: bool) -> None:
    coefficient = 0.5
    run = steps_of(
        tmp_path,
        v1=v1,
        steps=2,
        overrides=[
            *REFERENCE,
            "actor_rollout_ref.actor.use_kl_loss=True",
            "algorithm.use_kl_in_reward=True",
            f"algorithm.kl_ctrl.kl_coef={coefficient}",
            "actor_rollout_ref.actor.optim.lr=1e-3",
        ],
    )
    assert assert_rows_are_the_journals(run) == 2 * (len(PLANS) * SAMPLES - 1)
    moved = 0.0
    for row in run.rows:
        apart = [old - ref for old, ref in zip(row["old_log_probs"], row["ref_log_prob"], strict=True)]
        if row["versions"][0] == 0:  # the reference is the model that training began with
            assert apart == pytest.approx([0.0] * len(apart), abs=1e-5)
        moved = max(moved, *map(abs, apart))
        expected = [
            score - coefficient * difference * mask
            for score, difference, mask in zip(row["token_level_scores"], apart, row["response_mask"], strict=True)
        ]
        assert row["token_level_rewards"] == pytest.approx(expected, abs=1e-5)
    assert moved > 1e-3
    assert run.step(1)["actor/kl_loss"] == pytest.approx(0.0, abs=1e-5)
    assert run.step(2)["actor/kl_loss"] > 0


@trainers
def test_gae_with_a_critic_gives_every_sampled_token_its_rows_score(tmp_path: Path, v1: bool) -> None:
    """With gamma and lambda 1 the return of a token is the score that is still to come, whatever the critic says."""
    run = steps_of(tmp_path, v1=v1, overrides=["algorithm.adv_estimator=gae", *CRITIC])
    assert assert_rows_are_the_journals(run) == len(PLANS) * SAMPLES - 1
    for row in run.rows:
        score = sum(row["token_level_scores"])
        assert trained(row, "returns") == pytest.approx([score] * sum(row["response_mask"]), abs=1e-4)
        assert all(math.isfinite(value) for value in trained(row, "values"))
    assert math.isfinite(run.step(1)["critic/vf_loss"])
    assert run.step(1)["critic/grad_norm"] > 0


@trainers
def test_rows_without_log_probabilities_in_groups_of_one(tmp_path: Path, v1: bool) -> None:
    """GRPO takes the score of a single row for its advantage; a failed one is a prompt without rows under V1."""
    run = steps_of(tmp_path, v1=v1, samples=1, overrides=["actor_rollout_ref.rollout.calculate_log_probs=False"])
    assert len(run.rows) == len(PLANS) - v1
    assert assert_rows_are_the_journals(run, with_logprobs=False) == len(PLANS) - 1
    assert "training/rollout_probs_diff_max" not in run.step(1)
    for row in run.rows:
        score = sum(row["token_level_scores"])
        assert score == (PLANNED if any(row["response_mask"]) else 0)
        assert trained(row, "advantages") == pytest.approx([score] * sum(row["response_mask"]), abs=1e-5)


def test_rloo_compares_the_rows_a_group_has(tmp_path: Path) -> None:
    run = steps_of(tmp_path, v1=True, overrides=["algorithm.adv_estimator=rloo"])
    assert len(run.rows) == ROWS[True]
    kept = sorted([-1 / 6, 0.5, -5 / 6, 0.5])
    """Each score against the mean of the other three, of 0.5, 1, 0, 1."""
    failed = sorted([0.5, -1.0, 0.5])
    """Of 1, 0, 1."""
    groups = run.by_uid(run.rows).values()
    seen = sorted(sorted(row["advantages"][0] for row in group) for group in groups)
    assert seen == [pytest.approx(group, abs=1e-5) for group in sorted([kept, kept, kept, failed])]


def test_reinforce_plus_plus_takes_rows_of_any_number_under_v1(tmp_path: Path) -> None:
    run = steps_of(tmp_path, v1=True, overrides=["algorithm.adv_estimator=reinforce_plus_plus"])
    assert assert_rows_are_the_journals(run) == ROWS[True]
    for row in run.rows:
        score = sum(row["token_level_scores"])
        assert trained(row, "returns") == pytest.approx([score] * sum(row["response_mask"]), abs=1e-5)


def test_remax_under_v0_subtracts_a_greedy_conversations_score(tmp_path: Path) -> None:
    """Five conversations a prompt, one of them greedy; which one's score it has is the script's to say."""
    run = steps_of(tmp_path, v1=False, overrides=["algorithm.adv_estimator=remax"])
    assert len(run.journal) == len(PLANS) * (SAMPLES + 1)
    greedy = [line for line in run.journal.values() if line.request_id not in {row["request_id"] for row in run.rows}]
    assert len(greedy) == len(PLANS)
    for line in greedy:
        group = [row for row in run.rows if run.journal[row["request_id"]].uid == line.uid]
        assert len(group) == SAMPLES
        for row in group:
            advantage = sum(row["token_level_scores"]) - (line.reward or 0.0)
            assert trained(row, "advantages") == pytest.approx([advantage] * sum(row["response_mask"]), abs=1e-5)


def test_the_group_filter_finds_a_row_of_a_group_that_lost_all(tmp_path: Path) -> None:
    """It refuses a group without rows; groups whose scores are all the same are sampled anew, by verl."""
    run = steps_of(
        tmp_path,
        v1=True,
        plans=["answered", "prompt_too_long"],
        overrides=["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=score"],
    )
    assert assert_rows_are_the_journals(run) == SAMPLES
    (left,) = (row for row in run.rows if row["response_mask"] == [0])
    assert run.journal[left["request_id"]].stop_reason is StopReason.PROMPT_TOO_LONG
    assert left["advantages"] == [0.0]


def test_the_overlong_filter_measures_prompts_with_the_whole_schema(tmp_path: Path) -> None:
    """verl's own schema classes drop `examples`, and with them the tokens that make one prompt too long."""
    schema = copy.deepcopy(SCHEMA)
    schema["function"]["parameters"]["properties"]["what"]["examples"] = ["say", "stop", "fail", "break", "hang"]  # type: ignore[index]
    longest = len(prompt_ids("answered", schema=schema))
    assert len(prompt_ids("max_assistant_turns")) < longest < len(prompt_ids("max_assistant_turns", schema=schema))
    run = steps_of(
        tmp_path,
        v1=True,
        plans=["answered", "tool_stop", "max_assistant_turns"],
        schema=schema,
        prompts=2,
        overrides=[
            f"data.max_prompt_length={longest}",
            "data.filter_overlong_prompts=True",
        ],
    )
    asked = {str(line.messages[0].content).split()[1] for line in run.training().values()}
    assert asked == {"answered", "tool_stop"}
    assert max(len(line.prompt_ids) for line in run.training().values()) == longest


def test_history_split_gives_a_session_several_rows_and_one_advantage(tmp_path: Path) -> None:
    """The template leaves a thought out once something follows, so that the second turn begins a row of its own."""
    model = tmp_path / "forgetful_model"
    shutil.copytree(TINY_MODEL, model)
    (model / "chat_template.jinja").write_text(forgetful((model / "chat_template.jinja").read_text()))
    run = steps_of(
        tmp_path, v1=True, plans=["thinks", "answered"], model=model, settings={"history": "split"}, overrides=[]
    )
    assert assert_rows_are_the_journals(run) == 2 * SAMPLES + 1
    by_session = Counter(row["request_id"] for row in run.rows)
    (split,) = (name for name, rows in by_session.items() if rows == 2)
    first, second = (row for row in run.rows if row["request_id"] == split)
    assert tokenizer.decode(first["response"]) == THOUGHT + FIRST + call("say") + END
    assert tokenizer.decode(second["response"]) == "So four." + END
    assert THOUGHT not in tokenizer.decode(second["prompt"])
    for row in (first, second):
        assert trained(row, "advantages") == pytest.approx([KEPT[0]] * sum(row["response_mask"]), abs=1e-5)


def test_lora_reaches_sglang_as_whole_weights(tmp_path: Path) -> None:
    """Real SGLang: after an update of the adapters alone it samples as the trainer does, and no longer as the base model.

    Not to the digit: verl rounds merged weights to bfloat16 on their way (transformer_impl.py:1081).
    """
    train_file, prompts, samples = tmp_path / "train.parquet", 4, 4
    word_problems.write(word_problems.rows(seed=1, count=2 * prompts, split="train"), train_file)
    overrides = main_ppo_overrides(
        model=TINY_MODEL,
        train=train_file,
        heldout=train_file,
        tools=HERE.parents[1] / "tool_configs" / "calculator.yaml",
        reward=EXAMPLE / "reward.py",
        run_dir=tmp_path,
        steps=2,
        seed=1,
    )
    lora = [
        f"data.train_batch_size={prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={prompts * samples}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={prompts * samples}",
        f"actor_rollout_ref.rollout.n={samples}",
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.model.lora_alpha=8",
        "actor_rollout_ref.model.lora.merge=True",
        "actor_rollout_ref.actor.use_kl_loss=True",  # for the reference, which is the model without its adapters
        f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={prompts * samples}",
        "actor_rollout_ref.actor.optim.lr=5e-2",
        "trainer.save_freq=-1",
    ]
    run = train(tmp_path, [*overrides, *lora], v1=True)
    assert_learned(run, steps=2)
    assert assert_rows_are_the_journals(run) == 2 * prompts * samples
    updated = [row for row in run.rows if row["versions"] == [1, 1]]
    assert len(updated) == prompts * samples

    def apart(row: dict[str, Any], name: str) -> list[float]:
        return [abs(old - other) for old, other in zip(trained(row, "old_log_probs"), trained(row, name), strict=True)]

    from_sglang, from_base = (
        statistics.fmean(itertools.chain.from_iterable(apart(row, name) for row in updated))
        for name in ("rollout_log_probs", "ref_log_prob")
    )
    assert from_sglang < 0.01
    assert from_base > 10 * from_sglang
