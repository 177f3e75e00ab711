"""verl's launch keys: what switches this package on, what fights it, and what nobody reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_multiturn.config import RolloutConfig
from sglang_multiturn.doctor.findings import Findings, note, ok, problem
from sglang_multiturn.doctor.launch import ROLLOUT, Launch, compose
from sglang_multiturn.doctor.subject import Subject
from sglang_multiturn.errors import ConfigError
from sglang_multiturn.verl_plugin.compat import LOOP_CLASS, LOOP_NAME

_ENGINES = frozenset({"sglang", "sglang_cpu"})
_UNREAD = (
    f"{ROLLOUT}.multi_turn.tokenization_sanity_check_mode",
    f"{ROLLOUT}.multi_turn.use_inference_chat_template",
    f"{ROLLOUT}.multi_turn.num_repeat_rollouts",
    f"{ROLLOUT}.over_sample_rate",
    "data.return_raw_chat",
)
"""Keys that nothing in verl 0.9.1's trainers reads (its own older rollout did)."""
_GROUP_ESTIMATORS = frozenset({"grpo", "grpo_passk", "rloo", "gdpo", "opo", "reinforce_plus_plus_baseline"})


def read_launch(subject: Subject) -> Findings:
    """Compose the configuration, and take from it what the command line did not name."""
    subject.launch = launch = compose(subject.inputs.overrides)
    yield ok("launch-override", f"{len(launch.overrides)} overrides were composed with verl's configuration")
    subject.chat_template_kwargs = launch.get("data.apply_chat_template_kwargs", {})


def merge_launch_settings(subject: Subject, launch: Launch) -> Findings:
    """The settings a worker would run with."""
    from sglang_multiturn.verl_plugin.launch import context_reserve, launch_settings

    yaml_settings: RolloutConfig | None = (
        subject.tools_config.rollout if subject.tools_config.model_fields_set else None
    )
    extra = {key: value for key, value in _entry(launch).items() if key != "_target_"}
    longest, model_has = launch.get(f"{ROLLOUT}.max_model_len"), subject.context_tokens
    if longest is not None and model_has is not None and longest > model_has:
        what = f"max_model_len is {longest:,}, the model's max_position_embeddings {model_has:,}: verl's server refuses that"
        yield problem("launch-context", what, "Lower it, or leave it out.", f"{ROLLOUT}.max_model_len")
    longest = longest or model_has
    subject.context_tokens = None if longest is None else int(longest) - context_reserve()
    try:
        subject.settings = launch_settings(launch.config.actor_rollout_ref.rollout, yaml_settings, extra)
    except ConfigError as error:
        yield problem("launch-settings", str(error), "Correct it: a worker would refuse it in its first conversation.")


def _entry(launch: Launch) -> Mapping[str, Any]:
    try:
        return launch.entry or {}
    except ConfigError:  # told with the loop
        return {}


def check_loop(launch: Launch) -> Findings:
    """Whether conversations run in this package at all."""
    key = f"{ROLLOUT}.agent.default_agent_loop"
    name = launch.get(key)
    try:
        entry, is_ours = launch.entry, launch.is_ours
    except ConfigError as error:
        advice = "Write a list of entries, each with name and _target_, or leave the key out."
        yield problem("launch-loop-config", str(error), advice, f"{ROLLOUT}.agent.agent_loop_config_path")
        return
    if not is_ours and entry is None:
        what = f"the default agent loop is {name!r}: this package is not asked for anything"
        yield problem("launch-loop", what, f"Add {key}={LOOP_NAME}.", key)
    elif not is_ours and entry is not None:
        what = f"agent_loop_config_path gives the loop {name!r} the class {entry.get('_target_')!r}"
        yield problem("launch-loop-config", what, f"Write _target_: {LOOP_CLASS}.", key)
    elif launch.loop_entries and entry is None:
        what = f"agent_loop_config_path has no entry named {name!r}, so nothing in it reaches this loop"
        yield note("launch-loop-config", what, f"Name the entry {name!r}, or drop the key.", key)
    else:
        yield ok("launch-loop", f"conversations run in {name!r}", key)


def check_engine(launch: Launch) -> Findings:
    """Engine, mode and log-probabilities."""
    name, mode = launch.get(f"{ROLLOUT}.name"), launch.get(f"{ROLLOUT}.mode")
    if name is None:
        yield problem(
            "launch-engine", "the rollout engine is not named", f"Add {ROLLOUT}.name=sglang.", f"{ROLLOUT}.name"
        )
    elif name not in _ENGINES:
        what = f"the rollout engine is {name!r}; this package is tested with SGLang"
        yield (note if name == "vllm" else problem)(
            "launch-engine", what, f"Set {ROLLOUT}.name=sglang.", f"{ROLLOUT}.name"
        )
    else:
        yield ok("launch-engine", f"the rollout engine is {name}", f"{ROLLOUT}.name")
    if mode != "async":
        what = f"mode is {mode!r}: only async servers hold conversations with tools"
        yield problem("launch-mode", what, f"Set {ROLLOUT}.mode=async, or leave it out.", f"{ROLLOUT}.mode")
    if not launch.get(f"{ROLLOUT}.calculate_log_probs"):
        yield note(
            "launch-log-probs",
            "calculate_log_probs is off: rows carry no log-probabilities of the engine",
            "Leave it on (the default): without them nobody can tell how far engine and trainer are apart.",
            f"{ROLLOUT}.calculate_log_probs",
        )


