"""Files a launch names: are they there, and will workers on other nodes find them."""

from __future__ import annotations

import inspect
from pathlib import Path

from sglang_multiturn.config import RolloutConfig, ToolsConfig
from sglang_multiturn.doctor.findings import Findings, note, problem
from sglang_multiturn.doctor.launch import ROLLOUT, Launch
from sglang_multiturn.doctor.subject import Subject
from sglang_multiturn.errors import ConfigError
from sglang_multiturn.rewards import RewardFn, check_weights, counts_tools, load_reward_fn

_FILES = (
    f"{ROLLOUT}.multi_turn.tool_config_path",
    f"{ROLLOUT}.multi_turn.function_tool_path",
    f"{ROLLOUT}.agent.agent_loop_config_path",
    "reward.custom_reward_function.path",
    "data.train_files",
    "data.val_files",
)
_TOLD_ELSEWHERE = (f"{ROLLOUT}.multi_turn.tool_config_path", f"{ROLLOUT}.agent.agent_loop_config_path")
"""Read by checks of their own, which say when they are missing."""
_SCORER_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_OLD_REWARD_KEYS = ("custom_reward_function.path", "reward_model.reward_manager", "reward_model.enable")


def launched_files(launch: Launch) -> list[str]:
    """Every local file the launch names."""
    named = [path for key in _FILES for path in launch.files(key)]
    return [path for path in named if "://" not in path]


def check_paths(subject: Subject, launch: Launch) -> Findings:
    """Files that are missing, and paths that mean something else elsewhere."""
    relative: list[str] = []
    for key in _FILES:
        for path in launch.files(key):
            if "://" in path:
                continue
            if not Path(path).expanduser().exists():
                if key in _TOLD_ELSEWHERE:
                    continue
                yield problem(
                    "launch-path", f"{path} does not exist", "Correct the path; it is read when training starts.", key
                )
            elif not Path(path).expanduser().is_absolute():
                relative.append(f"{key}={path}")
    journal = subject.settings.journal_dir
    if journal is not None and not Path(journal).is_absolute():
        relative.append(f"journal_dir: {journal}")
    model = str(launch.get("actor_rollout_ref.model.path", ""))
    if model.startswith((".", "~")) or (not Path(model).is_absolute() and Path(model).is_dir()):
        relative.append(f"actor_rollout_ref.model.path={model}")
    if relative:
        yield note(
            "launch-relative-path",
            f"relative paths: {'; '.join(relative)}",
            'Write absolute ones ("$PWD/..."): Ray\'s workers may have another working directory, on other nodes always.',
        )


def check_loader(path: str) -> Findings:
    """Whose loader reads the tool YAML in verl's workers."""
    from sglang_multiturn.verl_plugin.compat import is_ours

    if Path(path).is_file() and ToolsConfig.from_yaml(path).tools and not is_ours(path):
        what = "verl's own loader reads this YAML, which drops items, nested properties and defaults from schemas"
        yield note("launch-loader", what, "Add `rollout: {}` to the YAML, and this package reads it.", path)


def load_reward(subject: Subject) -> Findings:
    """The reward function, from --reward or from the launch, and whether it can be called as it will be."""
    reward, name, where = subject.inputs.reward, None, "--reward"
    if reward is None and subject.launch is not None:
        reward, where = subject.launch.get("reward.custom_reward_function.path"), "reward.custom_reward_function"
        name = subject.launch.get("reward.custom_reward_function.name")
        kwargs = subject.launch.get("reward.custom_reward_function.reward_kwargs", {})
    else:
        kwargs = {}
    if reward is None or (where != "--reward" and not Path(reward).is_file()):
        return  # a launch path that is missing is told beside the others
    try:
        subject.reward_fn = load_reward_fn(reward, name, kwargs)
    except ConfigError as error:
        yield problem("reward-function", str(error), "Name a function that is there: file.py:function.", where)
        return
    yield from _signature(subject.reward_fn, where)


def _signature(reward_fn: RewardFn, where: str) -> Findings:
    try:
        inspect.signature(reward_fn).bind(**dict.fromkeys(_SCORER_ARGUMENTS))
    except TypeError as error:
        advice = "Write compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)."
        yield problem("reward-function", f"the reward function cannot be called as it will be: {error}", advice, where)
    except ValueError:  # no signature can be told
        return


def check_reward_weights(subject: Subject) -> Findings:
    """Whether step rewards and `calc_reward`s can be weighed as the settings say."""
    if not subject.tools_complete:
        return  # a tool that could not be loaded would be taken for one that is not configured
    try:
        check_weights(subject.settings, subject.registry.names)
    except ConfigError as error:
        yield problem(
            "reward-weights", str(error), "Correct it under `rollout:` of the tool YAML: no run starts with it."
        )


def check_scoring(launch: Launch, settings: RolloutConfig) -> Findings:
    """Who scores, and what the scorer reads."""
    for key in _OLD_REWARD_KEYS:
        if launch.get(key) is not None:
            what = f"{key} is an old name that main_ppo of verl 0.9.1 does not read"
            yield problem(
                "launch-reward",
                what,
                f"Write reward.{key.replace('reward_model.reward_manager', 'reward_manager.name')}.",
                key,
            )
    manager = launch.get("reward.reward_manager.name")
    if (
        launch.get("reward.reward_model.enable")
        or manager != "naive"
        or launch.get("reward.reward_manager.source") != "register"
    ):
        if counts_tools(settings):
            what = f"step_rewards and calc_rewards cannot be added to what verl's reward model or reward manager {manager!r} say"
            advice = "Set both to off, or use reward.custom_reward_function with the naive manager."
            yield problem("launch-reward", what, advice, "reward")
            return
        what = f"verl scores this run (reward model, or reward manager {manager!r}) from the text of the whole row"
        advice = "Its scorer reads what tools said as the model's words. Use reward.custom_reward_function with the naive manager."
        yield note("launch-reward", what, advice, "reward")
    elif launch.get("reward.custom_reward_function.path") is None and not any(launch.get(k) for k in _OLD_REWARD_KEYS):
        if counts_tools(settings):
            what = "no reward.custom_reward_function: the reward is step_rewards and calc_rewards alone"
            advice = "Right where tools judge the whole; a function of your own would add a score of the model's words."
            yield note("launch-reward", what, advice, "reward.custom_reward_function.path")
            return
        what = "no reward.custom_reward_function: verl scores by the row's data_source, from the text of the whole row"
        advice = (
            "Its scorer reads what tools said as the model's words; give a function of your own to score those alone."
        )
        yield note("launch-reward", what, advice, "reward.custom_reward_function.path")
