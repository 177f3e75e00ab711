"""Which format of tool calls a chat template shows, told by the marks it writes. Text only; nothing is rendered.

A template that renders a call, or tells the model how to write one, holds the marks of its format. Families borrow
each other's marks (`<tool_call>` is in nine formats), so the table is read from top to bottom, the most telling first.
"""

from __future__ import annotations

_MARKS: tuple[tuple[str | None, tuple[str, ...]], ...] = (
    # Control tokens that only one format has.
    ("gpt-oss", ("<|channel|>", "<|call|>")),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("kimi_k2", ("<|tool_call_begin|>", "<|tool_call_argument_begin|>")),
    ("minimax-m2", ("<minimax:tool_call>",)),
    ("deepseekv32", ("｜DSML｜", "function_calls>")),
    ("deepseekv4", ("｜DSML｜", "tool_calls>")),
    ("deepseekv3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseekv31", ("<｜tool▁call▁begin｜>",)),
    ("step3", ("<steptml:invoke",)),
    ("cohere_command4", ("<|START_ACTION|>",)),
    ("apertus2509", ("<|tools_prefix|>",)),
    ("interns1", ("<|action_start|>", "<|plugin|>")),
    ("gigachat3", ("<|function_call|>",)),
    ("gigachat3", ("function call<|role_sep|>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),  # LFM2's first template lists tools and leaves calls out
    ("mistral", ("[TOOL_CALLS]",)),
    # Llama 4's template asks for JSON, its model card and SGLang's parser write Python: whoever runs it must say which.
    (None, ("<|python_start|>",)),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ('{"name": function name, "parameters":',)),
    # Formats of tags inside `<tool_call>`, and last the plain JSON one.
    ("hunyuan", ("<tool_sep>", "<arg_key>")),
    ("glm47", ("</arg_key><arg_value>",)),
    ("glm45", ("<arg_key>", "<arg_value>")),
    ("minicpm5", ("<function name=", "<param name=")),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("hermes", ("<tool_call>", "</tool_call>")),
)


def detect_format(source: str) -> str | None:
    """Name of the parser that reads the calls a template shows; None where it shows none, or none we can tell."""
    return next((name for name, marks in _MARKS if all(mark in source for mark in marks)), None)
