"""The agent loop that `actor_rollout_ref.rollout.agent.default_agent_loop=sglang_multiturn` names."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase
from verl.utils.rollout_trace import rollout_trace_op

from sglang_multiturn.verl_plugin.rows import RowOutput
from sglang_multiturn.verl_plugin.worker import context_of


class SglangMultiturnAgentLoop(AgentLoopBase):
    """One conversation: a row of the dataset in, rows for training out. All the work is the worker context's."""

    def __init__(
        self,
        trainer_config: Any,
        server_manager: Any,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: Any = None,
        data_config: Any = None,
        hf_model_type: str | None = None,
        tools: Any = None,
        **entry: Any,
    ) -> None:
        """Called by verl for every conversation, with `entry` the extra keys of `agent_loop_config_path`.

        Not `super().__init__`: it builds a tokenizer object that only verl's own loops use, anew for each conversation.

        Raises:
            ConfigError: in the first conversation of a worker, when a setting is wrong.
            TemplateError: there too, when the model's chat template cannot be proved append-only.
        """
        self.tokenizer = tokenizer  # verl's tracing decodes with it, where `rollout.trace.token2text` is set
        self._context = context_of(
            trainer_config.config, server_manager, tokenizer, tools.tools if tools is not None else [], entry
        )

    # verl declares that `run` returns one row, and takes a list as well (agent_loop_tq.py:152).
    @rollout_trace_op  # type: ignore[untyped-decorator]
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[RowOutput] | RowOutput:
        """Run the conversation. Whatever happens in it is data: only a cancellation leaves this method as an error."""
        return await self._context.run(sampling_params, row)
