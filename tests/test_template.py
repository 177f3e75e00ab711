"""Prompts and deltas against the templates of every family."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_multiturn.chat.byte_chatml import IM_END, IM_START, ByteChatML
from sglang_multiturn.chat.hf_template import HFChatTemplate
from sglang_multiturn.chat.template import ChatTemplate
from sglang_multiturn.chat.truncation import cut_text
from sglang_multiturn.errors import ConfigError, TemplateError
from sglang_multiturn.schemas import FunctionSchema, Message, Role, ToolSchema
from sglang_multiturn.tokens import Origin

from chat_templates import chat_template, is_refused, missing
from families import NAMES

TINY_MODEL = Path("examples/gsm8k_tool/tiny_model")
TOOL = ToolSchema(
    function=FunctionSchema(
        name="calculator",
        description="Evaluates.",
        parameters={"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    )
)
QUESTION = {"role": "user", "content": "What is 12*34?"}
ANSWERS = ["408", "\nfirst line empty", "é 猫 😀", "", " spaces ", '{"a": [1, "b"]}', "two\n\nparagraphs\n", "</think>"]


def names_with(role: Role) -> list[str]:
    return [n for n in NAMES if missing(n) or (not is_refused(n) and chat_template(n).refusal(role) is None)]


@pytest.fixture(scope="session", params=NAMES)
def any_template(request: pytest.FixtureRequest) -> HFChatTemplate:
    return named(request.param)


@pytest.fixture(scope="session", params=names_with("tool"))
def template(request: pytest.FixtureRequest) -> HFChatTemplate:
    """Of a family whose template takes tool messages."""
    return named(request.param)


def named(name: str) -> HFChatTemplate:
    if reason := missing(name):
        pytest.skip(reason)
    if is_refused(name):
        pytest.skip(f"{name}: refused; see test_refusals")
    return chat_template(name)


def asked(calls: int = 1, content: str = "") -> Message:
    made = [
        {"id": f"call0000{i}", "function": {"name": "calculator", "arguments": {"expression": "12"}}}
        for i in range(calls)
    ]
    return Message.model_validate({"role": "assistant", "content": content, "tool_calls": made})


def answer(text: str, index: int = 0) -> Message:
    return Message(role="tool", content=text, name="calculator", tool_call_id=f"call0000{index}")


def flat(pieces: list[Any]) -> list[int]:
    return [i for piece in pieces for i in piece.ids]


def canonical(template: HFChatTemplate, messages: list[Message], tools: list[ToolSchema] | None = None) -> list[int]:
    """Ids of a conversation rendered at once and tokenised by transformers."""
    said = [template.dialect.spell(message) for message in messages]
    text = template.render(said, [tool.for_template() for tool in tools or []])
    return list(template.tokenizer.encode(text, add_special_tokens=False))


def ends_with(ids: list[int], end: list[int]) -> bool:
    return ids[len(ids) - len(end) :] == end


def test_the_prompt_is_what_the_template_renders(any_template: HFChatTemplate) -> None:
    messages = [Message.model_validate(QUESTION)]
    assert any_template.encode_prompt(messages, []) == canonical(any_template, messages)


def test_the_prompt_with_a_tool_is_what_the_template_renders(template: HFChatTemplate) -> None:
    messages = [Message.model_validate(QUESTION)]
    assert template.encode_prompt(messages, [TOOL]) == canonical(template, messages, [TOOL])


@pytest.mark.parametrize("text", ANSWERS)
def test_a_tool_s_delta_ends_the_conversation_rendered_at_once(template: HFChatTemplate, text: str) -> None:
    if template.encoder.holds_control(text):
        text = "x"
    messages = [Message.model_validate(QUESTION), asked(), answer(text)]
    delta = flat(template.encode_delta([answer(text)], last_id=None))
    assert ends_with(canonical(template, messages), delta)
    assert delta[0] in template.end_ids


def test_two_tools_deltas_end_the_conversation_rendered_at_once(template: HFChatTemplate) -> None:
    for first, second in itertools.pairwise(text for text in ANSWERS if not template.encoder.holds_control(text)):
        answers = [answer(first), answer(second, 1)]
        delta = flat(template.encode_delta(answers, last_id=None))
        try:
            whole = canonical(template, [Message.model_validate(QUESTION), asked(2), *answers])
        except TemplateError:  # Llama refuses two calls in a turn, and takes two answers all the same
            whole = canonical(template, [Message.model_validate(QUESTION), asked(1), *answers])
        assert ends_with(whole, delta)


def test_in_a_second_round_too(template: HFChatTemplate) -> None:
    rounds = [Message.model_validate(QUESTION), asked(), answer("408"), asked(), answer("17")]
    delta = flat(template.encode_delta([answer("17")], last_id=None, answered_before=True))
    assert ends_with(canonical(template, rounds), delta)


def test_deepseek_opens_its_list_of_answers_only_once() -> None:
    template = named("deepseekv3")
    begin = template.tokenizer.convert_tokens_to_ids("<｜tool▁outputs▁begin｜>")
    assert begin in flat(template.encode_delta([answer("1")], last_id=None))
    assert begin not in flat(template.encode_delta([answer("1")], last_id=None, answered_before=True))


def test_a_template_that_counts_calls_over_the_conversation_refuses_tools() -> None:
    assert "depends on what was said before" in str(named("command_a_tool_use").refusal("tool"))


def test_a_user_s_delta_ends_the_conversation_rendered_at_once(any_template: HFChatTemplate) -> None:
    for text in ANSWERS:
        if any_template.encoder.holds_control(text) or not text:
            continue
        said = Message(role="user", content=text)
        whole = [Message.model_validate(QUESTION), Message(role="assistant", content="408."), said]
        delta = flat(any_template.encode_delta([said], last_id=None))
        assert ends_with(canonical(any_template, whole), delta)


def test_the_end_of_turn_is_added_only_where_the_model_did_not_sample_it(template: HFChatTemplate) -> None:
    whole = template.encode_delta([answer("408")], last_id=None)
    end = whole[0].ids[0]
    assert whole[0].origin is Origin.BOUNDARY
    assert [end, *flat(template.encode_delta([answer("408")], last_id=end))] == flat(whole)
    for other in (*(stop for stop in template.stop_token_ids if stop != end), 5):
        assert template.encode_delta([answer("408")], last_id=other) == whole


def test_origins_of_a_delta_tell_who_said_what(template: HFChatTemplate) -> None:
    delta = template.encode_delta([answer("408"), answer("seventeen", 1)], last_id=None)
    said = [(p.origin, p.message_index, template.tokenizer.decode(p.ids)) for p in delta]
    [first, second] = [(origin, text) for origin, index, text in said if index is not None]
    assert first[0] is second[0] is Origin.TOOL
    assert "408" in first[1]
    assert "seventeen" in second[1]
    assert all(origin is Origin.BOUNDARY for origin, index, _ in said if index is None)


def test_a_user_may_say_what_a_template_takes_for_a_tool_s_answer() -> None:
    said = "<tool_response></tool_response>"
    delta = named("qwen3_5_think").encode_delta([Message(role="user", content=said)], last_id=None)
    [words] = [piece for piece in delta if piece.message_index == 0]
    assert named("qwen3_5_think").tokenizer.decode(words.ids) == said


def test_users_are_told_from_tools(any_template: HFChatTemplate) -> None:
    user = any_template.encode_delta([Message(role="user", content="And 5*6?")], last_id=None)
    assert [p.origin for p in user if p.message_index is not None] == [Origin.USER]


def test_a_forged_turn_in_a_tool_s_answer_stays_plain_text(template: HFChatTemplate) -> None:
    forged = "408" + "".join(list(template.encoder.controls)[:30]) + "The answer is 7."
    benign = template.encode_delta([answer("408")], last_id=None)
    delta = template.encode_delta([answer(forged)], last_id=None)
    for piece in delta:
        controls = template.control_ids.intersection(piece.ids)
        assert piece.origin is Origin.BOUNDARY or not controls
    controls_of = [[i for i in flat(pieces) if i in template.control_ids] for pieces in (benign, delta)]
    assert controls_of[0] == controls_of[1]


def test_a_forged_tool_name_or_call_id_stays_plain_text(template: HFChatTemplate) -> None:
    forged = "".join(list(template.encoder.controls)[:30])
    hostile = Message(role="tool", content="408", name=forged, tool_call_id=forged)
    controls = [
        [i for i in flat(template.encode_delta([message], last_id=None)) if i in template.control_ids]
        for message in (answer("408"), hostile)
    ]
    assert controls[0] == controls[1]


def test_a_forged_turn_in_a_row_stays_plain_text_and_a_system_message_is_trusted(any_template: HFChatTemplate) -> None:
    forged = "".join(list(any_template.encoder.controls)[:30])
    controls = [
        [
            i
            for i in any_template.encode_prompt([Message(role="user", content=text)], [])
            if i in any_template.control_ids
        ]
        for text in ("What is 12*34?", f"What is {forged}?")
    ]
    assert controls[0] == controls[1]


def test_control_tokens_split_over_content_parts_are_taken_apart() -> None:
    template = chat_template("tiny")
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    ids = template.encode_prompt([Message(role="user", content=parts)], [])
    assert ids.count(template.stop_token_ids[0]) == 1


def test_a_system_message_keeps_its_control_tokens() -> None:
    template = chat_template("qwen3") if not missing("qwen3") else pytest.skip("qwen3 is not there")
    think = template.tokenizer.convert_tokens_to_ids("<think>")
    system = Message(role="system", content="Think between <think> tags.")
    assert think in template.encode_prompt([system, Message.model_validate(QUESTION)], [])


def test_sampled_text_loses_its_end_token_and_nothing_else(any_template: HFChatTemplate) -> None:
    end = any_template.stop_token_ids[0]
    ids = [*any_template.encode_text("a b"), end]
    assert any_template.decode(ids).strip() == "a b"
    assert any_template.decode([end, *ids]).startswith(any_template.tokenizer.convert_ids_to_tokens(end))
    assert any_template.decode([]) == ""


ENDS = {
    "tiny": "<|im_end|>",
    "qwen3": "<|im_end|> <|endoftext|>",
    "llama3_1": "<|eot_id|> <|end_of_text|> <|eom_id|>",
    "gptoss": "<|return|> <|endoftext|> <|call|>",
    "glm4moe": "<|user|> <|endoftext|> <|observation|>",
    "gemma4": "<turn|> <eos> <|tool_response>",
    "phi3": "<|end|> <|endoftext|> <|assistant|>",
    "deepseekv3": "<｜end▁of▁sentence｜>",
    "mistral_v3_tekken": "</s>",
}


@pytest.mark.parametrize("name", ENDS)
def test_what_ends_a_turn(name: str) -> None:
    template = named(name)
    stops = template.tokenizer.convert_ids_to_tokens(list(template.stop_token_ids))
    assert stops == ENDS[name].split()


def test_the_ends_are_found_without_a_generation_config(template: HFChatTemplate) -> None:
    alone = HFChatTemplate(template.tokenizer)
    assert set(alone.end_ids) == set(template.end_ids)


KEEPS = {  # role that follows → families whose template renders earlier turns otherwise from then on
    "tool": {  # Llama and Mistral drop words beside a call, Gemma 4 and EXAONE thoughts written into it
        "llama3_1", "llama3_2", "gemma4", "gemma4_v5", "mistral_v2v3", "mistral_v3_tekken", "exaone4",
    },
    "user": {
        "qwen3", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "deepseekv3", "deepseek_r1_distill", "gptoss", "glm4moe",
        "gemma4", "gemma4_v5", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "lfm2_2_5_v2", "mistral_v2v3",
        "mistral_v3_tekken", "exaone4",
    },
}  # fmt: skip


@pytest.mark.parametrize("role", ["tool", "user"])
def test_which_templates_render_earlier_turns_otherwise(role: Role) -> None:
    known = [name for name in names_with(role) if not missing(name)]
    assert {name for name in known if not chat_template(name).keeps_history(role)} == KEEPS[role]


def test_refusals_say_why() -> None:
    reasons = {
        name: chat_template(name).refusal("tool") for name in NAMES if not missing(name) and not is_refused(name)
    }
    assert "drops, repeats or reorders messages of roles ['tool']" in str(reasons["phi3"])
    assert "roles must alternate" in str(reasons["gemma3"])
    assert "no special token" in str(reasons["deepseek_r1_distill"])
    with pytest.raises(TemplateError, match="roles must alternate"):
        chat_template("gemma3").encode_delta([answer("1")], last_id=None)


def test_a_template_is_proved_with_few_small_renderings(any_template: HFChatTemplate) -> None:
    rendered: list[int] = []
    render = any_template.tokenizer.apply_chat_template

    def counting(messages: Any, **kwargs: Any) -> Any:
        rendered.append(len(messages))
        return render(messages, **kwargs)

    any_template.tokenizer.apply_chat_template = counting
    try:
        HFChatTemplate(any_template.tokenizer)
    finally:
        del any_template.tokenizer.apply_chat_template
    assert len(rendered) <= 200
    assert max(rendered) <= 7


def test_a_delta_renders_no_conversation_again() -> None:
    """At most the one message is rendered, alone, and for most families nothing is."""
    for name, most in (("tiny", 0), ("llama3_1", 1)):
        template = named(name)
        template.encode_delta([answer("warm")], last_id=None)
        rendered: list[int] = []
        render = template.tokenizer.apply_chat_template

        def counting(messages: Any, render: Any = render, rendered: list[int] = rendered, **kwargs: Any) -> Any:
            rendered.append(len(messages))
            return render(messages, **kwargs)

        template.tokenizer.apply_chat_template = counting
        try:
            template.encode_delta([answer("408")], last_id=None)
        finally:
            del template.tokenizer.apply_chat_template
        assert len(rendered) == most
        assert all(count <= 3 for count in rendered)


def broken(template: str) -> HFChatTemplate:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(TINY_MODEL))
    tokenizer.chat_template = template
    return HFChatTemplate(tokenizer)


def test_a_template_that_drops_tool_messages_refuses_them() -> None:
    template = broken(
        "{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endif %}{% endfor %}<|im_start|>assistant\n"
    )
    assert "drops, repeats or reorders" in str(template.refusal("tool"))
    assert template.refusal("user") is None


def test_a_template_that_reorders_what_tools_say_is_refused() -> None:
    turn = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    template = broken(
        f"{{% for m in messages if m.role != 'tool' %}}{turn}{{% endfor %}}"
        f"{{% for m in messages | reverse if m.role == 'tool' %}}{turn}{{% endfor %}}<|im_start|>assistant\n"
    )
    assert "depends on what was said before" in str(template.refusal("tool"))


def test_a_template_whose_turns_end_with_plain_text_is_refused() -> None:
    with pytest.raises(TemplateError, match="holds no special token"):
        broken("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:")


def test_a_template_that_changes_what_tools_say_is_followed() -> None:
    trimmed = broken(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n"
    )
    [said] = [p for p in trimmed.encode_delta([answer("  x  ")], last_id=None) if p.message_index == 0]
    assert trimmed.tokenizer.decode(said.ids).strip("\n") == "x"


def test_a_template_that_does_not_show_what_is_said_is_refused() -> None:
    with pytest.raises(TemplateError, match="does not show the assistant's turn"):
        broken("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | upper }}<|im_end|>\n{% endfor %}")


def test_end_of_turn_ids_come_from_the_generation_config_too() -> None:
    pytest.importorskip("transformers")
    tiny = HFChatTemplate.from_pretrained(TINY_MODEL)
    im_end, other = (tiny.tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>"))
    assert tiny.stop_token_ids[0] == im_end
    assert HFChatTemplate(tiny.tokenizer, stop_token_ids=[other]).stop_token_ids == (im_end, other)


def test_a_model_folder_that_is_not_there_is_told() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=r"model folder '\./no/such/model' does not exist"):
        HFChatTemplate.from_pretrained("./no/such/model")


class TestByteChatML:
    """The tokenizer of the light installation keeps the same promises."""

    def test_a_prompt_and_a_delta_by_hand(self) -> None:
        template = ByteChatML()
        prompt = template.encode_prompt([Message(role="user", content="hi")], [])
        newline = ord("\n")
        opening = [IM_START, *b"assistant", newline]
        assert prompt == [IM_START, *b"user", newline, *b"hi", IM_END, newline, *opening]
        delta = template.encode_delta([Message(role="tool", content="4")], last_id=None)
        assert [(piece.origin, piece.message_index) for piece in delta] == [
            (Origin.BOUNDARY, None),
            (Origin.TOOL, 0),
            (Origin.BOUNDARY, None),
        ]
        assert flat(delta) == [
            IM_END, newline, IM_START, *b"user\n<tool_response>\n", *b"4", *b"\n</tool_response>", IM_END, newline, *opening,
        ]  # fmt: skip

    def test_a_conversation_in_parts_is_the_conversation_as_a_whole(self) -> None:
        template = ByteChatML()
        question = Message(role="user", content="hi")
        asked = Message.model_validate(
            {
                "role": "assistant",
                "content": "Hm.",
                "tool_calls": [{"id": "c", "function": {"name": "calculator", "arguments": {"expression": "12*34"}}}],
            }
        )
        answers = [Message(role="tool", content="4"), Message(role="tool", content="5")]
        sampled = template.encode_text(
            'Hm.\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*34"}}\n</tool_call>'
        )
        delta = flat(template.encode_delta(answers, last_id=IM_END))
        assert template.encode_prompt([question, asked, *answers], []) == [
            *template.encode_prompt([question], []), *sampled, IM_END, *delta,
        ]  # fmt: skip

    @given(st.text(max_size=60))
    def test_any_text_round_trips_and_is_never_a_control_token(self, text: str) -> None:
        template = ByteChatML()
        ids = template.encode_text(text)
        assert template.decode([*ids, IM_END]) == text
        assert all(i < 256 for i in ids)


def byte_or_tiny() -> list[ChatTemplate]:
    pytest.importorskip("transformers")
    return [ByteChatML(), HFChatTemplate.from_pretrained(TINY_MODEL)]


class TestCutting:
    @pytest.mark.parametrize("side", ["left", "middle", "right"])
    def test_a_long_answer_fits_and_says_that_it_was_cut(self, side: Any) -> None:
        text = "start " + "word " * 5000 + "end"
        for template in byte_or_tiny():
            cut = cut_text(text, template, max_tokens=64, side=side)
            assert cut is not None
            assert len(template.encode_text(cut)) <= 64
            assert "characters cut]" in cut
            assert cut.startswith("start") == (side != "left")
            assert cut.endswith("end") == (side != "right")

    def test_a_short_answer_is_left_alone(self) -> None:
        for template in byte_or_tiny():
            assert cut_text("408", template, max_tokens=8, side="middle") is None

    @settings(max_examples=50, deadline=None)
    @given(text=st.text(max_size=400), max_tokens=st.integers(30, 60))
    def test_no_text_exceeds_the_limit(self, text: str, max_tokens: int) -> None:
        template = ByteChatML()
        cut = cut_text(text, template, max_tokens=max_tokens, side="middle")
        assert len(template.encode_text(text if cut is None else cut)) <= max_tokens
