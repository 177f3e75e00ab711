"""What `examine` says of real templates, and that it finds each kind in a small template made to show just that."""

from __future__ import annotations

import datetime
import time
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from sglang_multiturn.chat.hf_template import HFChatTemplate
from sglang_multiturn.chat.traits import Severity, Trait, TraitKind, examine

from families import FAMILIES, tokenizer
from make_golden import template

ALL = ("tiny", *FAMILIES)

KNOWN = {
    "tiny": "tool_merged tool_by_position",
    "qwen2_5": "default_system developer_dropped tool_merged tool_by_position string_arguments_escaped parts_refused",
    "qwen3": "developer_dropped thinking_stripped_by_user empty_thinking_added tool_merged tool_by_position "
    "parts_changed",
    "qwen3_instruct_2507": "developer_dropped tool_merged tool_by_position parts_changed",
    "qwen3_5_think": "later_system developer_refused generation_opens_thinking thinking_stripped_by_user "
    "empty_thinking_added tool_text_changed tool_merged tool_by_position string_arguments_refused content_trimmed "
    "needs_user",
    "llama3": "tools_not_shown tool_text_changed tool_by_position calls_dropped content_trimmed parts_changed",
    "llama3_2": "default_system system_added date_in_prompt tools_in_user_turn tool_text_changed tool_by_position "
    "string_arguments_escaped words_dropped_beside_calls two_calls_refused content_trimmed parts_changed",
    "deepseekv3": "later_system developer_dropped generation_opens_thinking thinking_stripped_by_user tools_not_shown "
    "later_rounds_differ tool_merged tool_by_position object_arguments_refused turn_goes_on_after_tool parts_refused",
    "gptoss": "default_system system_added later_system date_in_prompt thinking_stripped_by_user tool_text_changed "
    "tool_needs_call tool_name_wrong tool_name_from_call string_arguments_escaped second_call_dropped end_differs "
    "parts_refused",
    "glm4moe": "developer_dropped thinking_stripped_by_user empty_thinking_added tool_merged tool_by_position "
    "string_arguments_refused no_end_after_answer content_trimmed",
    "gemma": "system_refused later_system developer_refused tools_not_shown tool_refused calls_dropped content_trimmed "
    "roles_must_alternate needs_user parts_changed",
    "gemma4_v5": "thinking_stripped_by_user tool_needs_call tool_merged tool_name_from_call arguments_reordered "
    "string_arguments_refused turn_goes_on_after_tool content_trimmed",
    "phi3": "developer_dropped tools_not_shown tool_dropped calls_dropped end_differs white_space_swallowed "
    "parts_refused",
    "mistral_v3_tekken": "system_in_user_turn system_moves later_system developer_refused tools_move "
    "tool_text_unquoted tool_merged tool_id_shown string_arguments_escaped words_dropped_beside_calls "
    "roles_must_alternate",
}
"""Read off the templates themselves, and from what their models' users report."""

