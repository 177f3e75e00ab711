"""The tiny model's tokenizer: a byte-level BPE of under a thousand tokens in which this task's phrases are one token each.

Splitting only at digits and line breaks lets merges span spaces, so a question is some twenty tokens and a call about
ten: short enough to train and sample on a CPU. Numbers are cut left to right into groups of one or two digits, which
makes copying a number a matter of copying two or three tokens. All 256 bytes are in the vocabulary, so any text at all
round-trips, only in more tokens.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
from tiny_demos import Mixture, demonstrate
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from word_problems import problems

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added, but not special: as with Qwen, `skip_special_tokens` leaves them in the text, where calls are parsed."""

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
SPLIT = r"\p{N}{1,2}|[^\p{N}\n]+|\n+"
LARGEST_VOCABULARY = 1024
CORPUS_SEED, CORPUS_CONVERSATIONS = 5, 1500


def corpus(tools: list[dict[str, Any]]) -> Iterator[str]:
    """Rendered conversations, cut at added tokens and digits, neither of which may enter a merge."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(CHAT_TEMPLATE.read_text(encoding="utf-8"))
    rng = random.Random(CORPUS_SEED)
    boundary = re.compile("|".join([*map(re.escape, SPECIAL_TOKENS + TOOL_TOKENS), r"\d"]))
    for _, problem in zip(range(CORPUS_CONVERSATIONS), problems(CORPUS_SEED), strict=False):
        messages = demonstrate(problem, Mixture().draw(rng), rng)
        yield from filter(None, boundary.split(template.render(messages=messages, tools=tools)))


def with_digit_pairs(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with a merge for each of `00` to `99`."""
    state = json.loads(tokenizer.to_str())
    for number in range(100):
        pair = f"{number:02d}"
        state["model"]["vocab"].setdefault(pair, len(state["model"]["vocab"]))
        state["model"]["merges"].append(list(pair))
    return Tokenizer.from_str(json.dumps(state))


def build_tokenizer(tools: list[dict[str, Any]]) -> PreTrainedTokenizerFast:
    """Train the tokenizer on prompts that offer `tools`, and give it the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=LARGEST_VOCABULARY - 100 - len(SPECIAL_TOKENS + TOOL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(tools), trainer)
    tokenizer = with_digit_pairs(tokenizer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in TOOL_TOKENS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    return wrapped
