"""Batches of groups: over-sampling, filtering, what becomes of the rest. A token takes a second of virtual time."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tools.virtual_time import run_virtual

from sglang_multiturn import (
    Disposition,
    GenerationId,
    RequestSpec,
    RolloutConfig,
    RolloutEngine,
    ScriptedEngine,
    ScriptedTurn,
    StopReason,
    ToolRegistry,
    Trajectory,
    read_trajectories,
)
from sglang_multiturn.config import GroupConfig
from sglang_multiturn.errors import BatchFailedError, EngineDiedError
from sglang_multiturn.groups.group import Batch, FilterReason, Group, aged
from sglang_multiturn.groups.prompts import PromptQueue
from sglang_multiturn.groups.sampler import GroupSampler
from sglang_multiturn.journal import JournalWriter

from support import TEMPLATE, FailingTool, HangingTool, RecordingTool, call, spec, tokens

Script = Callable[[GenerationId, Any], ScriptedTurn | str]


def prompts(count: int) -> list[RequestSpec]:
    return [spec(f"r{i}", uid=f"u{i}", input_index=i) for i in range(count)]


def taking(seconds: Mapping[str, int]) -> Script:
    """Each rollout answers after so many seconds; 2 where nothing is said."""
    return lambda generation_id, _: "x" * (seconds.get(generation_id.request_id, 2) - 1)


class Setting:
    """A rollout engine on a script, in virtual time."""

    def __init__(
        self,
        script: Script,
        tools: Sequence[RecordingTool] = (),
        rewards: Mapping[str, float] | None = None,
        journal: JournalWriter | None = None,
        **config: Any,
    ) -> None:
        self.engine = ScriptedEngine(TEMPLATE, script, token_s=1.0)
        self._rewards = rewards or {}
        self.rollouts = RolloutEngine(
            self.engine,
            template=TEMPLATE,
            tools=ToolRegistry(tools),
            config=RolloutConfig(**config),
            reward_fn=self._score,
            journal=journal,
        )

    async def _score(self, *_: Any, extra_info: Mapping[str, Any], **__: Any) -> float:
        name = str(extra_info["request_id"])
        return self._rewards.get(name, float(name.endswith("-0")))

    def sample(
        self,
        asked: Iterable[RequestSpec],
        steps: int,
        *,
        keep: Callable[[Group], bool] | None = None,
        **config: Any,
    ) -> list[Batch]:
        """So many batches, with new weights after each."""

        async def train() -> list[Batch]:
            batches = []
            groups = GroupConfig(**{"samples_per_group": 2, "groups_per_batch": 2, **config})
            async with self.rollouts, GroupSampler(self.rollouts, asked, groups, keep=keep) as sampler:
                for step in range(1, steps + 1):
                    batches.append(await sampler.next_batch())
                    async with self.rollouts.suspended():
                        await self.engine.update_weights([], weight_version=step)
            return batches

        return run_virtual(train())


def names(batch: Batch) -> list[list[str]]:
    return [[trajectory.request_id for trajectory in group.trajectories] for group in batch.groups]


def uids(batch: Batch) -> list[str]:
    return [group.uid for group in batch.groups]


# -- whole batches -------------------------------------------------------------------------------------------------------


def test_a_batch_has_its_groups_in_the_order_of_the_prompts_and_every_sample() -> None:
    setting = Setting(taking({"r0-1": 9, "r1-0": 5}))
    first, second = setting.sample(prompts(9), 2)
    assert names(first) == [["r0-0", "r0-1"], ["r1-0", "r1-1"]]
    assert names(second) == [["r2-0", "r2-1"], ["r3-0", "r3-1"]]
    assert [first.counts.wait_s, second.counts.wait_s] == [9.0, 2.0]
    assert (first.counts.started, first.counts.trained, first.counts.aborted, first.counts.trained_tokens) == (
        2,
        2,
        0,
        18,
    )
    assert [[t.step for t in batch.trajectories] for batch in (first, second)] == [[1] * 4, [2] * 4]
    assert [t.input_index for t in first.trajectories] == [0, 1, 2, 3]


def test_a_prompt_that_comes_again_gets_names_of_its_own() -> None:
    first, second = Setting(taking({})).sample(itertools.cycle(prompts(2)), 2)
    assert (uids(first), uids(second)) == (["u0", "u1"], ["u0.1", "u1.1"])
    assert names(second) == [["r0.1-0", "r0.1-1"], ["r1.1-0", "r1.1-1"]]
    assert [group.prompt.uid for group in second.groups] == ["u0", "u1"]


def test_prompts_that_run_out_leave_a_smaller_batch_and_then_an_empty_one() -> None:
    batches = Setting(taking({})).sample(prompts(3), 3)
    assert [uids(batch) for batch in batches] == [["u0", "u1"], ["u2"], []]


def test_batches_can_be_iterated_over_until_the_prompts_run_out() -> None:
    async def train() -> list[list[str]]:
        setting = Setting(taking({}))
        config = GroupConfig(samples_per_group=1, groups_per_batch=2)
        async with setting.rollouts, GroupSampler(setting.rollouts, prompts(5), config) as sampler:
            return [uids(batch) async for batch in sampler]

    assert run_virtual(train()) == [["u0", "u1"], ["u2", "u3"], ["u4"]]


# -- over-sampling -------------------------------------------------------------------------------------------------------


def test_a_batch_does_not_wait_for_the_slowest_which_are_aborted(tmp_path: Path) -> None:
    with JournalWriter(tmp_path / "t.jsonl") as journal:
        setting = Setting(taking({"r0-0": 50, "r1-0": 4, "r2-1": 5}), journal=journal)
        (batch,) = setting.sample(prompts(9), 1, over_sampling_groups=1)
    assert uids(batch) == ["u1", "u2"]
    assert [prompt.uid for prompt in batch.aborted] == ["u0"]
    assert (batch.counts.wait_s, batch.counts.aborted, batch.counts.aborted_tokens) == (5.0, 1, 5 + 2)
    written = {t.request_id: t for t in read_trajectories(tmp_path / "t.jsonl")}
    assert sorted(written) == ["r0-0", "r0-1", "r1-0", "r1-1", "r2-0", "r2-1"]
    assert written["r0-0"].stop_reason is StopReason.ABORTED
    assert len(written["r0-0"].response_ids) == 5  # what it had sampled when it was aborted


def test_of_groups_that_are_complete_at_the_same_moment_the_first_are_taken() -> None:
    (batch,) = Setting(taking({})).sample(prompts(9), 1, over_sampling_groups=3)
    assert uids(batch) == ["u0", "u1"]
    assert [prompt.uid for prompt in batch.aborted] == ["u2", "u3", "u4"]
    assert (batch.counts.completed, batch.counts.aborted) == (5, 3)


def test_what_had_not_begun_is_aborted_without_a_trace(tmp_path: Path) -> None:
    with JournalWriter(tmp_path / "t.jsonl") as journal:
        setting = Setting(taking({}), journal=journal, max_concurrent=4)
        first, second = setting.sample(prompts(9), 2, over_sampling_groups=1)
    assert (uids(first), [prompt.uid for prompt in first.aborted]) == (["u0", "u1"], ["u2"])
    assert (uids(second), first.counts.aborted_tokens) == (["u3", "u4"], 0)
    assert "u2" not in {t.uid for t in read_trajectories(tmp_path / "t.jsonl")}


def test_a_reward_that_takes_long_holds_nobody_up() -> None:
    class SlowScore(Setting):
        async def _score(self, *_: Any, extra_info: Mapping[str, Any], **__: Any) -> float:
            await asyncio.sleep(40 if extra_info["request_id"] == "r0-0" else 0)
            return 1.0

    first, second = SlowScore(taking({})).sample(prompts(9), 2, over_sampling_groups=1)
    assert (uids(first), uids(second)) == (["u1", "u2"], ["u3", "u4"])
    assert [first.counts.wait_s, second.counts.wait_s] == [2.0, 2.0]


def test_aborted_conversations_are_over_before_the_next_batch_is_asked_for() -> None:
    async def train() -> tuple[Any, ...]:
        setting = Setting(taking({"r0-0": 50}))
        config = GroupConfig(samples_per_group=2, groups_per_batch=1, over_sampling_groups=1)
        async with setting.rollouts, GroupSampler(setting.rollouts, prompts(9), config) as sampler:
            await sampler.next_batch()
            await asyncio.sleep(0.001)
            return setting.rollouts.in_flight()

    assert run_virtual(train()) == ()


def test_what_still_fails_of_an_aborted_group_does_not_count_against_the_next_batch() -> None:
    class Failing(Setting):
        async def _score(self, *_: Any, extra_info: Mapping[str, Any], **__: Any) -> float:
            if extra_info["request_id"].startswith("r0-"):
                await asyncio.sleep(5)
                raise RuntimeError("the judge was switched off")
            return 1.0

    setting = Failing(taking({f"r{i}-{n}": 9 for i in (2, 3) for n in range(16)}))
    config = {"samples_per_group": 16, "groups_per_batch": 1, "over_sampling_groups": 1}
    assert [uids(batch) for batch in setting.sample(prompts(9), 2, **config)] == [["u1"], ["u2"]]


# -- carrying over -------------------------------------------------------------------------------------------------------


def test_what_is_carried_over_goes_on_where_it_was_with_the_new_weights(tmp_path: Path) -> None:
    with JournalWriter(tmp_path / "t.jsonl") as journal:
        setting = Setting(taking({"r0-0": 7, "r1-0": 4, "r2-1": 5}), journal=journal)
        first, second = setting.sample(prompts(9), 2, over_sampling_groups=1, rest="carry")
    assert (uids(first), first.carried, first.counts.aborted) == (["u1", "u2"], ("u0",), 0)
    assert (uids(second), second.carried) == (["u0", "u3"], ("u4",))
    assert [first.counts.wait_s, second.counts.wait_s] == [5.0, 2.0]  # two of its seven seconds were left
    (carried, sibling) = second.groups[0].trajectories
    assert carried.response_weight_versions == [0] * 5 + [1] * 2
    assert carried.response_ids == tokens("xxxxxx<|im_end|>")
    assert (sibling.response_weight_versions, sibling.step) == ([0, 0], 1)  # it was kept, not made again
    written = [t.request_id for t in read_trajectories(tmp_path / "t.jsonl")]
    assert len(written) == len(set(written)) == 10


def test_complete_groups_that_were_not_needed_are_the_first_of_the_next_batch() -> None:
    first, second = Setting(taking({})).sample(prompts(9), 2, over_sampling_groups=3, rest="carry")
    assert (uids(first), first.carried) == (["u0", "u1"], ("u2", "u3", "u4"))
    assert (uids(second), second.counts.wait_s) == (["u2", "u3"], 0.0)
    assert (second.counts.completed, second.counts.started) == (0, 0)


def test_what_was_carried_over_stays_suspended_through_a_weight_update() -> None:
    async def train() -> list[str]:
        setting = Setting(taking({"r0-0": 50}))
        config = GroupConfig(samples_per_group=2, groups_per_batch=1, over_sampling_groups=1, rest="carry")
        async with setting.rollouts, GroupSampler(setting.rollouts, prompts(9), config) as sampler:
            await sampler.next_batch()
            async with setting.rollouts.suspended():
                await setting.engine.update_weights([], weight_version=1)
            await asyncio.sleep(1000)  # training
            return [f"{request.request_id} {request.state}" for request in setting.rollouts.in_flight()]

    assert run_virtual(train()) == ["r0-0 SUSPENDED"]


def test_a_cancelled_call_goes_on_with_the_same_batch_and_between_batches_nothing_is_begun() -> None:
    async def train() -> tuple[int, int]:
        setting = Setting(taking({"r0": 50}), max_concurrent=1)
        config = GroupConfig(samples_per_group=1, groups_per_batch=1, over_sampling_groups=2, rest="carry")
        async with setting.rollouts, GroupSampler(setting.rollouts, prompts(9), config) as sampler:
            waiting = asyncio.create_task(sampler.next_batch())
            await asyncio.sleep(1)
            waiting.cancel()
            await asyncio.wait([waiting])
            first = await sampler.next_batch()  # goes on with the same batch
            await asyncio.sleep(1000)
            return first.step, len(setting.rollouts.in_flight())

    assert run_virtual(train()) == (1, 0)


@pytest.mark.parametrize(
    ("stale", "mask", "disposition"),
    [
        ("train", [1, 1], Disposition.TRAIN),
        ("mask", [0, 0], Disposition.TRAIN),
        ("drop", [1, 1], Disposition.DROP),
        ("restart", [1, 1], Disposition.DROP),
    ],
)
def test_a_rollout_that_ended_for_an_earlier_batch_grows_stale(
    stale: Any, mask: list[int], disposition: Disposition
) -> None:
    (batch,) = Setting(taking({})).sample(prompts(1), 1)
    config = RolloutConfig(max_staleness=1, stale=stale)
    ended = batch.trajectories[0]  # with version 0
    assert aged(ended, config, 1) is ended
    old = aged(ended, config, 2)
    assert (old.response_mask, old.disposition) == (mask, disposition)
    assert aged(ended, RolloutConfig(stale=stale), 2) is ended
    assert aged(dataclasses.replace(ended, validate=True), config, 2).disposition is Disposition.TRAIN


def test_a_carried_group_whose_rollouts_have_become_too_old_is_replaced() -> None:
    setting = Setting(taking({"r0-0": 5}), max_staleness=1, stale="drop")
    batches = setting.sample(prompts(9), 3, groups_per_batch=1, over_sampling_groups=1, rest="carry")
    assert [uids(batch) for batch in batches] == [["u1"], ["u2"], ["u3"]]
    assert [(f.group.uid, f.reason, f.group.step) for f in batches[2].filtered] == [("u0", FilterReason.TOO_FEW, 1)]
    assert [t.disposition for t in batches[2].filtered[0].group.trajectories] == [Disposition.DROP] * 2


# -- filtering -----------------------------------------------------------------------------------------------------------


def test_groups_without_variance_are_replaced() -> None:
    rewards = {"r0-0": 1.0, "r0-1": 1.0, "r2-0": 0.0}
    (batch,) = Setting(taking({}), rewards=rewards).sample(prompts(9), 1, filter="no_variance")
    assert uids(batch) == ["u1", "u3"]
    assert [(f.group.uid, f.reason, f.group.rewards) for f in batch.filtered] == [
        ("u0", FilterReason.NO_VARIANCE, (1.0, 1.0)),
        ("u2", FilterReason.NO_VARIANCE, (0.0, 0.0)),
    ]
    assert (batch.counts.started, batch.counts.refilled, batch.counts.filtered, batch.counts.filtered_tokens) == (
        4,
        2,
        2,
        8,
    )
    assert batch.counts.wait_s == 6.0


def test_rewards_that_differ_by_rounding_alone_do_not_differ() -> None:
    rewards = {"r0-0": 0.1 + 0.2, "r0-1": 0.3}
    (batch,) = Setting(taking({}), rewards=rewards).sample(prompts(9), 1, filter="no_variance")
    assert [f.group.uid for f in batch.filtered] == ["u0"]


def test_a_function_of_the_users_own_decides_after_the_configured_filter() -> None:
    asked = []

    def keep(group: Group) -> bool:
        asked.append(group.uid)
        return group.uid != "u1"

    rewards = {"r0-0": 0.0}
    (batch,) = Setting(taking({}), rewards=rewards).sample(prompts(9), 1, keep=keep, filter="no_variance")
    assert uids(batch) == ["u2", "u3"]
    assert [(f.group.uid, f.reason) for f in batch.filtered] == [
        ("u0", FilterReason.NO_VARIANCE),
        ("u1", FilterReason.REJECTED),
    ]
    assert asked == ["u1", "u2", "u3"]


def test_dropped_rollouts_take_no_part_and_a_group_with_one_left_is_replaced() -> None:
    def script(generation_id: GenerationId, _: Any) -> str:
        broken = generation_id.request_id in ("r0-1", "r1-0", "r1-2")
        return call("echo") if broken and generation_id.turn == 0 else "x"

    setting = Setting(script, [FailingTool(RuntimeError("boom"))], rewards={"r0-0": 1.0, "r0-2": 0.0})
    (batch,) = setting.sample(prompts(9), 1, samples_per_group=3)
    assert uids(batch) == ["u0", "u2"]
    first = batch.groups[0]
    assert [t.disposition for t in first.trajectories] == [Disposition.TRAIN, Disposition.DROP, Disposition.TRAIN]
    assert ([t.sample_index for t in first.kept], first.rewards) == ([0, 2], (1.0, 0.0))
    assert [t.request_id for t in batch.trajectories] == ["r0-0", "r0-2", "r2-0", "r2-1", "r2-2"]
    assert [(f.group.uid, f.reason) for f in batch.filtered] == [("u1", FilterReason.TOO_FEW)]
    assert batch.counts.dropped_rollouts == 1


def test_a_single_sample_is_a_whole_group() -> None:
    (batch,) = Setting(taking({})).sample(prompts(9), 1, samples_per_group=1)
    assert names(batch) == [["r0"], ["r1"]]


def test_too_many_replaced_groups_end_in_an_error_that_says_what_the_rewards_were() -> None:
    setting = Setting(taking({}), rewards={f"r{i}-{n}": 0.5 for i in range(1, 20) for n in range(2)})
    with pytest.raises(BatchFailedError) as caught:
        setting.sample(prompts(20), 1, filter="no_variance", max_refills=3)
    said = str(caught.value)
    assert said.startswith(
        "batch 1: 4 groups were filtered (4 no_variance) and 3 replaced, as many as max_refills allows"
    )
    assert "of 2 groups 1 are complete or run" in said
    assert said.endswith("no_variance: uid u4: rewards 0.5, 0.5")


def test_a_margin_that_is_left_is_used_before_the_limit_on_refills_is_an_error() -> None:
    rewards = {f"r{i}-{n}": 0.0 for i in (0, 1) for n in range(2)}
    setting = Setting(taking({}), rewards=rewards)
    (batch,) = setting.sample(prompts(9), 1, filter="no_variance", max_refills=0, over_sampling_groups=2)
    assert (uids(batch), batch.counts.refilled) == (["u2", "u3"], 0)


# -- the end -------------------------------------------------------------------------------------------------------------


def test_leaving_ends_everything_and_releases_every_tool(tmp_path: Path) -> None:
    hanging = HangingTool()

    def script(generation_id: GenerationId, _: Any) -> str:
        return call("echo") if generation_id.request_id in ("r0-0", "r2-1") else "x" * 200

    with JournalWriter(tmp_path / "t.jsonl") as journal:
        setting = Setting(script, [hanging], journal=journal, tool_timeout_s=None, rollout_timeout_s=None)
        (batch,) = setting.sample(prompts(9), 1, over_sampling_groups=2, rest="carry")
    assert batch.carried == ("u0", "u2")
    ended = {t.request_id: t.stop_reason for t in read_trajectories(tmp_path / "t.jsonl")}
    assert [name for name, reason in ended.items() if reason is StopReason.ABORTED] == ["r0-0", "r2-1"]
    assert hanging.verbs.count("create") == hanging.verbs.count("release") == 2


def test_totals_add_up_once_everything_has_ended() -> None:
    async def train() -> Any:
        setting = Setting(taking({"r0-0": 50}))
        config = GroupConfig(samples_per_group=2, groups_per_batch=1, over_sampling_groups=1, rest="carry")
        async with setting.rollouts, GroupSampler(setting.rollouts, prompts(9), config) as sampler:
            await sampler.next_batch()
            await sampler.next_batch()
            during = sampler.totals
        return during, sampler.totals

    during, after = run_virtual(train())
    assert (during.started, during.trained, during.aborted, during.carried) == (3, 2, 0, 1)
    assert (after.started, after.trained, after.aborted, after.carried) == (3, 2, 1, 0)
    assert after.aborted_tokens == 4 + 2  # r0-0 was suspended twice, after two seconds each time


def test_a_dead_engine_is_told_of() -> None:
    def script(generation_id: GenerationId, _: Any) -> ScriptedTurn | str:
        dead = generation_id.request_id == "r1-0"
        return ScriptedTurn(error=EngineDiedError("killed by signal 9")) if dead else "x"

    with pytest.raises(EngineDiedError, match="killed by signal 9"):
        Setting(script).sample(prompts(9), 1)


def test_a_batch_that_mostly_fails_says_why() -> None:
    setting = Setting(lambda *_: call("echo"), [FailingTool(RuntimeError("no index"))])
    with pytest.raises(BatchFailedError, match=r"16x RuntimeError, for example r\d"):
        setting.sample(prompts(40), 1, groups_per_batch=12)


def test_what_cannot_be_written_down_ends_the_batch_with_its_own_error(tmp_path: Path) -> None:
    class FullDisk(JournalWriter):
        def write(self, trajectory: Trajectory) -> None:
            raise OSError(28, "No space left on device")

    with FullDisk(tmp_path / "t.jsonl") as journal, pytest.raises(OSError, match="No space left"):
        Setting(taking({}), journal=journal).sample(prompts(9), 1)


# -- order and settings --------------------------------------------------------------------------------------------------


def test_prompts_whose_earlier_rollouts_were_long_come_first_within_the_window() -> None:
    asked = prompts(7)
    queue = PromptQueue(asked, look_ahead=4)
    for uid, length in (("u1", 10), ("u1", 30), ("u2", 5), ("u3", 90), ("u6", 50)):
        queue.note_length(uid, length)
    taken = [queue.take() for _ in range(8)]
    # u0 is not known and counts as the average, which is 37; of the second window u6 is the longest.
    assert [prompt and prompt.uid for prompt in taken] == ["u3", "u0", "u1", "u2", "u6", "u4", "u5", None]


def test_a_second_epoch_starts_with_what_took_longest_in_the_first() -> None:
    setting = Setting(taking({"r2-0": 9, "r1-1": 5}), max_concurrent=2)
    batches = setting.sample(itertools.cycle(prompts(4)), 4, order="longest_first", look_ahead_groups=4)
    assert [uids(batch) for batch in batches] == [["u0", "u1"], ["u2", "u3"], ["u2.1", "u1.1"], ["u0.1", "u3.1"]]


def test_what_was_aborted_counts_as_long_as_it_had_become() -> None:
    setting = Setting(taking({"r0-0": 5, "r0-1": 3, "r1-0": 90, "r1-1": 90}))
    batches = setting.sample(itertools.cycle(prompts(3)), 2, over_sampling_groups=1, order="longest_first")
    assert [uids(batch) for batch in batches] == [["u0", "u2"], ["u1.1", "u0.1"]]  # 5, 4 and 2 tokens on average


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"filter": "no_variance", "samples_per_group": 1}, "a single reward never differs"),
        ({"look_ahead_groups": 4}, "has no effect on order 'input'"),
        ({"groups_per_batches": 4}, "Extra inputs are not permitted"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(said)):
        GroupConfig(**given)


def test_the_program_in_the_documents_prints_what_they_say() -> None:
    blocks = re.search(r"```python\n(.*?)```\n```\n(.*?)```", Path("docs/async.md").read_text("utf-8"), re.DOTALL)
    assert blocks is not None
    done = subprocess.run([sys.executable, "-c", blocks[1]], capture_output=True, text=True, check=True)
    assert done.stdout == blocks[2]
