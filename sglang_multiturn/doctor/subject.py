"""What is examined: what the user named, and what could be made of it so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_multiturn.chat.parsing import ToolCallParser
from sglang_multiturn.config import RolloutConfig, ToolsConfig
from sglang_multiturn.rewards import RewardFn
from sglang_multiturn.schemas import ToolSchema
from sglang_multiturn.tools.registry import ToolRegistry

if TYPE_CHECKING:
    from sglang_multiturn.chat.hf_template import HFChatTemplate
    from sglang_multiturn.doctor.launch import Launch
    from sglang_multiturn.doctor.rows import Row, RowSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the user named on the command line."""

    model: str | None = None
    tools: Path | None = None
    data: tuple[Path, ...] = ()
    reward: str | None = None
    overrides: tuple[str, ...] = ()
    """verl's launch overrides, `key=value` each."""
    row: int = 0
    """Which row's prompt is shown and played."""
    max_rows: int = 2000
    """More rows than these are sampled."""
    run_tools: bool = False
    """Whether the scripted conversation may call the user's own tools and reward function."""
    ray: bool = False


@dataclass(slots=True, kw_only=True)
class Subject:
    """Everything that could be loaded. What could not is None, and what needs it is not looked at."""

    inputs: Inputs
    launch: Launch | None = None
    template: HFChatTemplate | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    context_tokens: int | None = None
    """Prompt and response together, as far as the model's or verl's configuration tells."""
    tools_config: ToolsConfig = field(default_factory=ToolsConfig)
    registry: ToolRegistry = field(default_factory=ToolRegistry)
    tools_complete: bool = True
    """False when the YAML, or a tool in it, could not be loaded: then nothing is said about what is missing."""
    tool_places: Mapping[str, str] = field(default_factory=dict)
    """`file:line` of each tool."""
    reward_fn: RewardFn | None = None
    rows: RowSample | None = None
    settings: RolloutConfig = field(default_factory=RolloutConfig)
    parser: ToolCallParser | None = None

    @property
    def schemas(self) -> list[ToolSchema]:
        """What the model is shown when a row does not choose."""
        return self.registry.schemas(None)

    @property
    def shown_row(self) -> Row | None:
        """The row whose prompt is shown: the one asked for, or the first one that can be read."""
        if self.rows is None:
            return None
        readable = [row for row in self.rows.rows if row.spec is not None]
        asked = [row for row in readable if row.index == self.inputs.row]
        return next(iter(asked or readable), None)
