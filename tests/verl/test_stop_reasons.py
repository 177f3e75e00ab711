"""The rows of every stop reason, through real steps of verl's V1 and V0 trainers, with 1, 2 and 8 workers.

The engine is scripted, all else is real. Batches do not divide by the number of workers under V1, groups keep different
numbers of rows, and one loses all of them. Validation runs before and during training.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

from scripted_runs import VALIDATION, VALIDATION_SAMPLES, prompt_ids, run_plans, tokenizer
from stop_reasons import END, KEPT, MAX_PROMPT_TOKENS, OTHERS, PLANNED, PLANS, SAMPLES, WHOLE_GROUP, Plan, logprob_of
from training import Run, assert_same_step, resumed_from

from sglang_multiturn.request import StopReason
from sglang_multiturn.trajectory import Trajectory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # whole training runs, on whatever is left of two cores

IN_EVERY_SUITE = {("v1", 2), ("v0", 1)}
CELLS = [(trainer, workers) for trainer in ("v1", "v0") for workers in (1, 2, 8)]
WHOLE_MATRIX = bool(os.environ.get("VERL_MATRIX"))
STEPS = 2
FIGURES = {
    "v1": [
        "trainer.v1.sampler.custom_sampler.path=pkg://sglang_multiturn.verl_plugin.step_metrics",
        "trainer.v1.sampler.custom_sampler.name=replay_buffer",
    ],
    "v0": [
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=sglang_multiturn.verl_plugin.step_metrics.CountingManager"
    ],
}
"""What makes verl log what rollouts came to."""

DROPPED = (0.5773503, -1.1547005, 0.5773503)
"""Of the three that are left, which scored 1, 0, 1."""
SCORED_ZERO = (0.0, 0.8660254, -0.8660254, 0.8660254)
"""Of a group whose first row is masked and counts as 0."""


@pytest.fixture(
    scope="module",
    params=[cell for cell in CELLS if WHOLE_MATRIX or cell in IN_EVERY_SUITE],
    ids=lambda cell: f"{cell[0]}-{cell[1]}-workers",
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_cell(tmp_path_factory.mktemp("run"), *request.param)


def run_cell(folder: Path, trainer: str, workers: int, more: Sequence[str] = ()) -> Run:
    v1 = trainer == "v1"
    # Half of the cells validate exactly as they train.
    same = "actor_rollout_ref.rollout.val_kwargs.temperature=" + ("1.0" if workers == 2 else "0.5")
    return run_plans(
        folder,
        plans_of(v1),
        v1=v1,
        workers=workers,
        steps=STEPS,
        overrides=[
            *(same, *FIGURES[trainer], "trainer.val_before_train=True", "trainer.test_freq=1"),
            *("trainer.save_freq=1", "actor_rollout_ref.actor.optim.lr=1e-3", *more),
        ],
    )


def plans_of(v1: bool) -> list[str]:
    return [name for name, plan in PLANS.items() if v1 or plan.v0]


def plan_of(trajectory: Trajectory) -> str:
    return str(trajectory.messages[0].content).split()[1]


def plays_the_plan(trajectory: Trajectory) -> bool:
    """Rather than to answer with a fixed score."""
    return plan_of(trajectory) in WHOLE_GROUP or not any(
        message.content == f"score {score}" for message, score in itertools.product(trajectory.messages[1:2], {*OTHERS})
    )


def expected_tokens(plan: Plan) -> tuple[list[int], list[int], list[float]]:
    """Ids, mask and log-probabilities of a plan's row, from its text."""
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    assert plan.row is not None
    turn = 0
    for trained, text in plan.row:
        some = tokenizer.encode(text, add_special_tokens=False)
        if plan.sampled_tokens is not None:
            some += tokenizer.encode("x") * (plan.sampled_tokens - len(some))
        sampled = trained or plan.sampled_tokens is not None  # masked by a policy, and sampled all the same
        ids += some
        mask += [trained] * len(some)
        logprobs += [logprob_of(turn) if sampled else 0.0] * len(some)
        turn += trained
    return ids, mask, logprobs


