"""A status as something to read: a table on a terminal, or JSON. Nothing of ids or tool names moves a cursor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from pydantic import TypeAdapter
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sglang_multiturn.doctor.tokens_view import printable
from sglang_multiturn.request import RequestState
from sglang_multiturn.run_folder.in_flight import RunningRequest
from sglang_multiturn.schemas import plain_text
from sglang_multiturn.status.reading import Condition, Status, Worker

_MOST_REASONS = 5
_LIVE = (Condition.RUNNING, Condition.SILENT)
_HEAD = ("request", "state", "turns", "tokens", "sampled", "waiting for", "for", "age", "holds")
_NUMBERS = frozenset({"step", "turns", "tokens", "sampled", "for", "age"})
_STATE_STYLE = {
    RequestState.RUNNING: "green",
    RequestState.TOOL_CALLING: "yellow",
    RequestState.INTERACTING: "cyan",
    RequestState.SUSPENDED: "magenta",
}

_LONGEST_STATE = max(map(len, _STATE_STYLE))

Row = tuple[Worker, RunningRequest]


def rendered(status: Status, *, limit: int) -> RenderableType:
    """Totals, what is wrong, and a table of the `limit` oldest conversations; below it what ended processes left."""
    parts: list[RenderableType] = [*_totals(status)]
    parts += [Text(line, style="bold red") for line in _warnings(status)]
    if rows := status.rows(*_LIVE):
        parts.append(_table(rows, limit))
    for worker in status.workers:
        if worker.condition is Condition.GONE:
            parts += _gone(worker, status, limit)
    return Group(*parts)


def _totals(status: Status) -> Iterator[Text]:
    counts = status.in_flight(*_LIVE)
    where = f" in {len(status.folders)} folders" if len(status.folders) > 1 else ""
    if not counts.total():
        yield Text(f"nothing is in flight{where}; {status.finished} finished", style="bold")
        return
    states = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    yield Text(f"{counts.total()} in flight{where}: {states}; {status.finished} finished", style="bold")
    reasons = Counter(_waits_for(request).partition(" (")[0] for _, request in status.rows(*_LIVE))
    said = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common(_MOST_REASONS) if reason)
    if len(reasons) > 1 and said:
        yield Text(_one_line(f"waiting for: {said}"))


def _warnings(status: Status) -> Iterator[str]:
    for worker in status.workers:
        snapshot = worker.snapshot
        if worker.condition is Condition.SILENT:
            yield _one_line(
                f"{worker.label} has written nothing for {duration(worker.silent_s)}: it hangs, its disk is full, or its "
                "machine is gone; what is shown of it is of then"
            )
        if worker.condition is not Condition.GONE and (stuck_s := worker.stuck_s) is not None:
            yield _one_line(
                f"{worker.label}: the event loop has not moved for {duration(stuck_s)}, and no conversation with it; it "
                f"stands at {snapshot.loop_stuck_at}"
            )
    yield from (_one_line(f"not read: {reason}") for reason in status.unreadable)
    if status.earlier_files:
        yield f"not shown: {status.earlier_files} left by processes of earlier runs"


def _gone(worker: Worker, status: Status, limit: int) -> Iterator[RenderableType]:
    snapshot = worker.snapshot
    ended = datetime.fromtimestamp(snapshot.written_s).strftime("%Y-%m-%d %H:%M:%S")  # by the reader's own calendar
    stuck = "" if worker.stuck_s is None else f"; its event loop had not moved for {duration(worker.stuck_s)}"
    said = (
        f"{worker.label}: its process is gone. These {snapshot.in_flight} were in flight at {ended}, when it last wrote"
    )
    yield Text(f"\n{_one_line(said + stuck)}", style="bold red")
    yield _table([row for row in status.rows(Condition.GONE) if row[0] is worker], limit)


def _table(rows: Sequence[Row], limit: int) -> RenderableType:
    shown = rows[:limit]
    several = len({worker.label for worker, _ in rows}) > 1
    steps = any(request.step or request.validate for _, request in rows)
    head = [*_HEAD[:1], *(["step"] if steps else []), *_HEAD[1:], *(["worker"] if several else [])]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in head:
        if name in _NUMBERS:
            table.add_column(name, justify="right", no_wrap=True)
        else:
            table.add_column(name, overflow="fold", min_width=_LONGEST_STATE if name == "state" else None)
    for worker, request in shown:
        cells = _cells(worker, request)
        table.add_row(*(cells[name] for name in head))
    total = sum({worker.label: worker.snapshot.in_flight for worker, _ in rows}.values())
    if total == len(shown):
        return table
    return Group(table, Text(f"and {total - len(shown)} more, which began later"))


def _cells(worker: Worker, request: RunningRequest) -> dict[str, Text]:
    at_s = worker.snapshot.written_s
    waits_since_s = request.waiting_since_s
    if request.suspended_since_s is not None and not _goes_on(request):
        waits_since_s = request.suspended_since_s
    state = request.state.value
    if request.suspended_in is not None:
        state += f" in {request.suspended_in}"
    holds = ", ".join(f"{name} ×{n}" if n > 1 else name for name, n in Counter(request.tools_held).items())
    cells = {
        "request": request.request_id,
        "step": f"{request.step} val" if request.validate else str(request.step),
        "state": state,
        "turns": str(request.turns),
        "tokens": str(request.tokens),
        "sampled": str(request.sampled_tokens),
        "waiting for": _waits_for(request),
        "for": duration(at_s - waits_since_s),
        "age": duration(at_s - request.running_since_s),
        "holds": holds,
        "worker": worker.label,
    }
    styles = {"state": _STATE_STYLE.get(request.state, "")}
    return {name: Text(_one_line(text), style=styles.get(name, "")) for name, text in cells.items()}


def _waits_for(request: RunningRequest) -> str:
    return "to be resumed" if request.suspended_in is not None and not _goes_on(request) else request.waiting_for


def _goes_on(request: RunningRequest) -> bool:
    """Whether what it waits for goes on: a suspension ends generations, and neither tools nor users."""
    outside = (RequestState.TOOL_CALLING, RequestState.INTERACTING)
    return bool(request.waiting_for) and (request.suspended_in is None or request.suspended_in in outside)


def _one_line(text: str) -> str:
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def duration(seconds: float) -> str:
    """`4.2 s`, `3 min 12 s`, `2 h 05 min`."""
    seconds = max(0.0, seconds)
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


@dataclass(frozen=True, slots=True, kw_only=True)
class _WorkerJson:
    worker: str
    folder: str
    condition: Condition
    host: str
    pid: int
    started_s: float
    written_s: float
    loop_stuck_s: float | None
    loop_stuck_at: str
    in_flight: int
    states: dict[RequestState, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowJson:
    worker: str
    condition: Condition
    waiting_s: float
    age_s: float
    request: RunningRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class _StatusJson:
    at_s: float
    folders: list[str]
    in_flight: int
    states: dict[RequestState, int]
    finished: int
    workers: list[_WorkerJson]
    requests: list[_RowJson]
    """Oldest first, those of ended processes last."""
    unreadable: list[str]
    earlier_files: int


_STATUS_JSON = TypeAdapter(_StatusJson)


def to_json(status: Status, *, limit: int | None) -> str:
    """One line with everything, of at most `limit` conversations; what is in no file is not guessed."""
    rows = status.rows(*_LIVE) + status.rows(Condition.GONE)
    counts = status.in_flight(*_LIVE)
    said = _StatusJson(
        at_s=status.at_s,
        folders=[plain_text(str(folder)) for folder in status.folders],
        in_flight=counts.total(),
        states=dict(counts),
        finished=status.finished,
        workers=[_worker_json(worker) for worker in status.workers],
        requests=[_row_json(worker, request) for worker, request in rows[:limit]],
        unreadable=[plain_text(reason) for reason in status.unreadable],
        earlier_files=status.earlier_files,
    )
    return _STATUS_JSON.dump_json(said).decode()


def _worker_json(worker: Worker) -> _WorkerJson:
    snapshot = worker.snapshot
    return _WorkerJson(
        worker=worker.label,
        folder=plain_text(str(worker.folder)),
        condition=worker.condition,
        host=snapshot.process.host,
        pid=snapshot.process.pid,
        started_s=snapshot.started_s,
        written_s=snapshot.written_s,
        loop_stuck_s=worker.stuck_s,
        loop_stuck_at=snapshot.loop_stuck_at,
        in_flight=snapshot.in_flight,
        states=dict(snapshot.states),
    )


def _row_json(worker: Worker, request: RunningRequest) -> _RowJson:
    at_s = worker.snapshot.written_s
    return _RowJson(
        worker=worker.label,
        condition=worker.condition,
        waiting_s=max(0.0, at_s - request.waiting_since_s),
        age_s=max(0.0, at_s - request.running_since_s),
        request=request,
    )
