"""A model family's tokenizer, put together: vocabulary, added tokens, chat template."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, models, processors

from gguf_metadata import gguf_fields
from vocabularies import PACKAGES, Source, path, vocabulary

if TYPE_CHECKING:
    from pathlib import Path

TRL = PACKAGES / "trl" / "chat_templates"
AXOLOTL = PACKAGES / "axolotl" / "utils" / "chat_templates" / "templates"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the tokenizer of a family is made of, and how far it is the real one."""

    name: str
    """Its name, as tests print it."""
    template: Path
    """The file with the chat template: Jinja, or a GGUF file that has it in its metadata."""
    source: Source
    """The vocabulary, and the way text is divided."""
    tokens: tuple[AddedToken, ...] = ()
    """What is added to the vocabulary, in this order, with the model's own flags."""
    bos: str | None = None
    eos: str
    pad: str | None = None
    ends: tuple[str, ...]
    """The tokens that end a turn: the `eos_token_id`s of the generation config, as far as known."""
    adds_bos: bool = False
    """`encode(text)` puts `bos` before the text, though the template may have written it already."""
    stand_in: bool = False
    """The vocabulary is another family's."""
    vocabulary_note: str
    """One sentence for a table."""

    def chat_template(self) -> str:
        """The template's text."""
        if self.template.suffix == ".gguf":
            [text] = gguf_fields(self.template, "tokenizer.chat_template")
            return str(text)
        return self.template.read_text(encoding="utf-8")

    def missing(self) -> str | None:
        """Why the tokenizer cannot be built here, for a test to skip with; None if it can."""
        gone = [str(file) for file in (self.template, path(self.source)) if not file.is_file()]
        return f"{', '.join(gone)}: not there; `make setup` installs it" if gone else None


def build(family: Family) -> Any:
    """A `PreTrainedTokenizerFast`; well under a second once the vocabulary has been read."""
    from transformers import PreTrainedTokenizerFast

    parts = vocabulary(family.source)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), clean_up_tokenization_spaces=False)
    backend = wrapped.backend_tokenizer  # filled here, since the class would copy a vocabulary that is shared
    backend.model = parts.model
    if parts.normalizer is not None:
        backend.normalizer = parts.normalizer
    if parts.pre_tokenizer is not None:
        backend.pre_tokenizer = parts.pre_tokenizer
    backend.decoder = parts.decoder
    _add(backend, (*(() if family.stand_in else parts.tokens), *family.tokens))
    wrapped.eos_token, wrapped.bos_token, wrapped.pad_token = family.eos, family.bos, family.pad
    if family.adds_bos:
        start = [(family.bos, backend.token_to_id(family.bos))]
        backend.post_processor = processors.TemplateProcessing(single=[family.bos, "$A"], special_tokens=start)
    wrapped.chat_template = family.chat_template()
    return wrapped


def _add(backend: Tokenizer, tokens: tuple[AddedToken, ...]) -> None:
    """Add tokens in their order: it decides their ids."""
    for is_special, group in groupby(tokens, key=lambda token: token.special):
        (backend.add_special_tokens if is_special else backend.add_tokens)(list(group))
