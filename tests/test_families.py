"""The families' tokenizers are what they say: real vocabularies, the template's tokens, ends, flags."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from byte_pairs import merges_of, ranks_of
from families import FAMILIES, NAMES, tokenizer
from vocabularies import CL100K_SPLIT, O200K_SPLIT, QWEN2_SPLIT, QWEN3_5_SPLIT, Source, path, tekken

TEXTS = (
    "Hello world",
    "Café naïve — “quotes” ß",
    "漢字かな交じり、한국어 문장",
    "👩‍👩‍👧 🏳️‍🌈 🧮",
    "one\n\n\n  two\ttab \r\nthree ",
    'def f(x):\n    return {"a": x ** 2}  # ok\n',
    "<b>bold</b> and <br/> 3.14159",
)
HELLO_WORLD = {
    "qwen2_5": [9707, 1879],
    "qwen3_6": [9419, 1814],
    "llama3_1": [9906, 1917],
    "llama4": [19873, 3817],
    "phi4": [9906, 1917],
    "deepseekv3": [19923, 2058],
    "mistral_v1": [22557, 1526],
    "mistral_v2v3": [23325, 2294],
    "mistral_v3_tekken": [22177, 4304],
    "nemotron_3_nano": [22177, 4304],
    "smollm2": [19556, 905],
}
IDS = {
    "qwen2_5": {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<tool_call>": 151657},
    "qwen3": {"<|im_end|>": 151645, "<tool_response>": 151665, "<think>": 151667, "</think>": 151668},
    "qwen3_6": {"<|endoftext|>": 248044, "<|im_end|>": 248046, "<tool_call>": 248058, "</think>": 248069},
    "deepseek_r1_distill": {"<｜User｜>": 151644, "<｜begin▁of▁sentence｜>": 151646, "<think>": 151648},
    "llama3_1": {"<|begin_of_text|>": 128000, "<|start_header_id|>": 128006, "<|eot_id|>": 128009},
    "llama3_2": {"<|eom_id|>": 128008, "<|python_tag|>": 128010, "<|reserved_special_token_247|>": 128255},
    "llama4": {"<|begin_of_text|>": 200000, "<|header_start|>": 200005, "<|eot|>": 200008, "<|python_start|>": 200016},
    "deepseekv3": {"<｜begin▁of▁sentence｜>": 0, "<｜User｜>": 128803, "<｜tool▁sep｜>": 128814},
    "phi3": {"<|endoftext|>": 32000, "<|assistant|>": 32001, "<|end|>": 32007, "<|user|>": 32010},
    "phi4": {"<|endoftext|>": 100257, "<|im_start|>": 100264, "<|im_sep|>": 100266, "<|dummy_85|>": 100349},
    "nemotron_3_ultra": {"</s>": 2, "<|im_end|>": 11, "<think>": 12, "</tool_response>": 17},
    "mistral_v2v3": {"[INST]": 3, "[TOOL_CALLS]": 5, "[/TOOL_RESULTS]": 9},
    "mistral_v7_tekken": {"[INST]": 3, "[TOOL_CALLS]": 9, "[SYSTEM_PROMPT]": 17},
    "smollm2": {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2},
}
STAND_INS = {
    *("gptoss", "glm4moe", "gemma", "gemma3", "gemma4", "gemma4_v5", "phi3", "phi3_5"),
    *("lfm2_v2", "lfm2_2_5_v2", "cohere2", "command_a", "command_a_tool_use", "exaone4", "chatml"),
}
# What templates write between brackets though it is text to the tokenizer: several ids, and no control token.
AS_TEXT = {
    "qwen2_5": "<tool_response> </tool_response>",
    "deepseek_r1_distill": "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> "
    "<｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>",
    "gptoss": "<|final|>",  # in a comment
    "lfm2_2_5_v2": "<image>",
    "mistral_v1": "[INST] [/INST]",
    "tiny": "<think> </think>",
}
BRACKETED = r"<\|[^<>\s|]*\|?>|<[^<>\s|]*\|>|<｜[^<>\s]*｜>|</?[A-Za-z_]+>|\[\|[a-z]+\|\]|\[/?g?[A-Z_]{2,}\]"
TAGS = "tools tool co IMPORTANT function parameter parameters name description type enum required".split()
PROMPTS = {
    "qwen2_5": "<|im_start|>assistant\n",
    "qwen3": "<|im_start|>assistant\n",
    "qwen3_5_think": "<|im_start|>assistant\n<think>\n",
    "qwen3_5_nothink": "<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "llama3_1": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "llama4": "<|header_start|>assistant<|header_end|>\n\n",
    "deepseekv3": "<｜Assistant｜><think>\n",
    "gptoss": "<|start|>assistant",
    "glm4moe": "<|assistant|>",
    "gemma3": "<start_of_turn>model\n",
    "gemma4_v5": "<|turn>model\n",
    "phi3": "<|assistant|>\n",
    "phi4": "<|im_start|>assistant<|im_sep|>",
    "nemotron_3_super": "<|im_start|>assistant\n<think>\n",
    "command_a": "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>",
    "mistral_v3_tekken": "[/INST]",
    "exaone4": "[|assistant|]\n<think>\n\n</think>\n\n",
    "tiny": "<|im_start|>assistant\n",
}
Encode = Callable[[str], list[int]]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    reason = FAMILIES[request.param].missing() if request.param in FAMILIES else None
    if reason:
        pytest.skip(reason)
    return str(request.param)


def known(table: Mapping[str, object]) -> list[str]:
    """The families of a table that are installed here."""
    return [name for name in table if name not in FAMILIES or FAMILIES[name].missing() is None]


def words_of(name: str, text: str) -> list[int]:
    return list(tokenizer(name).encode(text, add_special_tokens=False))


def test_the_stand_ins_are_these_and_say_so() -> None:
    assert {family.name for family in FAMILIES.values() if family.stand_in} == STAND_INS
    for family in FAMILIES.values():
        assert family.vocabulary_note.startswith("in no package") == family.stand_in


def test_two_words_have_the_ids_of_the_real_models() -> None:
    found = {name: words_of(name, "Hello world") for name in known(HELLO_WORLD)}
    assert found == {name: HELLO_WORLD[name] for name in found}


def test_special_tokens_have_the_ids_of_the_real_models() -> None:
    for name in known(IDS):
        assert {text: words_of(name, text) for text in IDS[name]} == {text: [i] for text, i in IDS[name].items()}


def reference(source: Source) -> Encode:
    """Another implementation's encoding, from the same file."""
    if source in (Source.MISTRAL_V1, Source.MISTRAL_V3):
        pieces = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=str(path(source)))
        return lambda text: list(pieces.encode(text))
    ranks, split, before = _ranks(source)
    tiktoken = pytest.importorskip("tiktoken")
    encoding = tiktoken.Encoding(source.value, pat_str=split, mergeable_ranks=ranks, special_tokens={})
    form = (lambda text: unicodedata.normalize("NFC", text)) if source in (Source.QWEN2, Source.QWEN3_5) else str
    return lambda text: [i + before for i in encoding.encode_ordinary(form(text))]