def steps_of(run: Run, plan: str) -> list[list[dict[str, Any]]]:
    """The rows of the plan's group in each step, the plan's own first and the others by their scores as in OTHERS."""
    groups = run.by_uid(run.rows).values()
    own = [group for group in groups if plan_of(run.journal[group[0]["request_id"]]) == plan]
    return [sorted(group, key=lambda row: not plays_the_plan(run.journal[row["request_id"]])) for group in own]


@pytest.mark.parametrize("name", PLANS)
def test_the_row_of_every_stop_reason_is_what_was_said(run: Run, name: str) -> None:
    plan = PLANS[name]
    if not (run.v1 or plan.v0):
        pytest.skip("V0 keeps a masked row for every failure")
    lines = [line for line in run.training().values() if plan_of(line) == name and plays_the_plan(line)]
    assert [line.stop_reason for line in lines] == [plan.stop_reason] * STEPS * (SAMPLES if name in WHOLE_GROUP else 1)
    rows = {row["request_id"]: row for row in run.rows}
    mine = [rows[line.request_id] for line in lines if line.request_id in rows]
    if plan.row is None and run.v1:
        assert mine == []
        return
    assert len(mine) == len(lines)
    for row in mine:
        ids, mask, logprobs = ([tokenizer.eos_token_id], [0], [0.0]) if plan.row is None else expected_tokens(plan)
        assert row["response"] == ids, tokenizer.decode(row["response"])
        assert row["response_mask"] == mask
        assert row["rollout_log_probs"] == logprobs
        assert row["prompt"] == prompt_ids(name)[-MAX_PROMPT_TOKENS:]
        scored = plan.row is not None and plan.row[0][1] != END
        assert row["token_level_scores"] == [0.0] * (len(ids) - 1) + [PLANNED if scored else 0.0]


@pytest.mark.parametrize("name", PLANS)
def test_a_groups_advantages_are_those_of_the_rows_it_has(run: Run, name: str) -> None:
    plan = PLANS[name]
    if not (run.v1 or plan.v0):
        pytest.skip("V0 keeps a masked row for every failure")
    if name in WHOLE_GROUP:
        expected: tuple[float, ...] = () if run.v1 else (0.0,) * SAMPLES
    elif plan.row is None:
        expected = DROPPED if run.v1 else SCORED_ZERO
    else:
        expected = SCORED_ZERO if plan.row[0][1] == END else KEPT
    groups = steps_of(run, name)
    assert len(groups) == (STEPS if expected else 0)
    for group in groups:
        assert len(group) == len(expected)
        own = len(expected) - len(OTHERS)
        assert sorted(row["advantages"][0] for row in group[own:]) == pytest.approx(sorted(expected[own:]), abs=1e-5)
        for row, advantage in zip(group[:own], expected[:own], strict=True):
            trained = [advantage * mask for mask in row["response_mask"]]
            assert row["advantages"] == pytest.approx(trained, abs=1e-5)


def test_every_conversation_is_journalled_once_and_sound(run: Run) -> None:
    prompts = len(plans_of(run.v1))
    assert len(run.training()) == prompts * SAMPLES * STEPS
    reached = {line.stop_reason for line in run.journal.values()}
    unreachable = {StopReason.USER_STOP, StopReason.ENVIRONMENT_DONE, StopReason.MAX_USER_TURNS}
    assert reached == set(StopReason) - unreachable
    for line in run.journal.values():
        line.check()
        assert line.metrics.tool_instances_created == line.metrics.tool_instances_released


def test_the_trainer_used_as_many_rows_as_were_kept(run: Run) -> None:
    kept = sum(plan.row is not None for name, plan in PLANS.items() if run.v1 or plan.v0)
    others = (len(plans_of(run.v1)) - len(WHOLE_GROUP)) * len(OTHERS)
    everything = len(plans_of(run.v1)) * SAMPLES
    assert len(run.rows) == STEPS * (kept + others if run.v1 else everything)


