"""Every setting, with its default and what it means.

Unknown keys are refused with file, line and a suggestion (`yaml_reading`). Names other versions used map to ours in
`RENAMED`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from sglang_multiturn.errors import ConfigError
from sglang_multiturn.request import OVERLONG, Disposition, StopReason
from sglang_multiturn.schemas import ToolSchema
from sglang_multiturn.yaml_reading import YamlPlaces, closest, load_yaml, load_yaml_with_places, validate_config

__all__ = [
    "RENAMED",
    "Counted",
    "Cut",
    "Execution",
    "FailurePolicy",
    "FaultConfig",
    "GroupConfig",
    "OnFailure",
    "Policy",
    "RolloutConfig",
    "ToolConfig",
    "ToolSettings",
    "ToolsConfig",
    "closest",
    "load_yaml",
    "validate_config",
]

Policy = Literal["train", "mask", "drop"]
Execution = Literal["async", "thread", "process", "ray"]
Cut = Literal["left", "middle", "right"]
OnFailure = Literal["tell", "end", "fail"]
Counted = Literal["off", "sum", "last"]

RENAMED: Mapping[str, str] = {"max_turns": "max_assistant_turns", "format": "tool_parser"}
"""Old names of PR #1037 and verl, and the settings they became."""

_PARSER_NAMES = {"chatml": "hermes", "qwen": "hermes", "qwen25": "hermes", "qwen2_5": "hermes"}


class FailurePolicy(BaseModel):
    """What becomes of a conversation when a call of it went wrong, for each way in which it can.

    `tell`: the model reads what was wrong and goes on. `end`: the conversation ends as `too_many_errors`, and is judged
    as it stands. `fail`: it ends FAILED, and the setting `failed` says what becomes of it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    malformed: OnFailure = "tell"
    """The call does not parse, or the turn ended inside it."""
    unknown_tool: OnFailure = "tell"
    invalid_arguments: OnFailure = "tell"
    """The arguments break the tool's schema."""
    tool_error: OnFailure = "tell"
    """The tool raised ToolError, after its retries."""
    timeout: OnFailure = "tell"
    """The tool did not answer in time, after its retries."""
    died: OnFailure = "tell"
    """The tool's process died, or was killed for what it did, after its retries."""
    raised: OnFailure = "fail"
    """The tool raised anything else, or broke its contract."""


