"""What a rollout is worth: every number by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_multiturn import RolloutConfig, RolloutEngine, ScriptedEngine, ToolRegistry
from sglang_multiturn.config import ToolsConfig, validate_config
from sglang_multiturn.errors import ConfigError, RewardError
from sglang_multiturn.rewards import check_weights, combine, reward_parts
from sglang_multiturn.trajectory import CallOutcome, Rewards, ToolCallRecord

from support import TEMPLATE, RecordingTool, call, context, roll

OK, TIMEOUT, SKIPPED = CallOutcome.OK, CallOutcome.TIMEOUT, CallOutcome.SKIPPED


def record(name: str, reward: float = 0.0, outcome: CallOutcome = OK, turn: int = 0) -> ToolCallRecord:
    return ToolCallRecord(
        call_id=f"call{turn:02d}000", turn=turn, name=name, arguments={}, outcome=outcome, answer="", reward=reward
    )


CALLS = (record("search", 0.5), record("run", 2.0), record("search", 4.0), record("run", outcome=TIMEOUT))
CALC = {"run": 8.0, "search": 16.0}


def reward(config: RolloutConfig, score: float | None = 1.0, *, scored: bool = True) -> float | None:
    return combined(config, score, scored=scored).reward


def combined(config: RolloutConfig, score: float | None = 1.0, *, scored: bool = True) -> Rewards:
    return combine(config, score=score, calls=CALLS, calc_rewards=CALC, calc_errors={}, extra={}, scored=scored)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 1.0),
        ({"score_weight": 0.25}, 0.25),
        ({"step_rewards": "sum"}, 1.0 + 6.5),
        ({"step_rewards": "last"}, 1.0 + 4.0),
        ({"step_rewards": "sum", "step_reward_weight": 0.5}, 1.0 + 3.25),
        ({"step_rewards": "sum", "step_reward_weight": {"search": 2.0}}, 1.0 + 9.0),
        ({"step_rewards": "sum", "step_reward_weight": {"search": 2.0, "run": -1.0}}, 1.0 + 7.0),
        ({"step_rewards": "last", "step_reward_weight": {"run": 2.0}}, 1.0),
        ({"calc_rewards": "sum"}, 1.0 + 24.0),
        ({"calc_rewards": "last"}, 1.0 + 16.0),
        ({"calc_rewards": "sum", "calc_reward_weight": {"run": 0.5}}, 1.0 + 4.0),
        ({"calc_rewards": "last", "calc_reward_weight": {"run": 0.5}}, 1.0),
        ({"score_weight": 2.0, "step_rewards": "last", "calc_rewards": "sum", "calc_reward_weight": 0.5}, 18.0),
    ],
)
def test_the_reward_is_the_weighted_sum_of_what_counts(settings: dict[str, Any], expected: float) -> None:
    assert reward(RolloutConfig(**settings)) == expected


def test_the_last_step_reward_is_that_of_the_last_call_that_returned() -> None:
    """Call 3 timed out, so that call 2 is the last, whatever it is worth."""
    config = RolloutConfig(step_rewards="last")
    assert reward_parts(config, score=None, calls=CALLS, calc_rewards={}).steps == (0.0, 0.0, 4.0, 0.0)
    worthless = (record("run", 2.0), record("run", 0.0), record("run", outcome=SKIPPED))
    assert reward_parts(config, score=None, calls=worthless, calc_rewards={}).steps == (0.0, 0.0, 0.0)
    assert reward_parts(config, score=None, calls=(), calc_rewards={}).steps == ()


def test_without_a_score_the_tools_alone_make_the_reward_and_without_either_there_is_none() -> None:
    assert reward(RolloutConfig(), None) is None
    assert reward(RolloutConfig(step_rewards="sum"), None) == 6.5
    assert reward(RolloutConfig(calc_rewards="last"), None) == 16.0
    assert reward(RolloutConfig(), 0.0) == 0.0


def test_a_rollout_that_is_not_to_be_scored_has_its_numbers_and_no_reward() -> None:
    rewards = combined(RolloutConfig(step_rewards="sum"), None, scored=False)
    assert rewards == Rewards(tool_rewards=(0.5, 2.0, 4.0, 0.0), calc_rewards=CALC)


def test_what_does_not_count_is_kept_as_it_was() -> None:
    rewards = combined(RolloutConfig(step_rewards="last", step_reward_weight=0.5))
    assert rewards == Rewards(reward=3.0, score=1.0, tool_rewards=(0.5, 2.0, 4.0, 0.0), calc_rewards=CALC)


@given(rewards=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), order=st.randoms(use_true_random=False))
def test_the_sum_does_not_depend_on_the_order(rewards: list[float], order: Any) -> None:
    config = RolloutConfig(step_rewards="sum")

    def total(values: list[float]) -> float | None:
        calls = [record("t", value) for value in values]
        return combine(config, score=0.1, calls=calls, calc_rewards={}, calc_errors={}, extra={}, scored=True).reward

    shuffled = list(rewards)
    order.shuffle(shuffled)
    assert total(shuffled) == total(rewards)


@pytest.mark.parametrize("rewards", [(1e308, 1e308), (1e200, -1e200)])
def test_rewards_that_cannot_be_added_up_are_an_error(rewards: tuple[float, float]) -> None:
    calls = [record("t", value) for value in rewards]
    config = RolloutConfig(step_rewards="sum", step_reward_weight=1e200)
    with pytest.raises(RewardError, match="too large to be added up"):
        combine(config, score=1.0, calls=calls, calc_rewards={}, calc_errors={}, extra={}, scored=True)


# What is refused at the start


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"step_rewards": "sum", "step_reward_weight": {"serch": 1.0}},
            "step_reward_weight: tool 'serch' is not configured; did you mean 'search'?",
        ),
        (
            {"calc_rewards": "last", "calc_reward_weight": {"x": 1.0}},
            "calc_reward_weight: tool 'x' is not configured; known: run, search",
        ),
        (
            {"step_reward_weight": 0.5},
            "step_reward_weight is set and step_rewards is not, so nothing would count; "
            "add step_rewards: sum, last or off",
        ),
        (
            {"calc_reward_weight": {"run": 0.5}},
            "calc_reward_weight is set and calc_rewards is not, so nothing would count; "
            "add calc_rewards: sum, last or off",
        ),
    ],
)
def test_a_weight_that_cannot_be_meant_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_weights(RolloutConfig(**settings), ("search", "run"))
    assert str(caught.value) == said


@pytest.mark.parametrize("name", ["score_weight", "step_reward_weight", "calc_reward_weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_is_finite(name: str, value: float) -> None:
    with pytest.raises(ConfigError):
        check_weights(RolloutConfig(step_rewards="sum", calc_rewards="sum", **{name: value}), ())


def test_weights_of_configured_tools_and_an_explicit_off_are_fine() -> None:
    check_weights(RolloutConfig(step_rewards="off", step_reward_weight=0.5), ())
    check_weights(RolloutConfig(step_rewards="sum", step_reward_weight={"run": 0.5}), ("run",))


async def test_a_weight_of_an_unknown_tool_stops_a_run_before_it_starts() -> None:
    config = RolloutConfig(step_rewards="sum", step_reward_weight={"ecko": 1.0})
    async with ScriptedEngine.playing(TEMPLATE, {"r": ["x"]}) as engine:
        with pytest.raises(ConfigError, match="tool 'ecko' is not configured; did you mean 'echo'"):
            context(engine, [RecordingTool()], config)
        with pytest.raises(ConfigError, match="tool 'ecko' is not configured"):
            RolloutEngine(engine, template=TEMPLATE, tools=ToolRegistry([RecordingTool()]), config=config)


def test_the_old_weight_is_no_key_any_more_and_the_message_says_what_is() -> None:
    with pytest.raises(ConfigError, match="unknown key 'tool_reward_weight'; did you mean 'step_reward_weight'"):
        validate_config({"tool_reward_weight": 0.5}, RolloutConfig, "x")


def test_off_may_be_written_without_quotes(tmp_path: Path) -> None:
    """YAML reads a bare `off` as false."""
    path = tmp_path / "tools.yaml"
    path.write_text("rollout: {step_rewards: off, calc_rewards: off}\n")
    rollout = ToolsConfig.from_yaml(path).rollout
    assert (rollout.step_rewards, rollout.calc_rewards) == ("off", "off")


# Through whole conversations


class Paying(RecordingTool):
    """Pays for each call what the model asks for."""

    async def answer(self, parameters: dict[str, Any]) -> Any:
        return "paid", parameters["much"], {}


async def test_step_rewards_and_calc_rewards_of_a_conversation_by_hand() -> None:
    turns = [call("a", much=1.0) + call("b", much=2.0), call("a", much=4.0) + call("nope"), "done"]
    weights = {"step_reward_weight": {"a": 0.5, "b": 0.25}, "calc_reward_weight": {"a": 8.0}}
    config = RolloutConfig(score_weight=2.0, step_rewards="sum", calc_rewards="sum", **weights)
    trajectory = await roll(turns, [Paying("a"), Paying("b")], config, reward_fn=lambda **_: 3.0)
    assert trajectory.rewards == Rewards(
        reward=2.0 * 3.0 + (0.5 * 1.0 + 0.25 * 2.0 + 0.5 * 4.0) + 8.0 * 0.25,
        score=3.0,
        tool_rewards=(1.0, 2.0, 4.0, 0.0),
        calc_rewards={"a": 0.25, "b": 0.25},
    )


async def test_the_last_of_a_conversation_by_hand() -> None:
    turns = [call("b", much=1.0), call("a", much=4.0) + call("b", much=2.0), call("nope"), "done"]
    config = RolloutConfig(step_rewards="last", calc_rewards="last", calc_reward_weight={"a": 8.0})
    trajectory = await roll(turns, [Paying("a"), Paying("b")], config)
    assert list(trajectory.rewards.calc_rewards) == ["b", "a"]
    assert trajectory.reward == 2.0 + 8.0 * 0.25


async def test_a_dropped_conversation_has_no_reward() -> None:
    config = RolloutConfig(step_rewards="sum", max_prompt_tokens=1)
    assert (await roll(["never"], [RecordingTool()], config)).reward is None
    mostly = RolloutConfig(step_rewards="sum", max_assistant_turns=2, overlong="drop")
    trajectory = await roll([call("echo")] * 2, [RecordingTool()], mostly)
    assert (trajectory.rewards.tool_rewards, trajectory.reward) == ((0.5,), None)