def _ranks(source: Source) -> tuple[dict[bytes, int], str, int]:
    if source == Source.TEKKEN:
        return tekken(path(source))
    splits = {Source.QWEN2: QWEN2_SPLIT, Source.QWEN3_5: QWEN3_5_SPLIT, Source.LLAMA4: O200K_SPLIT}
    return ranks_of(path(source)), splits.get(source, CL100K_SPLIT), 0


@pytest.mark.parametrize(
    "name",
    ["qwen3", "qwen3_6", "llama3_1", "llama4", "phi4", "mistral_v3_tekken", "mistral_v1", "mistral_v2v3"],
    indirect=True,
)
def test_text_is_encoded_as_tiktoken_or_sentencepiece_encodes_it(name: str) -> None:
    expected = reference(FAMILIES[name].source)
    controls = set(tokenizer(name).get_added_vocab())

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.one_of(st.text(max_size=12), st.sampled_from(TEXTS)), max_size=4).map(" ".join))
    def same(text: str) -> None:
        if any(control in text for control in controls) or (name == "mistral_v2v3" and text.startswith((" ", "▁"))):
            return  # a text that begins with a space gets no other one from Hugging Face, and a second from the rest
        assert words_of(name, text) == expected(text)

    same()


def test_a_token_is_merged_from_what_lower_ranks_leave_of_it() -> None:
    letters = {b"a": 0, b"b": 1, b"c": 2}
    assert list(merges_of(letters | {b"bc": 3, b"ab": 4, b"abc": 5})) == [(b"b", b"c"), (b"a", b"b"), (b"a", b"bc")]
    assert list(merges_of(letters | {b"ab": 3, b"bc": 4, b"abc": 5})) == [(b"a", b"b"), (b"b", b"c"), (b"ab", b"c")]