class RolloutConfig(BaseModel):
    """How conversations run: the `rollout:` part of a tool YAML."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    old_names: ClassVar[Mapping[str, str]] = RENAMED

    max_assistant_turns: int | None = Field(default=16, ge=1)
    """A turn is one generation."""
    max_user_turns: int | None = Field(default=None, ge=1)
    """Answers of a user or an environment, the prompt not counted."""
    max_tool_turns: int | None = Field(default=None, ge=1)
    """Assistant turns that are followed by tool answers."""
    max_response_tokens: int = Field(default=2048, ge=1)
    """Budget of the whole conversation after the prompt: sampled, tool and boundary tokens together."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Most tokens one generation may sample."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """A longer prompt ends as `prompt_too_long`; it is never cut."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Prompt and response together; None takes the engine's own."""

    tool_parser: str = "auto"
    """`hermes` (Qwen's format too), the name of an SGLang parser, or `auto`."""
    max_parallel_calls: int = Field(default=16, ge=1)
    """Calls of one turn that are made; the rest is answered with an error, never dropped."""
    max_tool_result_tokens: int = Field(default=1024, ge=8)
    """Longer answers are cut, and the cut is marked in the text."""
    tool_result_cut: Cut = "middle"
    """Where a long answer loses text."""
    max_errors_in_a_row: int = Field(default=5, ge=1)
    """Turns in a row in which every call went wrong before the rollout ends as `too_many_errors`."""
    on_failure: FailurePolicy = Field(default_factory=FailurePolicy)
    """What becomes of a conversation when a call of it went wrong, for each way in which it can."""

    tool_timeout_s: float | None = Field(default=60.0, gt=0)
    """One create, execute or calc_reward, of tools that say no `timeout_s` of their own."""
    release_timeout_s: float = Field(default=10.0, gt=0)
    """One release; a tool that is slower is left behind, logged and counted."""
    reward_timeout_s: float | None = Field(default=60.0, gt=0)
    """One call of the reward function."""
    rollout_timeout_s: float | None = Field(default=1800.0, gt=0)
    """The whole conversation, waiting for tools included, but not while it is suspended or the engine that it waits for is paused.

    What it has by then is kept.
    """
    history: Literal["keep", "split"] = "keep"
    """Where a template renders earlier turns otherwise once something follows (Qwen3 strips thoughts): `keep` goes on
    with the tokens as they were; `split` ends the row and starts another with the conversation rendered anew."""
    drift_check: Literal["off", "count", "warn", "fail"] = "count"
    """Compare the tokens of a finished conversation with what the template renders of its messages."""
    engine_retries: int = Field(default=1, ge=0)
    """How often a generation that the engine failed or aborted by itself is asked again."""

    max_staleness: int | None = Field(default=None, ge=0)
    """Standalone only: how many weight versions the oldest token may be behind the weights now serving; None is no limit."""
    stale: Literal["train", "mask", "drop", "restart"] = "train"
    """Standalone only: rollouts with older tokens. `mask` clears those tokens, `restart` begins anew what was suspended."""

    overlong: Policy = "train"
    """Rollouts that ran into a limit of turns or tokens."""
    timeout: Policy = "drop"
    """Rollouts that `rollout_timeout_s` ended."""
    failed: Literal["drop", "mask"] = "drop"
    """FAILED, ABORTED and too long prompts."""
    failed_rows: Literal["drop", "mask"] = "drop"
    """verl only: `mask` keeps one masked row for what would be dropped, under the V1 trainer too."""
    score_weight: float = 1.0
    """The reward is the weighted sum of three: what the reward function says, ..."""
    step_rewards: Counted = "off"
    """... what `execute` returned call by call (all of them, or the last alone), ..."""
    step_reward_weight: float | dict[str, float] = 1.0
    """One weight, or one for each tool by name; 0 for a tool that is not named."""
    calc_rewards: Counted = "off"
    """... and what `calc_reward` said at the end (of all tools, or of the one that was created last alone)."""
    calc_reward_weight: float | dict[str, float] = 1.0
    """One weight, or one for each tool by name; 0 for a tool that is not named."""

    max_concurrent: int = Field(default=256, ge=1)
    """Standalone only: conversations running at the same time."""
    max_tokens_in_flight: int | None = Field(default=None, ge=1)
    """Standalone only: tokens of all generations at the same time, input and expected ones; None takes the engine's room."""
    max_failed_fraction: float = Field(default=0.5, gt=0, le=1)
    """Standalone only: stop when more than this part of a batch FAILED (of 16 or more)."""
    validation_figures: bool = True
    """verl only: tool calls, failures and lengths of validation rollouts in verl's validation metrics."""
    journal_dir: str | None = None
    """verl only: every finished trajectory is written to a JSONL file in this folder, one file a worker."""
    journal_fsync: bool = False
    """Whether a trajectory is on the disk before anyone is told of it, so that it outlives a power cut too."""

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        renamed = {RENAMED.get(key, key): value for key, value in values.items()}
        if isinstance(parser := renamed.get("tool_parser"), str):
            renamed["tool_parser"] = _PARSER_NAMES.get(parser, parser)
        for key in ("drift_check", "step_rewards", "calc_rewards"):
            if renamed.get(key) is False:
                renamed[key] = "off"  # which YAML reads as false
        return renamed

    def disposition(self, stop_reason: StopReason) -> Disposition:
        """What becomes of a rollout that ended so."""
        if stop_reason in OVERLONG:
            return Disposition(self.overlong)
        if stop_reason is StopReason.TIMEOUT:
            return Disposition(self.timeout)
        if stop_reason in (StopReason.ERROR, StopReason.ABORTED, StopReason.PROMPT_TOO_LONG):
            return Disposition(self.failed)
        return Disposition.TRAIN


class GroupConfig(BaseModel):
    """How batches of groups are made for a trainer; standalone only."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    samples_per_group: int = Field(default=8, ge=1)
    """Rollouts of each prompt."""
    groups_per_batch: int = Field(default=16, ge=1)
    """Groups a batch is given with, as soon as so many are complete."""
    over_sampling_groups: int = Field(default=0, ge=0)
    """Groups that run beyond those needed, so that none has to wait for the slowest."""
    filter: Literal["none", "no_variance"] = "none"
    """Groups that are replaced by another prompt's: `no_variance` are those whose rewards do not differ."""
    max_refills: int | None = Field(default=None, ge=0)
    """Groups replaced for one batch before it is given up; None is ten times `groups_per_batch`."""
    rest: Literal["abort", "carry"] = "abort"
    """What still runs once enough groups are complete: ended, or set aside to go on with the next batch's weights."""
    order: Literal["input", "longest_first"] = "input"
    """`longest_first` starts those prompts first whose earlier rollouts were the longest."""
    look_ahead_groups: int | None = Field(default=None, ge=1)
    """`longest_first`: among how many prompts; None is as many as one batch starts."""

    @property
    def groups_at_once(self) -> int:
        """Groups that run or are complete at the same time."""
        return self.groups_per_batch + self.over_sampling_groups

    @property
    def most_refills(self) -> int:
        """`max_refills` with its default."""
        return 10 * self.groups_per_batch if self.max_refills is None else self.max_refills

    @model_validator(mode="after")
    def _make_sense(self) -> Self:
        if self.filter == "no_variance" and self.samples_per_group < 2:
            raise ValueError(
                "filter 'no_variance' needs samples_per_group of at least 2: a single reward never differs"
            )
        if self.look_ahead_groups is not None and self.order == "input":
            raise ValueError(
                "look_ahead_groups has no effect on order 'input'; write order: longest_first, or leave it out"
            )
        return self


