"""From a list of byte tokens with ranks, as tiktoken has it, to the words and merges of a byte-level BPE model."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

Ranks = dict[bytes, int]


def ranks_of(file: Path) -> Ranks:
    """A `.tiktoken` file: one token a line, base64, and its rank."""
    lines = file.read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}


def spelled(ranks: Ranks) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Words with their ranks, and merges, in the letters that byte-level models write bytes with."""
    letters = _byte_letters()
    words = {token: token.decode("latin-1").translate(letters) for token in ranks}
    merges = [(words[left], words[right]) for left, right in merges_of(ranks)]
    return {words[token]: rank for token, rank in ranks.items()}, merges


def merges_of(ranks: Ranks) -> Iterator[tuple[bytes, bytes]]:
    """The pairs that make the tokens, lowest rank first.

    A token is made of the two parts that all merges of a lower rank leave of it. Where they leave more than two (Llama 3
    and Qwen3.5 have such tokens), every pair of tokens that makes it counts.
    """
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            cuts = [i for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
            pairs = [(token[:i], token[i:]) for i in cuts]
            yield from pairs if len(pairs) == 1 else _last_merge(token, rank, ranks) or pairs


def _last_merge(token: bytes, rank: int, ranks: Ranks) -> list[tuple[bytes, bytes]]:
    """The one pair that makes `token` after all merges of a lower rank, or nothing where they leave more than a pair."""
    parts = [token[i : i + 1] for i in range(len(token))]
    of_pairs = [ranks.get(token[i : i + 2], rank) for i in range(len(token) - 1)]
    while len(parts) > 2:
        lowest = min(of_pairs)
        if lowest >= rank:
            return []
        i = of_pairs.index(lowest)
        parts[i] += parts.pop(i + 1)
        del of_pairs[i]
        if i > 0:
            of_pairs[i - 1] = ranks.get(parts[i - 1] + parts[i], rank)
        if i < len(of_pairs):
            of_pairs[i] = ranks.get(parts[i] + parts[i + 1], rank)
    return [(parts[0], parts[1])]


def _byte_letters() -> dict[int, str]:
    """GPT-2's printable letter for every byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + i) for i, byte in enumerate(others)}