BASE = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>tool {{ message.tool_call_id }}
{{ message.content }}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{% if message.reasoning_content is string %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template that surprises nobody: it shows ids of calls, and escapes arguments that are text already."""

_CONTENT = "{{ message.content }}\n{%- for call"
_RESULT = "{{ message.content }}<|im_end|>\n{% else %}"
_TOOLS = "{{ tools | tojson }}"
_CALL = "{{ call.function | tojson }}"
_HEAD = "{%- for message in messages %}\n"
_PROMPT = "<|im_start|>assistant\n{% endif %}"
_CALLS = "message.tool_calls or []"
_TOOLS_TURN = BASE.partition("{%- for message")[0]
_TOOLS_AT = (
    "{{ tools | tojson if tools and message == messages | selectattr('role', 'equalto', 'user') | list | which }}"
)
_WITHOUT_SYSTEM = "{%- for message in (messages[1:] if messages[0].role == 'system' else messages) %}\n"
_OPENING = "<|im_start|>tool {{ message.tool_call_id }}\n"
_REFUSE = "{{ raise_exception('No.') }}"

EDITS: dict[TraitKind, tuple[str, str] | list[tuple[str, str]]] = {
    TraitKind.DEFAULT_SYSTEM: (
        "{%- if tools %}",
        "{%- if messages[0].role != 'system' %}<|im_start|>system\nBe good.<|im_end|>\n{% endif %}{% if tools %}",
    ),
    TraitKind.SYSTEM_ADDED: (
        "<|im_start|>{{ message.role }}\n",
        "<|im_start|>{{ message.role }}\n{{ 'Words of mine.' if message.role == 'system' }}",
    ),
    TraitKind.SYSTEM_REFUSED: (
        _HEAD,
        _HEAD + f"{{%- if message.role == 'system' and loop.first %}}{_REFUSE}{{% endif %}}",
    ),
    TraitKind.SYSTEM_DROPPED: (_HEAD, _WITHOUT_SYSTEM),
    TraitKind.SYSTEM_IN_USER_TURN: [
        (_HEAD, _WITHOUT_SYSTEM),
        (_CONTENT, "{{ messages[0].content if messages[0].role == 'system' and loop.first }}" + _CONTENT),
    ],
    TraitKind.SYSTEM_MOVES: (
        _HEAD,
        "{%- for message in (messages[1:] + messages[:1] if messages | length > 2 else messages) %}\n",
    ),
    TraitKind.LATER_SYSTEM: (
        _HEAD,
        _HEAD + f"{{%- if message.role == 'system' and not loop.first %}}{_REFUSE}{{% endif %}}",
    ),
    TraitKind.DEVELOPER_REFUSED: (_HEAD, _HEAD + f"{{%- if message.role == 'developer' %}}{_REFUSE}{{% endif %}}"),
    TraitKind.DEVELOPER_DROPPED: (_HEAD, "{%- for message in messages if message.role != 'developer' %}\n"),
    TraitKind.DATE_IN_PROMPT: ("{%- if tools %}", "{{ strftime_now('%d %b %Y') }}{% if tools %}"),
    TraitKind.THINKING_STRIPPED_BY_USER: (
        "message.reasoning_content is string",
        "message.reasoning_content is string and messages[-1].role != 'user'",
    ),
    TraitKind.THINKING_STRIPPED_BY_TOOL: (
        "message.reasoning_content is string",
        "message.reasoning_content is string and messages[-1].role != 'tool'",
    ),
    TraitKind.GENERATION_OPENS_THINKING: (_PROMPT, "<|im_start|>assistant\n<think>\n{% endif %}"),
    TraitKind.GENERATION_SKIPS_THINKING: (_PROMPT, "<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"),
    TraitKind.EMPTY_THINKING_ADDED: (_CONTENT, "{{ '<think></think>' if message.role == 'assistant' }}" + _CONTENT),
    TraitKind.INLINE_THINKING_DOUBLED: (
        _CONTENT,
        "{{ '<think></think>' if '</think>' in message.content }}" + _CONTENT,
    ),
    TraitKind.TOOLS_NOT_SHOWN: (_TOOLS, ""),
    TraitKind.TOOLS_IN_USER_TURN: [(_TOOLS_TURN, ""), (_CONTENT, _TOOLS_AT.replace("which", "first") + _CONTENT)],
    TraitKind.TOOLS_MOVE: [(_TOOLS_TURN, ""), (_CONTENT, _TOOLS_AT.replace("which", "last") + _CONTENT)],
    TraitKind.TOOL_REFUSED: (_HEAD, _HEAD + f"{{%- if message.role == 'tool' %}}{_REFUSE}{{% endif %}}"),
    TraitKind.TOOL_DROPPED: (_HEAD, "{%- for message in messages if message.role != 'tool' %}\n"),
    TraitKind.TOOL_NEEDS_CALL: (
        _HEAD,
        _HEAD
        + "{%- if message.role == 'tool' and messages | selectattr('tool_calls') | list | length == 0 %}"
        + _REFUSE
        + "{% endif %}",
    ),
    TraitKind.TOOL_MERGED: [
        (_OPENING, "{% if loop.previtem is not defined or loop.previtem.role != 'tool' %}" + _OPENING + "{% endif %}"),
        (
            _RESULT,
            "{{ message.content }}{% if loop.nextitem is defined and loop.nextitem.role == 'tool' %}\n"
            "{% else %}<|im_end|>\n{% endif %}{% else %}",
        ),
    ],
    TraitKind.TOOL_TEXT_CHANGED: (_RESULT, _RESULT.replace("message.content", "message.content | trim")),
    TraitKind.TOOL_TEXT_UNQUOTED: (_RESULT, _RESULT.replace("{{ message.content }}", '{"is": {{ message.content }}}')),
    TraitKind.TOOL_NAME_FROM_CALL: (
        "tool {{ message.tool_call_id }}",
        "tool {{ message.tool_call_id }} {{ messages[1].tool_calls[0].function.name if messages[1].tool_calls }}",
    ),
    TraitKind.TOOL_NAME_FROM_MESSAGE: ("message.tool_call_id", "message.name"),
    TraitKind.TOOL_BY_POSITION: ("tool {{ message.tool_call_id }}", "tool"),
    TraitKind.TOOLS_REORDERED: (
        _HEAD,
        "{%- for message in (messages[:2] + messages[2:] | sort(attribute='tool_call_id') "
        "if messages | length == 4 and messages[3].role == 'tool' else messages) %}\n",
    ),
    TraitKind.LATER_ROUNDS_DIFFER: (_RESULT, "{{ 'Later: ' if loop.index > 3 }}" + _RESULT),
    TraitKind.CALLS_DROPPED: (_CALLS, "[]"),
    TraitKind.CALLS_NEED_NULL_CONTENT: (_CALLS, "(message.tool_calls if message.content is none else [])"),
    TraitKind.ARGUMENTS_DROPPED: (_CALL, "{{ call.function.name }}"),
    TraitKind.ARGUMENTS_REORDERED: (
        _CALL,
        "{{ call.function.name }} {{ call.function.arguments | tojson(sort_keys=true) }}",
    ),
    TraitKind.STRING_ARGUMENTS_REFUSED: (
        _CALL,
        "{% if call.function.arguments is string %}{{ raise_exception('No.') }}{% endif %}" + _CALL,
    ),
    TraitKind.OBJECT_ARGUMENTS_REFUSED: (_CALL, "{{ call.function.name + call.function.arguments }}"),
    TraitKind.WORDS_DROPPED_BESIDE_CALLS: (
        _CONTENT,
        "{{ '' if message.tool_calls else message.content }}\n{%- for call",
    ),
    TraitKind.TWO_CALLS_REFUSED: (
        _HEAD,
        _HEAD + f"{{%- if message.tool_calls and message.tool_calls | length > 1 %}}{_REFUSE}{{% endif %}}",
    ),
    TraitKind.SECOND_CALL_DROPPED: (_CALLS, "(message.tool_calls or [])[:1]"),
    TraitKind.END_DIFFERS: (
        "{% endif %}\n{%- endfor %}",
        "{{ '<|endoftext|>' if loop.last and not add_generation_prompt }}{% endif %}\n{%- endfor %}",
    ),
    TraitKind.GENERATION_PROMPT_ALWAYS: ("{%- if add_generation_prompt %}", "{%- if true %}"),
    TraitKind.TURN_GOES_ON_AFTER_TOOL: (
        "{%- if add_generation_prompt %}",
        "{%- if add_generation_prompt and messages[-1].role != 'tool' %}",
    ),
    TraitKind.CONTENT_TRIMMED: (_CONTENT, _CONTENT.replace("message.content", "message.content | trim")),
    TraitKind.ROLES_MUST_ALTERNATE: (
        _HEAD,
        _HEAD
        + "{%- if loop.previtem is defined and loop.previtem.role == message.role == 'user' %}"
        + _REFUSE
        + "{% endif %}",
    ),
    TraitKind.NEEDS_USER: (
        "{%- if tools %}",
        "{%- if 'user' not in (messages | map(attribute='role')) %}" + _REFUSE + "{% endif %}{% if tools %}",
    ),
    TraitKind.PARTS_REFUSED: (_CONTENT, _CONTENT.replace("message.content", "message.content + ''")),
    TraitKind.BOS_DOUBLED: ("{%- if tools %}", "{{ bos_token }}{{ bos_token }}{% if tools %}"),
}
"""What one has to change in BASE to see a kind."""


def made(source: str, **tokens: Any) -> HFChatTemplate:
    """A template of our own on the tiny model's vocabulary."""
    backend = tokenizer("tiny").backend_tokenizer
    own = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", **tokens)
    own.chat_template = source
    return HFChatTemplate(own)


def kinds(traits: tuple[Trait, ...]) -> set[str]:
    return {trait.kind.value for trait in traits}


UNSURPRISING = {"tool_id_shown", "string_arguments_escaped", "parts_changed"}


def test_a_plain_template_has_only_the_traits_it_was_given() -> None:
    assert kinds(examine(made(BASE))) == UNSURPRISING


@pytest.mark.parametrize("kind", EDITS)
def test_each_kind_is_found_where_a_template_shows_it(kind: TraitKind) -> None:
    edits = EDITS[kind]
    source = BASE
    for old, new in edits if isinstance(edits, list) else [edits]:
        assert BASE.count(old) == 1
        source = source.replace(old, new)
    traits = examine(made(source, bos_token="<|endoftext|>"))
    found = next(trait for trait in traits if trait.kind is kind)
    assert len(found.detail) > 20
    assert len(found.advice) > 10


@pytest.mark.parametrize("family", KNOWN)
def test_traits_of_known_templates(family: str) -> None:
    assert kinds(examine(HFChatTemplate(tokenizer(family)))) == set(KNOWN[family].split())


def test_every_kind_was_seen_in_one_of_these() -> None:
    known = {kind for names in KNOWN.values() for kind in names.split()}
    assert {kind.value for kind in EDITS} | known | {"bos_missing"} == {kind.value for kind in TraitKind}


def test_a_begin_of_text_token_that_only_the_tokenizer_writes_is_missing() -> None:
    template = made(BASE, bos_token="<|endoftext|>")
    assert "bos_missing" not in kinds(examine(template))
    start = [("<|endoftext|>", template.tokenizer.bos_token_id)]
    template.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=["<|endoftext|>", "$A"], special_tokens=start
    )
    assert "bos_missing" in kinds(examine(template))


