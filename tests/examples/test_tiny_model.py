"""The demo's checkpoint: what it is, what its tokenizer keeps, and what its chat template renders."""

from __future__ import annotations

import hashlib
import json
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from word_problems import TRAIN_SEED, Problem, problems, prompt

from sglang_multiturn.cpu.sglang_kernels import declare_torchvision_operators

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "gsm8k_tool"
CHECKPOINT = EXAMPLE / "tiny_model"

SHA256 = {
    "model.safetensors": "e9b251e4bf8f5875f7a82f2eed060fe7cb5dafa5007002be11eef8ba9f4346f2",
    "tokenizer.json": "6ce6e4001dd6fde094e6d5af68dc355026b620b516c5b75269fa1010588e564d",
    "chat_template.jinja": "8b8a7f13e3352879047f249a156864498ddcb065f5f9a2fa22fcae9ec1a54bd0",
}

CALCULATOR_AS_SHOWN = (
    '{"type": "function", "function": {"name": "calculator", "description": "Evaluates an arithmetic expression exactly.", '
    '"parameters": {"type": "object", "properties": {"expression": {"type": "string", "description": "For example 12*(3+4)."}}, '
    '"required": ["expression"]}}}'
)
TOOLS_HEADER = f"""# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{CALCULATOR_AS_SHOWN}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def tools() -> list[dict[str, Any]]:
    config = yaml.safe_load((REPOSITORY / "tool_configs" / "calculator.yaml").read_text(encoding="utf-8"))
    return [tool["tool_schema"] for tool in config["tools"]]


def call(expression: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "calculator", "arguments": {"expression": expression}}}


@pytest.mark.parametrize("name", sorted(SHA256))
def test_the_file_is_the_published_one(name: str) -> None:
    assert hashlib.sha256((CHECKPOINT / name).read_bytes()).hexdigest() == SHA256[name]


def test_the_checkpoint_carries_the_template_of_the_example() -> None:
    ours = (EXAMPLE / "chat_template.jinja").read_text(encoding="utf-8")
    assert (CHECKPOINT / "chat_template.jinja").read_text(encoding="utf-8") == ours


def test_the_configs_name_the_end_and_padding_tokens(tokenizer: Any) -> None:
    for name in ("config.json", "generation_config.json"):
        config = json.loads((CHECKPOINT / name).read_text(encoding="utf-8"))
        assert config["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert config["pad_token_id"] == tokenizer.convert_tokens_to_ids("<|endoftext|>")


def test_the_model_is_small_and_covers_exactly_the_vocabulary(tokenizer: Any) -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "qwen3"
    assert config["vocab_size"] == len(tokenizer)
    assert config["max_position_embeddings"] == 1024
    assert (CHECKPOINT / "model.safetensors").stat().st_size < 1_600_000


def test_the_build_script_makes_the_published_tokenizer(tokenizer: Any, tools: list[dict[str, Any]]) -> None:
    tiny_tokenizer = pytest.importorskip("tiny_tokenizer")
    rebuilt = tiny_tokenizer.build_tokenizer(tools)
    assert rebuilt.get_vocab() == tokenizer.get_vocab()
    assert rebuilt.chat_template == tokenizer.chat_template


@pytest.mark.parametrize(
    ("kind", "turns"),
    [("good", ["12*3", "4*5", "36+20", "56"]), ("early", ["12*3", "4*5", "20"]), ("guess", ["40"])],
)
def test_only_the_assistants_turns_are_taught(
    tokenizer: Any, tools: list[dict[str, Any]], kind: str, turns: list[str]
) -> None:
    tiny_demos = pytest.importorskip("tiny_demos")
    problem = Problem("Cost?", {"a": 12, "b": 3, "c": 4, "d": 5}, ("a * b", "c * d", "r1 + r2"))
    ids, mask = tiny_demos.encode(tokenizer, tiny_demos.demonstrate(problem, kind, random.Random(1)), tools)
    taught = tokenizer.decode([one for one, trained in zip(ids, mask, strict=True) if trained])
    said = [
        f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n</tool_call><|im_end|>'
        for expression in turns[:-1]
    ]
    assert taught == "".join(said) + f"The answer is {turns[-1]}.<|im_end|>"


def test_a_spoiled_plan_differs_in_one_operation() -> None:
    tiny_demos = pytest.importorskip("tiny_demos")
    plan = ("a * b", "c * d", "r1 + r2")
    for seed in range(20):
        spoiled = tiny_demos.spoiled(plan, random.Random(seed))
        changed = [(before, after) for before, after in zip(plan, spoiled, strict=True) if before != after]
        assert len(changed) == 1
        assert changed[0][0].split()[::2] == changed[0][1].split()[::2]


def test_only_the_turn_tokens_are_special(tokenizer: Any) -> None:
    assert set(tokenizer.all_special_tokens) == {"<|im_end|>", "<|endoftext|>"}
    added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    assert added == {
        "<|endoftext|>": True,
        "<|im_start|>": True,
        "<|im_end|>": True,
        "<tool_call>": False,
        "</tool_call>": False,
        "<tool_response>": False,
        "</tool_response>": False,
    }
    assert all(len(tokenizer.encode(text, add_special_tokens=False)) == 1 for text in added)


@given(text=st.text(max_size=200))
def test_any_text_round_trips(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_numbers_are_groups_of_at_most_two_digits_from_the_left(tokenizer: Any) -> None:
    ids = tokenizer.encode("12345*67", add_special_tokens=False)
    assert [tokenizer.decode([one]) for one in ids] == ["12", "34", "5", "*", "67"]


def test_a_question_with_tools_and_two_replies_renders_as_qwen_does(
    tokenizer: Any, tools: list[dict[str, Any]]
) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "12*3 and 4+5?"},
        {"role": "assistant", "content": "Both.", "tool_calls": [call("12*3"), call("4+5")]},
        {"role": "tool", "content": "36"},
        {"role": "tool", "content": "9"},
        {"role": "assistant", "content": "36 and 9."},
    ]
    expected = f"""<|im_start|>system
