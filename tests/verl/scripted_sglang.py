"""Imported by verl in its processes (VERL_USE_EXTERNAL_MODULES): the CPU rollout's SGLang is played by a script.

Trainer, workers, TransferQueue, weights and FSDP stay real. What is said stands in `stop_reasons`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from sglang_multiturn.verl_plugin.after_import import after_import


def play(module: ModuleType) -> None:
    """Make `SGLangEngine(model, ...)` an engine that plays the plans its prompts name."""

    def scripted(model_path: str, **_settings: Any) -> Any:
        from stop_reasons import Script, StrictEngine

        from sglang_multiturn.chat.hf_template import HFChatTemplate

        template = HFChatTemplate.from_pretrained(model_path)
        return StrictEngine(template, Script(template), max_model_len=1024)

    module.SGLangEngine = scripted  # type: ignore[attr-defined]


after_import("sglang_multiturn.engine.sglang_engine", play)
