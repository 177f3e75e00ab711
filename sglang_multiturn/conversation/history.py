"""What a conversation's next turn is given: the tokens so far and a delta, or a new row.

`history: keep` appends to the row, so that the engine goes on from exactly what it saw and said. A template that
renders earlier turns otherwise once something follows would show a deployment, which renders anew each turn, other
tokens; `history: split` ends the row there and starts another with the whole conversation rendered anew.

Budgets count what was said, each token once. What a user or tool says counts as the delta it would be under `keep`,
so that a conversation ends at the same length under both; the rest of a later row's prompt was counted before. A later
row never exceeds the model's context, nor `max_prompt_tokens` and `max_response_tokens` together.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sglang_multiturn.chat.drift import DriftExample, DriftKind, DriftLog, DriftReport, compare, refused
from sglang_multiturn.chat.template import ChatTemplate, DeltaPiece
from sglang_multiturn.config import RolloutConfig
from sglang_multiturn.errors import TemplateError
from sglang_multiturn.interactions.base import Interaction
from sglang_multiturn.request import AsyncRolloutRequest, StopReason
from sglang_multiturn.schemas import Message, ToolSchema
from sglang_multiturn.tokens import Origin, TokenLedger
from sglang_multiturn.tools.registry import ToolRegistry

logger = logging.getLogger(__name__)

_DRIFT_METRICS: Mapping[DriftKind, str] = {
    DriftKind.SAMPLED_TEXT: "drift_sampled_text_tokens",
    DriftKind.OTHER_END: "drift_other_end_tokens",
    DriftKind.HISTORY: "drift_history_tokens",
    DriftKind.NOT_COMPARABLE: "drift_not_comparable_tokens",
    DriftKind.SPECIAL_TOKEN: "drift_special_tokens",
    DriftKind.BOUNDARY: "drift_boundary_tokens",
}


def check_template(template: ChatTemplate, tools: ToolRegistry, interaction: Interaction | None) -> None:
    """Refuse, before anything is sampled, what could only fail later.

    Raises:
        TemplateError: tools or a user are configured whose answers the model's template refuses.
    """
    if tools.names and (reason := template.refusal("tool")) is not None:
        raise TemplateError(
            f"tools are configured ({', '.join(tools.names)}) but their answers cannot be shown: {reason}; "
            "use a model whose chat template knows tools, or configure none"
        )
    if interaction is not None and (reason := template.refusal("user")) is not None:
        raise TemplateError(f"an interaction is configured but what its user says cannot be shown: {reason}")


@dataclass(slots=True)
class _Shown:
    """How many of the conversation's messages a row renders, and how many of them stood in its prompt."""

    in_prompt: int
    so_far: int