Be brief.

{TOOLS_HEADER}<|im_end|>
<|im_start|>user
12*3 and 4+5?<|im_end|>
<|im_start|>assistant
Both.
<tool_call>
{{"name": "calculator", "arguments": {{"expression": "12*3"}}}}
</tool_call>
<tool_call>
{{"name": "calculator", "arguments": {{"expression": "4+5"}}}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
36
</tool_response>
<tool_response>
9
</tool_response><|im_end|>
<|im_start|>assistant
36 and 9.<|im_end|>
"""
    assert tokenizer.apply_chat_template(messages, tools=tools, tokenize=False) == expected


def test_a_call_without_words_starts_right_after_the_generation_prompt(tokenizer: Any) -> None:
    question = [{"role": "user", "content": "4+5?"}]
    for content in ("", None):
        messages = [*question, {"role": "assistant", "content": content, "tool_calls": [call("4+5")]}]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
        prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        said = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "4+5"}}\n</tool_call><|im_end|>\n'
        assert rendered == prompt + said


def test_arguments_that_are_text_already_are_not_quoted_again(tokenizer: Any) -> None:
    spoken = {"type": "function", "function": {"name": "calculator", "arguments": '{"expression": "4+5"}'}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [spoken]}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert '{"name": "calculator", "arguments": {"expression": "4+5"}}' in rendered


def test_without_a_system_message_none_is_made_up(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_without_a_system_message_the_tools_still_stand_in_a_system_turn(
    tokenizer: Any, tools: list[dict[str, Any]]
) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    rendered = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert rendered == f"<|im_start|>system\n{TOOLS_HEADER}<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"


def test_without_tools_the_system_message_stands_alone(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"


def test_replies_apart_from_each_other_have_turns_of_their_own(tokenizer: Any) -> None:
    messages = [
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "Go on."},
        {"role": "tool", "content": "2"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nGo on.<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    )


def test_text_parts_are_joined(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    assert rendered == "<|im_start|>user\nHello<|im_end|>\n"


def test_rendering_only_ever_appends(tokenizer: Any, tools: list[dict[str, Any]]) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "4+5?"},
        {"role": "assistant", "content": "", "tool_calls": [call("4+5")]},
        {"role": "tool", "content": "9"},
        {"role": "assistant", "content": "The answer is 9."},
    ]
    rendered = [tokenizer.apply_chat_template(messages[:count], tools=tools, tokenize=False) for count in range(1, 5)]
    assert all(later.startswith(earlier) for earlier, later in pairwise(rendered))


@pytest.mark.slow
def test_greedily_the_model_solves_a_training_problem_with_the_calculator(
    tokenizer: Any, tools: list[dict[str, Any]]
) -> None:
    torch = pytest.importorskip("torch")
    declare_torchvision_operators()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    problem = next(problems(TRAIN_SEED))
    text = tokenizer.apply_chat_template(
        prompt(problem.question), tools=tools, tokenize=False, add_generation_prompt=True
    )
    for step in problem.steps:
        said = generate(model, tokenizer, text)
        assert said == (
            f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{step.expression}"}}}}\n'
            "</tool_call><|im_end|>"
        )
        reply = f"<|im_start|>user\n<tool_response>\n{step.result}\n</tool_response><|im_end|>\n"
        text += f"{said}\n{reply}<|im_start|>assistant\n"
    assert generate(model, tokenizer, text) == f"The answer is {problem.answer}.<|im_end|>"


def generate(model: Any, tokenizer: Any, text: str) -> str:
    """One greedy turn, its end token included."""
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=48)
    said: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert re.search(r"<\|im_end\|>$", said), said
    return said
