"""Plain text never becomes a control token, and is encoded as the tokenizer encodes it everywhere else."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_multiturn.chat.encoding import ControlToken, TextEncoder

from chat_templates import missing
from families import NAMES, tokenizer

pytest.importorskip("transformers")

ANCHOR = "\ue0fe\ue0ffanchor\ue0ff"
WORDS = ["", "a b", " lead", "trail ", "\n\nlines\n", "é 猫 😀", "def f(x):\n    return x", '{"k": [1, 2]}', "1234567"]


@pytest.fixture(scope="session", params=NAMES)
def named(request: pytest.FixtureRequest) -> tuple[Any, TextEncoder]:
    if reason := missing(request.param):
        pytest.skip(reason)
    tokens = tokenizer(request.param)
    return tokens, TextEncoder(tokens)


def ids(tokens: list[Any]) -> list[int]:
    return [token.id for token in tokens]


def test_a_rendering_is_encoded_as_transformers_encodes_it(named: tuple[Any, TextEncoder]) -> None:
    tokens, encoder = named
    some = [control.text for control in list(encoder.controls.values())[:40]]
    for text in [*WORDS, "".join(some), " x ".join(some), "\n".join(some)]:
        assert encoder.encode_rendering(text) == tokens.encode(text, add_special_tokens=False)


def test_text_behind_a_control_token_is_encoded_as_in_the_whole(named: tuple[Any, TextEncoder]) -> None:
    tokens, encoder = named
    for control in [control for control in encoder.controls.values() if control.special][:3]:
        for text in WORDS:
            whole = tokens.encode(control.text + text, add_special_tokens=False)
            said = text.lstrip() if control.strips_right else text
            assert [control.id, *(ids(encoder.encode_plain(said)) if said else [])] == whole


def test_every_control_token_s_text_stays_plain_text(named: tuple[Any, TextEncoder]) -> None:
    tokens, encoder = named
    for control in encoder.controls.values():
        plain = ids(encoder.encode_plain(f"a{control.text}b"))
        assert not encoder.control_ids.intersection(plain)
    said = f"x {' '.join(list(encoder.controls)[:20])} y"
    assert tokens.decode(ids(encoder.encode_plain(said)), clean_up_tokenization_spaces=False).strip() == said


def test_what_was_taken_apart_renders_to_no_control_token(named: tuple[Any, TextEncoder]) -> None:
    _, encoder = named
    controls = [c for c in encoder.controls.values() if not (c.strips_left or c.strips_right)][:12]
    said = "".join(control.text for control in controls)
    mark = encoder.unused_mark([said])
    first = controls[0]
    rendering = f"{first.text}{encoder.take_apart(said, mark)}{first.text}"
    assert encoder.encode_marked(rendering, mark) == [first.id, *ids(encoder.encode_plain(said)), first.id]


def test_offsets_tell_which_characters_a_token_stands_for(named: tuple[Any, TextEncoder]) -> None:
    _, encoder = named
    text = "one two\nthree"
    tokens = encoder.encode_plain(text)
    assert [text[token.start : token.end].strip() for token in tokens if text[token.start : token.end].strip()]
    assert tokens[-1].end == len(text)
    assert all(before.end <= after.end for before, after in itertools.pairwise(tokens))


def test_a_rendering_is_cut_as_the_tokenizer_cuts_it() -> None:
    encoder = TextEncoder(tokenizer("tiny"))
    pieces = list(encoder.split("a<|im_start|>b<|im_end|>"))
    assert [p.text if isinstance(p, ControlToken) else p for p in pieces] == [
        "a",
        "<|im_start|>",
        "b",
        "<|im_end|>",
        "",
    ]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["<|im_end|>", "<|", "im_end", "|>", "<|im_", ANCHOR, " ", "é"]), max_size=12))
def test_no_arrangement_of_pieces_becomes_a_control_token(pieces: list[str]) -> None:
    encoder = TextEncoder(tokenizer("tiny"))
    text = "".join(pieces)
    tokens = encoder.encode_plain(text)
    assert not encoder.control_ids.intersection(ids(tokens))
    assert all(token.id >= 0 for token in tokens)
    assert tokenizer("tiny").decode(ids(tokens), clean_up_tokenization_spaces=False) == text


def test_a_long_text_full_of_control_tokens_takes_linear_time() -> None:
    encoder = TextEncoder(tokenizer("tiny"))
    assert len(encoder.encode_plain("<|im_end|>" * 20_000)) >= 20_000
    assert not encoder.control_ids.intersection(ids(encoder.encode_plain(ANCHOR * 20_000)))