class History:
    """One conversation's messages on their way into its rows."""

    def __init__(
        self,
        request: AsyncRolloutRequest,
        template: ChatTemplate,
        config: RolloutConfig,
        max_model_len: int,
    ) -> None:
        self._request = request
        self._template = template
        self._tools: Sequence[ToolSchema] = ()
        self._config = config
        self._max_model_len = min(config.max_model_len or max_model_len, max_model_len)
        self._max_row_tokens = self._max_model_len
        if config.max_prompt_tokens is not None:
            self._max_row_tokens = min(self._max_model_len, config.max_prompt_tokens + config.max_response_tokens)
        self._shown: list[_Shown] = []
        self.drift_examples: tuple[DriftExample, ...] = ()

    # Growing

    def begin(self, tools: Sequence[ToolSchema]) -> StopReason | None:
        """Render the prompt, which shows `tools`; `prompt_too_long` when it is. Raises TemplateError."""
        self._tools = tools
        ledger = self._request.ledger
        ledger.append_prompt(self._template.encode_prompt(self._request.messages, self._tools))
        self._note_prompt()
        limit = min(self._config.max_prompt_tokens or self._max_model_len, self._max_model_len - 1)
        return StopReason.PROMPT_TOO_LONG if ledger.num_prompt_tokens > limit else None

    def observe(self, messages: Sequence[Message], *, turn: int, call_ids: Sequence[str | None]) -> StopReason | None:
        """Show the engine what was said after its turn, if what is left of the budget holds it and a token more.

        Args:
            messages: of one role, and already the last of the request's.
            turn: the assistant turn they answer.
            call_ids: one a message; None where it answers no call.
        """
        ledger = self._request.ledger
        earlier = self._request.messages[: len(self._request.messages) - len(messages)]
        answered = any(message.role == "tool" for message in earlier)
        pieces = self._template.encode_delta(messages, last_id=ledger.last_sampled_id, answered_before=answered)
        added = sum(len(piece.ids) for piece in pieces)
        rendered = self._rendered_anew(messages, pieces)
        row_tokens = ledger.num_tokens + added if rendered is None else len(rendered)
        if exhausted := self._over(self._request.num_response_tokens + added, row_tokens):
            return exhausted
        if rendered is not None:
            self._begin_row(rendered, added)
            return None
        for piece in pieces:
            call_id = None if piece.message_index is None else call_ids[piece.message_index]
            ledger.append_observation(piece.ids, origin=piece.origin, turn=turn, call_id=call_id)
        self._shown[-1].so_far = len(self._request.messages)
        return None

    def exhausted(self) -> StopReason | None:
        """Why nothing more can be sampled; None when something can."""
        return self._over(self._request.num_response_tokens, self._request.ledger.num_tokens)

    @property
    def max_turn_tokens(self) -> int:
        """How many tokens the next turn may sample: at least one unless `exhausted`."""
        left = min(
            self._config.max_response_tokens - self._request.num_response_tokens,
            self._max_row_tokens - self._request.ledger.num_tokens,
        )
        return min(left, self._config.max_turn_tokens or left)

    def _over(self, response_tokens: int, row_tokens: int) -> StopReason | None:
        if response_tokens >= self._config.max_response_tokens:
            return StopReason.MAX_RESPONSE_TOKENS
        if row_tokens >= self._max_model_len:
            return StopReason.MAX_MODEL_LEN
        return StopReason.MAX_RESPONSE_TOKENS if row_tokens >= self._max_row_tokens else None

    def _rendered_anew(self, messages: Sequence[Message], pieces: Sequence[DeltaPiece]) -> list[int] | None:
        """The next row's prompt; None where the row goes on, being what the template renders as it is."""
        if self._config.history == "keep" or all(self._template.keeps_history(m.role) for m in messages):
            return None
        if self._answers_no_call():
            self._request.metrics.refused_rows += 1
            return None
        try:
            rendered = self._template.encode_prompt(self._request.messages, self._tools)
            kept = [*self._request.ledger.input_ids, *(token for piece in pieces for token in piece.ids)]
            return None if rendered == kept else rendered
        except TemplateError as error:
            self._request.metrics.refused_rows += 1
            logger.info("request %s: the row goes on: %s", self._request.request_id, error)
            return None

    def _answers_no_call(self) -> bool:
        """Whether a tool message answers a broken call, which stands in no message: templates may leave it out."""
        said = self._request.messages[self._shown[0].in_prompt :]
        made = {call.id for message in said for call in message.tool_calls or ()}
        return any(message.role == "tool" and message.tool_call_id not in made for message in said)

    def _begin_row(self, prompt_ids: list[int], added: int) -> None:
        row = TokenLedger()
        row.append_prompt(prompt_ids)
        self._request.rows.append(row)
        self._request.rendered_tokens += added
        self._request.metrics.new_rows += 1
        self._note_prompt()

    def _note_prompt(self) -> None:
        shown = len(self._request.messages)
        self._shown.append(_Shown(shown, shown))

    # Looking back

    def check_drift(self, log: DriftLog, broken_turns: Collection[int]) -> None:
        """Compare every row with the rendering of its messages, count what differs, and do what `drift_check` says.

        Raises:
            TemplateError: under `fail`, when control tokens or boundaries differ.
        """
        if self._config.drift_check == "off":
            return
        started = time.monotonic()
        reports = list(self._reports(broken_turns))
        metrics = self._request.metrics
        for kind, tokens in itertools.chain.from_iterable(report.tokens.items() for report in reports):
            setattr(metrics, _DRIFT_METRICS[kind], getattr(metrics, _DRIFT_METRICS[kind]) + tokens)
        metrics.drift_s += time.monotonic() - started
        first = {example.kind: example for report in reversed(reports) for example in report.examples}
        whole = DriftReport(examples=tuple(first.values()))
        self.drift_examples = whole.examples
        if self._config.drift_check == "warn":
            log.note(self._request.request_id, whole)
        if self._config.drift_check == "fail" and whole.drift is not None:
            raise TemplateError(
                f"request {self._request.request_id}: {whole.drift}; drift_check=fail allows no such difference "
                "(`count` goes on and counts it)"
            )

    def _reports(self, broken_turns: Collection[int]) -> Iterator[DriftReport]:
        for row, shown in zip(self._request.rows, self._shown, strict=False):
            if all(segment.origin in (Origin.PROMPT, Origin.SAMPLED) for segment in row.segments):
                continue  # a prompt is a rendering itself
            messages = self._request.messages[: shown.so_far]
            appended = {message.role for message in messages[shown.in_prompt :]} - {"assistant"}
            try:
                canonical = self._template.encode_prompt(messages, self._tools)
            except TemplateError as error:
                yield refused(row, str(error))
                continue
            kept = all(self._template.keeps_history(role) for role in appended)
            yield compare(row, canonical, self._template, history_kept=kept, broken_turns=broken_turns)
