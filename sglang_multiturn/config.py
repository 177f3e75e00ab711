"""Every setting, with its default and what it means; and how a YAML becomes them.

Unknown keys are refused with file, line and a suggestion. Names other versions used map to ours in `RENAMED`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sglang_multiturn.errors import ConfigError
from sglang_multiturn.request import OVERLONG, Disposition, StopReason
from sglang_multiturn.schemas import ToolSchema

Policy = Literal["train", "mask", "drop"]

RENAMED: Mapping[str, str] = {"max_turns": "max_assistant_turns", "format": "tool_parser"}
"""Old names of PR #1037 and verl, and the settings they became."""

_PARSER_NAMES = {"chatml": "hermes", "qwen": "hermes", "qwen25": "hermes", "qwen2_5": "hermes"}


class RolloutConfig(BaseModel):
    """How conversations run: the `rollout:` part of a tool YAML."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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
    tool_result_cut: Literal["left", "middle", "right"] = "middle"
    """Where a long answer loses text."""
    max_errors_in_a_row: int = Field(default=5, ge=1)
    """Turns in a row in which every call went wrong before the rollout ends as `too_many_errors`."""

    tool_timeout_s: float | None = Field(default=60.0, gt=0)
    """One create, execute or calc_reward."""
    release_timeout_s: float = Field(default=10.0, gt=0)
    """One release; a tool that is slower is left behind, logged and counted."""
    reward_timeout_s: float | None = Field(default=60.0, gt=0)
    """One call of the reward function."""
    rollout_timeout_s: float | None = Field(default=1800.0, gt=0)
    """The whole conversation, waiting for tools included; what it has by then is kept."""
    history: Literal["keep", "split"] = "keep"
    """Where a template renders earlier turns otherwise once something follows (Qwen3 strips thoughts): `keep` goes on
    with the tokens as they were; `split` ends the row and starts another with the conversation rendered anew."""
    drift_check: Literal["off", "count", "warn", "fail"] = "count"
    """Compare the tokens of a finished conversation with what the template renders of its messages."""
    engine_retries: int = Field(default=1, ge=0)
    """How often a generation that the engine failed or aborted by itself is asked again."""

    overlong: Policy = "train"
    """Rollouts that ran into a limit of turns or tokens."""
    timeout: Policy = "drop"
    """Rollouts that `rollout_timeout_s` ended."""
    failed: Literal["drop", "mask"] = "drop"
    """FAILED, ABORTED and too long prompts."""
    failed_rows: Literal["drop", "mask"] = "drop"
    """verl only: `mask` keeps one masked row for what would be dropped, under the V1 trainer too."""
    calc_reward_weight: float = 0.0
    """The reward is the score plus this times the sum of all tools' `calc_reward`."""
    tool_reward_weight: float = 0.0
    """The reward is the score plus this times the sum of all step rewards."""

    max_concurrent: int = Field(default=256, ge=1)
    """Standalone only: conversations running at the same time."""
    max_failed_fraction: float = Field(default=0.5, gt=0, le=1)
    """Standalone only: stop when more than this part of a batch FAILED (of 16 or more)."""
    journal_dir: str | None = None
    """verl only: every finished trajectory is written to a JSONL file in this folder, one file a worker."""

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        renamed = {RENAMED.get(key, key): value for key, value in values.items()}
        if isinstance(parser := renamed.get("tool_parser"), str):
            renamed["tool_parser"] = _PARSER_NAMES.get(parser, parser)
        if renamed.get("drift_check") is False:
            renamed["drift_check"] = "off"  # which YAML reads as false
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


class ToolConfig(BaseModel):
    """One entry of `tools:`; the three keys are those of PR #1037 and of verl."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Read a tool YAML. Raises ConfigError with file, line, key and a suggestion."""
        return load_yaml(Path(path), cls)


Model = TypeVar("Model", bound=BaseModel)


def load_yaml(path: Path, model: type[Model]) -> Model:
    """Read a YAML file as `model`.

    Raises:
        ConfigError: the file is missing, is no YAML, or a key or value in it is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a YAML file") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: expected a mapping at the top, got {type(data).__name__}")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(error, model, path, node)) from error


def validate_config(values: Mapping[str, Any], model: type[Model], source: str) -> Model:
    """A mapping from anywhere else (a launch config, keyword arguments) as `model`. Raises ConfigError."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(_explain(error, model, source, None)) from error


def closest(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` or the list of what is known: the tail of many error messages."""
    known = sorted(known)
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else f"; known: {', '.join(known) or 'none'}"


def _explain(error: ValidationError, model: type[BaseModel], source: str | Path, node: yaml.Node | None) -> str:
    sentences = []
    for one in error.errors():
        loc = tuple(one["loc"])
        where = ".".join(map(str, loc))
        line = None if node is None else _line(node, loc)
        place = f"{source}:{line}" if line else str(source)
        if one["type"] == "extra_forbidden":
            fields = set(_model_at(model, loc[:-1]).model_fields) | ({*RENAMED} if loc[:-1] == ("rollout",) else set())
            sentences.append(f"{place}: unknown key {where!r}{closest(str(loc[-1]), fields)}")
        elif one["type"] == "missing":
            sentences.append(f"{place}: {where!r} is missing")
        else:
            sentences.append(f"{place}: {where!r}: {one['msg']}, got {one['input']!r}")
    return "\n".join(sentences)


def _line(node: yaml.Node, loc: tuple[Any, ...]) -> int:
    """The line of the deepest part of `loc` that stands in the file, from 1."""
    line = node.start_mark.line
    for part in loc:
        if isinstance(node, yaml.MappingNode):
            found = next(((k, v) for k, v in node.value if k.value == part), None)
            if found is None:
                break
            key, node = found
            line = key.start_mark.line
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line
        else:
            break
    return line + 1


def _model_at(model: type[BaseModel], loc: tuple[Any, ...]) -> type[BaseModel]:
    """The model whose key stands at `loc`."""
    known: dict[Any, type[BaseModel]] = {"tools": ToolConfig, "rollout": RolloutConfig}
    for part in loc:
        model = known.get(part, model)
    return model