def check_sampling(launch: Launch) -> Findings:
    """Sampling that training does not know of, and groups of one."""
    top_p, top_k = launch.get(f"{ROLLOUT}.top_p", 1.0), launch.get(f"{ROLLOUT}.top_k", -1)
    temperature, group = launch.get(f"{ROLLOUT}.temperature", 1.0), launch.get(f"{ROLLOUT}.n", 1)
    if top_p < 1 or top_k > 0:
        yield note(
            "launch-sampling",
            f"training samples with top_p={top_p:g}, top_k={top_k}, which cuts the distribution; log-probabilities are "
            "those of the whole one",
            "Leave them at 1 and -1 in training: the trainer's ratios would be those of other samples. val_kwargs may differ.",
            f"{ROLLOUT}.top_p",
        )
    if temperature == 0 and group > 1:
        what = f"temperature is 0 with n={group}: all samples of a prompt are the same, and no advantage is left"
        yield problem("launch-sampling", what, f"Set {ROLLOUT}.temperature=1.", f"{ROLLOUT}.temperature")
    estimator = str(launch.get("algorithm.adv_estimator"))
    if estimator in _GROUP_ESTIMATORS and group == 1:
        what = f"{estimator} compares the samples of a prompt, and n=1 leaves nothing to compare"
        yield problem("launch-group", what, f"Set {ROLLOUT}.n to 4 or more.", f"{ROLLOUT}.n")


def check_multi_turn(launch: Launch, settings: RolloutConfig) -> Findings:
    """Keys of `multi_turn` that are read otherwise than they look, and keys nobody reads."""
    from sglang_multiturn.verl_plugin.launch import multi_turn_defaults

    defaults = multi_turn_defaults()
    for key, ours in (("max_parallel_calls", settings.max_parallel_calls), ("max_tool_response_length", settings.max_tool_result_tokens)):  # fmt: skip
        full = f"{ROLLOUT}.multi_turn.{key}"
        if launch.says(full) and launch.get(full) == defaults[key] and ours != defaults[key]:
            name = {"max_tool_response_length": "max_tool_result_tokens"}.get(key, key)
            what = f"{key}={defaults[key]} is verl's own default, which counts as not said: {name} is {ours} here"
            yield note("launch-default", what, f"Write {name} under `rollout:` of the tool YAML to mean it.", full)
    if launch.get(length := f"{ROLLOUT}.multi_turn.max_tool_response_length") != defaults["max_tool_response_length"]:
        what = f"max_tool_response_length counts characters; it is taken as max_tool_result_tokens={settings.max_tool_result_tokens}"
        yield note("launch-characters", what, "Write max_tool_result_tokens under `rollout:` of the tool YAML.", length)
    for key in _UNREAD:
        if launch.says(key) and not _is_verls_default(key, launch.get(key)):
            yield note("launch-unread", f"{key} is read by nothing in verl 0.9.1", "Drop it.", key)


def _is_verls_default(key: str, value: Any) -> bool:
    return bool(compose([f"{ROLLOUT}.name=sglang"]).get(key) == value)


def check_lengths(subject: Subject, launch: Launch) -> Findings:
    """Budgets against the model's context."""
    prompt, response = launch.get(f"{ROLLOUT}.prompt_length"), launch.get(f"{ROLLOUT}.response_length")
    longest, context = launch.get(f"{ROLLOUT}.max_model_len"), subject.context_tokens
    if context is None:
        return
    if prompt + response > context:
        yield note(
            "launch-context",
            f"prompt_length {prompt:,} and response_length {response:,} are more than the {context:,} tokens that fit "
            f"into the context ({ROLLOUT}.max_model_len{f'={longest}' if longest else ' or the model'}, less a reserve)",
            "Long conversations end as max_model_len: lower the two, or raise the context.",
            f"{ROLLOUT}.max_model_len",
        )
    else:
        yield ok("launch-context", f"prompt_length {prompt:,} + response_length {response:,} fit into the context")


def check_trainer(subject: Subject, launch: Launch) -> Findings:
    """What the chosen trainer cannot do with our rows."""
    v1 = bool(launch.get("trainer.use_v1", True))
    if subject.settings.history == "split" and not v1:
        what = "history: split makes several rows of a conversation, and the V0 trainer takes one"
        yield problem("launch-history", what, "Set trainer.use_v1=True, or history: keep.", "trainer.use_v1")
    if launch.get("algorithm.filter_groups.enable") and not v1:
        what = "algorithm.filter_groups is read by the V1 trainer only"
        yield note("launch-filter", what, "Set trainer.use_v1=True.", "algorithm.filter_groups.enable")


def check_agreement(subject: Subject, launch: Launch) -> Findings:
    """What the command line names and what the launch would use are one thing."""
    inputs = subject.inputs
    asked = {
        "actor_rollout_ref.model.path": ("--model", inputs.model),
        f"{ROLLOUT}.multi_turn.tool_config_path": ("--tools", None if inputs.tools is None else str(inputs.tools)),
    }
    for key, (option, given) in asked.items():
        used = launch.get(key)
        if given is not None and used is not None and not _same(given, str(used)):
            what = f"{option} is {given}, the launch uses {used}"
            yield note("launch-other", what, f"Leave {option} out to look at what will run.", key)
        elif given is not None and used is None:
            what = f"{option} is {given}, and the launch does not name it: it would run without"
            yield problem("launch-tools", what, f"Add {key}={Path(given).absolute()}.", key)


def _same(one: str, other: str) -> bool:
    return one == other or Path(one).expanduser().absolute() == Path(other).expanduser().absolute()
