"""A turn's reasoning begins where the template opened it: after a user's word as after a tool's, each in its own way."""

from __future__ import annotations

import pytest

from sglang_multiturn import RolloutConfig, RolloutContext, ScriptedEngine, ScriptedTurn, ToolRegistry, run_one
from sglang_multiturn.chat.parsers import make_parser

from chat_templates import chat_template, missing
from support import RecordingTool, spec

CALL = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>echo\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


async def test_deepseek_opens_thoughts_after_a_user_and_not_after_a_tool() -> None:
    if reason := missing("deepseekv3"):
        pytest.skip(reason)
    template = chat_template("deepseekv3")
    with_control = {control.text: control.id for control in template.encoder.controls.values()}

    def ids(text: str) -> tuple[int, ...]:
        pieces = template.encoder.split(text)
        return tuple(
            token
            for piece in pieces
            for token in (template.encode_text(piece) if isinstance(piece, str) else [with_control[piece.text]])
        )

    turns = [ScriptedTurn(token_ids=ids(text)) for text in (f"hm</think>{CALL}", CALL, "done")]
    engine = ScriptedEngine.playing(template, {"r": turns})
    async with engine:
        context = RolloutContext(
            generator=engine,
            template=template,
            tools=ToolRegistry([RecordingTool()]),
            parser=make_parser("auto", template),
            config=RolloutConfig(),
            max_model_len=32_768,
        )
        trajectory = await run_one(spec(), context)
    assert [call.outcome for call in trajectory.tool_calls] == ["ok", "ok"]
    thoughts = [(m.model_extra or {}).get("reasoning_content") for m in trajectory.messages if m.role == "assistant"]
    assert thoughts == ["hm", None, None]
    assert trajectory.messages[-1].text == "done"
    assert trajectory.metrics.drift_boundary_tokens == 0
