"""What it costs to prove a chat template when a model is loaded, and a tool's delta afterwards, for every family.

    python benchmarks/template_proof.py

Deltas are compared, in the same run, with rendering and tokenising the whole conversation again, which is what they
save: the conversation is a question and twenty turns of a call and its answer.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from sglang_multiturn.chat.hf_template import HFChatTemplate
from sglang_multiturn.errors import TemplateError
from sglang_multiturn.schemas import Message

from chat_templates import chat_template, is_refused, missing
from families import NAMES

TURNS = 20
ANSWER = Message(role="tool", content="408 is what comes out.", name="calculator", tool_call_id="call00000")


def main() -> None:
    """Print the table."""
    table = Table("family", "proof, ms", "delta, µs", "whole again, µs", "ratio", title="CPU time, median of 5")
    for name in NAMES:
        if missing(name) or is_refused(name):
            continue
        template = chat_template(name)
        proof = cpu_s(lambda template=template: HFChatTemplate(template.tokenizer), times=1)
        row = [name, f"{proof * 1e3:.0f}"]
        if template.refusal("tool") is None:
            delta = cpu_s(lambda template=template: template.encode_delta([ANSWER], last_id=None), times=100)
            row.append(f"{delta * 1e6:.0f}")
            try:
                whole = cpu_s(lambda template=template: template.encode_prompt(conversation(), []), times=5)
            except TemplateError:
                row += ["refused", ""]
            else:
                row += [f"{whole * 1e6:.0f}", f"{whole / delta:.0f}"]
        table.add_row(*row)
    Console().print(table)


def cpu_s(work: Callable[[], object], *, times: int) -> float:
    """CPU seconds of one call, the median of five batches."""
    batches = []
    for _ in range(5):
        started = time.process_time()
        for _ in range(times):
            work()
        batches.append((time.process_time() - started) / times)
    return statistics.median(batches)


def conversation() -> list[Message]:
    """A question and turns of a call and its answer."""
    messages = [Message(role="user", content="What is 12*34?")]
    for turn in range(TURNS):
        call = {"id": f"call{turn:02d}000", "function": {"name": "calculator", "arguments": {"expression": "12*34"}}}
        messages.append(Message.model_validate({"role": "assistant", "content": "", "tool_calls": [call]}))
        messages.append(ANSWER.model_copy(update={"tool_call_id": call["id"]}))
    return messages


if __name__ == "__main__":
    main()