class FaultConfig(BaseModel):
    """Faults to put into a tool's calls, to see what a run makes of them. Never in validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    latency_s: float = Field(default=0.0, ge=0)
    """Every call waits this long before it is made."""
    error_rate: float = Field(default=0.0, ge=0, le=1)
    """Part of the calls that end with a ToolError and never reach the tool."""
    hang_rate: float = Field(default=0.0, ge=0, le=1)
    """Part of the calls that never return; their timeout ends them."""
    seed: int = 0
    """The same seed, request and call give the same fault."""

    @model_validator(mode="after")
    def _add_up(self) -> Self:
        if self.error_rate + self.hang_rate > 1:
            raise ValueError("error_rate and hang_rate are parts of all calls and together at most 1")
        return self


class ToolSettings(BaseModel):
    """How calls of one tool are made: all keys of a `tools:` entry but the three that say what the tool is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    execution: Execution = "async"
    """`async`: on the event loop of all conversations. `thread`: each call in a thread of its own, for code that blocks.
    `process`: one process a conversation, killed with its children when it hangs. `ray`: such processes on a Ray node."""
    instance_scope: Literal["conversation", "call"] = "conversation"
    """`call` makes and releases an instance around every call, as verl 0.5 and later do."""
    timeout_s: float | None = Field(default=None, gt=0)
    """One create, execute or calc_reward; None takes `tool_timeout_s` of `rollout:`. Waiting for a slot does not count."""
    retries: int = Field(default=0, ge=0)
    """How often a call is made again after a ToolError, a timeout or a dead process."""
    retry_backoff_s: float = Field(default=0.5, ge=0)
    """Longest wait before the first retry; doubled for each further one. The wait is random below it."""
    max_concurrent: int | None = Field(default=None, ge=1)
    """Calls at the same time in the whole run, whatever the number of worker processes."""
    max_per_s: float | None = Field(default=None, gt=0)
    """Calls begun a second in the whole run, whatever the number of worker processes."""
    max_calls: int | None = Field(default=None, ge=1)
    """Calls a conversation; further ones are refused with a sentence for the model."""
    stop_after_call: bool = False
    """The conversation is over once this tool has answered (stop_reason `tool_stop`)."""
    max_result_tokens: int | None = Field(default=None, ge=8)
    """Longer answers are cut, and the cut is marked; None takes `max_tool_result_tokens` of `rollout:`."""
    result_cut: Cut | None = None
    """Where a long answer loses text; None takes `tool_result_cut` of `rollout:`."""
    max_memory_mb: int = Field(default=2048, ge=64)
    """`process` and `ray`: memory of a conversation's process and its children; beyond it they are killed."""
    max_processes: int = Field(default=64, ge=1)
    """`process` and `ray`: processes of one conversation's call; beyond it they are killed."""
    ray_options: dict[str, Any] = Field(default_factory=dict)
    """`ray`: options of the actor that holds the processes (num_cpus, resources, ...)."""
    faults: FaultConfig | None = None
    """Faults to put into this tool's calls."""


class ToolConfig(ToolSettings):
    """One entry of `tools:`; these three keys are those of PR #1037 and of verl."""

    class_name: str
    """Import path of a BaseTool subclass."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Handed to the tool's constructor as it stands."""
    tool_schema: ToolSchema | None = None
    """What the model is shown; None when the class brings its own."""


class ToolsConfig(BaseModel):
    """A whole tool YAML."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tools: list[ToolConfig] = Field(default_factory=list)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    _places: YamlPlaces | None = PrivateAttr(default=None)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Read a tool YAML. Raises ConfigError with file, line, key and a suggestion."""
        config, places = load_yaml_with_places(Path(path), cls)
        _refuse_idle_settings(config, places)
        config._places = places
        return config

    def place(self, *keys: str | int, otherwise: str) -> str:
        """`file:line` of a key, as `place("tools", 0, "class_name", ...)`; `otherwise` if this was read from no file."""
        return otherwise if self._places is None else self._places.of(*keys)


def _refuse_idle_settings(config: ToolsConfig, places: YamlPlaces) -> None:
    """Raises ConfigError for a setting that another one makes idle: whoever wrote it expects it to do something."""
    idle = []
    for index, entry in enumerate(config.tools):
        own_processes, here = entry.execution in ("process", "ray"), f"has no effect on `execution: {entry.execution}`"
        elsewhere = f"{here}; write `execution: process` or `ray`"
        conditions = {
            "max_memory_mb": (own_processes, elsewhere),
            "max_processes": (own_processes, elsewhere),
            "ray_options": (entry.execution == "ray", f"{here}; write `execution: ray`"),
            "retry_backoff_s": (entry.retries > 0, "has no effect without retries; write `retries: 2`"),
        }
        for key, (works, said) in conditions.items():
            if key in entry.model_fields_set and not works:
                place = places.of("tools", index, key)
                idle.append(f"{place}: {f'tools.{index}.{key}'!r} {said}, or leave the key out")
    if idle:
        raise ConfigError("\n".join(idle))