@pytest.mark.parametrize("family", ALL)
def test_examining_is_quick_says_a_kind_once_and_quotes_the_template(family: str) -> None:
    if family in FAMILIES and (missing := FAMILIES[family].missing()):
        pytest.skip(missing)
    chat = template(family)
    start = time.process_time()
    traits = examine(chat)
    assert time.process_time() - start < 0.5
    assert len({trait.kind for trait in traits}) == len(traits)
    for trait in traits:
        assert len(trait.detail) < 400
        assert "\n" not in trait.detail + trait.advice


@pytest.mark.parametrize("family", ALL)
def test_what_strips_thoughts_does_not_keep_history(family: str) -> None:
    if family in FAMILIES and (missing := FAMILIES[family].missing()):
        pytest.skip(missing)
    chat = template(family)
    found = kinds(examine(chat))
    for role in ("tool", "user"):
        if chat.dialect.reasoning_key is not None and f"thinking_stripped_by_{role}" in found:
            assert not chat.keeps_history(role)


def test_problems_are_those_that_keep_tools_from_being_used() -> None:
    problems = {trait.kind.value for family in ("llama3", "gemma", "phi3", "qwen3") for trait in _problems(family)}
    assert problems == {"tools_not_shown", "tool_refused", "tool_dropped"}
    assert _problems("qwen2_5") == []


def _problems(family: str) -> list[Trait]:
    return [trait for trait in examine(template(family)) if trait.severity is Severity.PROBLEM]


def test_the_clock_is_moved_for_the_probe_alone() -> None:
    chat = HFChatTemplate(tokenizer("llama3_2"))
    days = {datetime.date.today().strftime("%d %b %Y")}
    trait = next(trait for trait in examine(chat) if trait.kind is TraitKind.DATE_IN_PROMPT)
    assert "15 Jan 2031" in trait.detail
    assert "16 Jan 2031" in trait.detail
    days |= {datetime.date.today().strftime("%d %b %Y")}
    assert any(day in chat.render([{"role": "user", "content": "Hi"}]) for day in days)


def test_a_date_that_was_fixed_is_no_surprise() -> None:
    fixed = HFChatTemplate(tokenizer("llama3_2"), chat_template_kwargs={"date_string": "26 Jul 2024"})
    assert "date_in_prompt" not in kinds(examine(fixed))