def test_all_rows_have_the_same_fields_and_integer_versions(run: Run) -> None:
    assert len({tuple(row["fields"]) for row in run.rows}) == 1
    assert {"stop_reason", "request_id", "tool_rewards", "calc_rewards"} <= set(run.rows[0]["fields"])
    for row in run.rows:
        oldest, newest = row["versions"]
        assert type(oldest) is type(newest) is int
        assert oldest == newest
        assert 0 <= oldest < STEPS
    assert [row["versions"][0] for row in run.rows] == sorted(row["versions"][0] for row in run.rows)


def test_verl_logs_what_these_rows_say(run: Run) -> None:
    scores = [sum(row["token_level_scores"]) for row in run.rows]
    per_step = len(scores) // STEPS
    for step in range(1, STEPS + 1):
        logged = run.step(step)
        assert logged["critic/score/mean"] == pytest.approx(sum(scores[:per_step]) / per_step)
        assert math.isfinite(logged["actor/pg_loss"])
        assert logged["actor/grad_norm"] > 0


def test_validation_is_kept_apart_and_its_figures_are_those_of_its_rows(run: Run) -> None:
    """Two conversations a prompt score 0.5 and 1; of `val_error` one fails and the other scores 1."""
    validation = [line for line in run.journal.values() if line.validate]
    assert len(validation) == len(VALIDATION) * VALIDATION_SAMPLES * (STEPS + 1)
    assert {line.data_source for line in validation} == set(VALIDATION.values())
    assert {line.data_source for line in run.training().values()} == {"plans"}
    for step in range(STEPS + 1):
        logged = run.step(step)
        for plan in ("answered", "tool_stop", "max_response_tokens"):
            assert logged[f"val-core/val_{plan}/acc/mean@{VALIDATION_SAMPLES}"] == 0.75
        assert logged[f"val-core/val_error/acc/mean@{VALIDATION_SAMPLES}"] == 0.5
        assert logged[f"val-aux/val_error/failed/mean@{VALIDATION_SAMPLES}"] == 0.5
        assert logged[f"val-aux/val_answered/tool_calls/mean@{VALIDATION_SAMPLES}"] == 0.5


def test_verl_logs_what_every_rollout_came_to(run: Run) -> None:
    """Under V1 what is dropped is told with its worker's next row, which the last ones of a run do not have."""
    prefix = "rollout/" if run.v1 else "timing_s/rollout/"
    told = [run.step(step) for step in range(1, STEPS + 1)]
    counted = [logged[f"{prefix}rollouts_total"] for logged in told]
    everything = len(run.training())
    assert all(logged[f"{prefix}turns/mean"] > 1 for logged in told)
    if run.v1:
        untold = everything - sum(counted)
        assert 0 <= untold <= 1 + SAMPLES  # `timeout`, and the prompt that was too long
    else:
        assert counted == [everything / STEPS] * STEPS
        ended = [line.stop_reason for line in run.training().values()]
        for reason in (StopReason.ANSWERED, StopReason.TIMEOUT, StopReason.ERROR):
            assert told[0][f"{prefix}stop_reason/{reason}"] == pytest.approx(ended.count(reason) / everything)


def test_a_resumed_run_takes_the_step_that_the_uninterrupted_one_took(
    run: Run, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    cell = request.node.callspec.params["run"]
    if cell != ("v1", 2):
        pytest.skip("once; test_resume_training.py resumes V0 as well")
    # It validates before it goes on, as `val_before_train` says.
    resumed = run_cell(tmp_path, *cell, resumed_from(run.folder, step=STEPS - 1))
    assert len(resumed.training()) == len(run.training()) / STEPS
    assert_same_step(run, resumed, step=STEPS)
