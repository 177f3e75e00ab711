"""What many conversations share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_multiturn.chat.drift import DriftLog
from sglang_multiturn.chat.parsing import ToolCallParser
from sglang_multiturn.chat.template import ChatTemplate
from sglang_multiturn.config import RolloutConfig
from sglang_multiturn.conversation.history import check_template
from sglang_multiturn.engine.base import Generator
from sglang_multiturn.interactions.base import Interaction
from sglang_multiturn.rewards import RewardFn, check_weights
from sglang_multiturn.tools.registry import ToolRegistry
from sglang_multiturn.tools.runtime import ToolRuntime


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """What a conversation needs and many share."""

    generator: Generator
    template: ChatTemplate
    tools: ToolRegistry
    parser: ToolCallParser
    config: RolloutConfig
    max_model_len: int
    reward_fn: RewardFn | None = None
    interaction: Interaction | None = None
    drift_log: DriftLog = field(default_factory=DriftLog)
    weight_version: Callable[[], int | None] = lambda: None
    """Of the weights now serving, where someone knows."""
    tool_runtime: ToolRuntime | None = None
    """What the tools run in; None makes one of `tools`. Whoever gives one closes it."""

    def __post_init__(self) -> None:
        """Raises ConfigError: a reward's weight is wrong; TemplateError: the template cannot show what tools or users say."""
        check_weights(self.config, self.tools.names)
        if self.tool_runtime is None:
            object.__setattr__(self, "tool_runtime", ToolRuntime(self.tools, self.config))
        check_template(self.template, self.tools, self.interaction)