def test_a_token_that_lower_ranks_do_not_lead_to_is_merged_from_any_pair() -> None:
    ranks = {b"a": 0, b"b": 1, b"c": 2, b"abc": 3, b"ab": 4, b"bc": 5}
    assert list(merges_of(ranks)) == [(b"a", b"bc"), (b"ab", b"c"), (b"a", b"b"), (b"b", b"c")]


def test_deepseek_encodes_as_its_own_file() -> None:
    if reason := FAMILIES["deepseekv3"].missing():
        pytest.skip(reason)
    from tokenizers import Tokenizer

    whole = Tokenizer.from_file(str(path(Source.DEEPSEEK)))
    for text in (*TEXTS, "<｜User｜>Hi<｜Assistant｜><think>\n", "<|EOT|> <｜place▁holder▁no▁7｜>"):
        assert words_of("deepseekv3", text) == whole.encode(text, add_special_tokens=False).ids


def test_text_comes_back_from_its_ids(name: str) -> None:
    assert [tokenizer(name).decode(words_of(name, text)) for text in TEXTS] == list(TEXTS)


def test_what_the_template_writes_between_brackets_is_one_id_or_known_to_be_text(name: str) -> None:
    added = tokenizer(name).get_added_vocab()
    found = set(re.findall(BRACKETED, str(tokenizer(name).chat_template)))
    text = {*AS_TEXT.get(name, "").split(), *(f"<{tag}>" for tag in TAGS), *(f"</{tag}>" for tag in TAGS)}
    assert {token: added.get(token) for token in found} == dict.fromkeys(found & text) | {
        token: words_of(name, token)[0] for token in found - text if len(words_of(name, token)) == 1
    }


def test_ends_are_one_id_each_and_the_tokenizers_end_is_one_of_them(name: str) -> None:
    tokens = tokenizer(name)
    ends = FAMILIES[name].ends if name in FAMILIES else ("<|im_end|>",)
    assert [len(words_of(name, end)) for end in ends] == [1] * len(ends)
    assert tokens.eos_token in ends
    assert words_of(name, tokens.eos_token) == [tokens.eos_token_id]


def test_only_some_tokenizers_put_a_beginning_before_the_text(name: str) -> None:
    tokens = tokenizer(name)
    start = [tokens.bos_token_id] if name in FAMILIES and FAMILIES[name].adds_bos else []
    assert tokens.encode("Hi") == start + words_of(name, "Hi")


def test_a_question_is_rendered_with_a_generation_prompt(name: str) -> None:
    messages = [{"role": "user", "content": "What is 6 times 7?"}]
    text = tokenizer(name).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert "What is 6 times 7?" in text
    assert text.endswith(PROMPTS.get(name, ""))


def test_flags_are_the_models() -> None:
    if any(FAMILIES[name].missing() for name in ("phi3", "phi4", "deepseekv3")):
        pytest.skip("not all packages are here")
    assert words_of("phi3", "<|user|>\n\n Hi") == words_of("phi3", "<|user|>Hi")  # rstrip
    assert words_of("phi4", "a \n<|im_sep|>\n b") == words_of("phi4", "a<|im_sep|>b")  # and lstrip
    ids = words_of("deepseekv3", "<｜User｜>Hi<｜Assistant｜><｜end▁of▁sentence｜>")
    assert tokenizer("deepseekv3").decode(ids, skip_special_tokens=True) == "<｜User｜>Hi<｜Assistant｜>"
    ids = words_of("qwen3", "<think>x</think><tool_call><|im_end|>")
    assert tokenizer("qwen3").decode(ids, skip_special_tokens=True) == "<think>x</think><tool_call>"


def test_gemma_cuts_newlines_and_tags_out_before_anything_merges() -> None:
    if reason := FAMILIES["gemma3"].missing():
        pytest.skip(reason)
    assert tokenizer("gemma3").tokenize("a\n\n\n<b>c") == ["a", "\n\n\n", "<b>", "c"]
