"""The model's folder: tokenizer, template, what ends a turn, and whether every id has an embedding."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_multiturn.doctor.findings import Findings, note, ok, problem
from sglang_multiturn.doctor.subject import Subject
from sglang_multiturn.errors import ConfigError, TemplateError

if TYPE_CHECKING:
    from sglang_multiturn.chat.hf_template import HFChatTemplate


def load_template(subject: Subject, model: str) -> Findings:
    """Load tokenizer and template, prove what can be appended, and say what was proved."""
    try:
        template = _load(subject, model)
    except ConfigError as error:
        yield problem("model-folder", str(error), "Give the folder that holds tokenizer.json and the chat template.")
        return
    except TemplateError as error:
        advice = "Use a chat model whose template can go on after a tool's or a user's message; docs/templates.md says which."
        yield problem("template-proof", str(error), advice, model)
        return
    subject.template = template
    yield from _proved(subject, template)


def _load(subject: Subject, model: str) -> HFChatTemplate:
    """As a worker gets it: verl may put another template in the tokenizer's place. Raises ConfigError, TemplateError."""
    from sglang_multiturn.chat.hf_template import HFChatTemplate

    given = subject.launch and subject.launch.get("actor_rollout_ref.model.custom_chat_template")
    if not given:
        return HFChatTemplate.from_pretrained(model, chat_template_kwargs=subject.chat_template_kwargs)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {model!r} has no tokenizer that can be loaded: {error}") from error
    tokenizer.chat_template = str(given)
    ends = (_json_of(model, "generation_config.json") or {}).get("eos_token_id")
    stops = [ends] if isinstance(ends, int) else ends or []
    return HFChatTemplate(tokenizer, stop_token_ids=stops, chat_template_kwargs=subject.chat_template_kwargs)


def _proved(subject: Subject, template: HFChatTemplate) -> Findings:
    for role in ("tool", "user"):
        if (refusal := template.refusal(role)) is None:
            continue
        if role == "tool" and subject.schemas:
            advice = "Train without tools, or take a model whose template has a tool role."
            yield problem("template-proof", f"tools cannot answer: {refusal}", advice)
        else:
            advice = "Only conversations in which that role speaks after the assistant are affected."
            yield note("template-proof", f"messages of a {role} cannot be appended: {refusal}", advice)
    proved = [role for role in ("tool", "user") if template.refusal(role) is None]
    started = time.perf_counter()
    type(template)(  # once more: loading the tokenizer is not in the time
        template.tokenizer,
        stop_token_ids=template.stop_token_ids,
        chat_template_kwargs=subject.chat_template_kwargs,
    )
    took_ms = (time.perf_counter() - started) * 1000
    yield ok(
        "template-proof",
        f"what follows an assistant turn was proved in {took_ms:.0f} ms: messages of a {' and of a '.join(proved)} are "
        "appended as the template itself would render them, token by token, and the earlier tokens stay as they are",
    )


def ends_of_turn(template: HFChatTemplate, model: str) -> Findings:
    """Which ids end a turn, and whether the model's files agree with its template."""
    named = ", ".join(f"{token_text(template, i)} ({i})" for i in template.stop_token_ids)
    yield ok("template-ends", f"a turn ends at {named}; these ids are sent with every generation")
    generation = _json_of(model, "generation_config.json")
    if generation is None:
        advice = "Harmless here, but other programs read it: copy it from the model's page."
        yield note("model-generation-config", "there is no generation_config.json: ends are the tokenizer's and the template's", advice, model)  # fmt: skip
        return
    eos = generation.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if wrong := [i for i in ids if not isinstance(i, int) or not 0 <= i < template.vocab_size]:
        advice = "The file belongs to another tokenizer; take the model's own."
        what = f"eos_token_id {wrong} is no id of this tokenizer (0 to {template.vocab_size - 1})"
        yield problem("model-generation-config", what, advice, "generation_config.json")
    elif not template.end_ids & {*ids}:
        ends = ", ".join(f"{token_text(template, i)} ({i})" for i in sorted(template.end_ids))
        yield note(
            "model-ends-differ",
            f"eos_token_id is {eos}, but the template ends a turn with {ends}",
            "This package stops at both. Other servers would run on, and a base model may never have learnt to end a "
            "turn: take the chat model, or teach it first.",
            "generation_config.json",
        )


def embedding_size(subject: Subject, template: HFChatTemplate, model: str) -> Findings:
    """Read the context's length, and compare the tokenizer's ids with the rows of the embedding."""
    config = _json_of(model, "config.json")
    if config is None:
        advice = "Give the model's whole folder to have context and embedding looked at; weights are not needed."
        yield note("model-config", "there is no config.json: context length and embedding size are not known", advice, model)  # fmt: skip
        return
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    longest = text.get("max_position_embeddings")
    subject.context_tokens = longest if isinstance(longest, int) else None
    rows = text.get("vocab_size")
    if isinstance(rows, int) and rows < template.vocab_size:
        yield problem(
            "model-embedding",
            f"the tokenizer has ids up to {template.vocab_size - 1}, the embedding has {rows} rows (vocab_size): an id "
            "beyond it ends the run inside a kernel",
            "Tokens were added without resizing the embedding: call resize_token_embeddings and save the model again.",
            "config.json",
        )
    else:
        yield ok("model-embedding", f"every id has an embedding; the context is {longest or 'not said'} tokens")


def token_text(template: HFChatTemplate, token: int) -> str:
    """One token as text, control tokens as they are written."""
    return str(template.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _json_of(model: str, name: str) -> dict[str, Any] | None:
    """A JSON file of a model folder, or of a hub model that transformers has at hand; None where there is none."""
    if Path(model).is_dir():
        path: str | None = str(Path(model) / name)
    else:
        from transformers.utils.hub import cached_file

        path = cached_file(model, name, local_files_only=True, _raise_exceptions_for_missing_entries=False)
    if path is None or not Path(path).is_file():
        return None
    try:
        read = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    return read if isinstance(read, dict) else None
