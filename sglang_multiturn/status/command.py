"""`sglang-multiturn status`."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from sglang_multiturn.errors import ConfigError
from sglang_multiturn.status.reading import StatusReader
from sglang_multiturn.status.view import rendered, to_json

_SHOWN = 40
_FILE_COLUMNS = 140
_WATCH_S = 1.0
_MARGIN_LINES = 8
"""Of a terminal, for what stands around the table."""


def status(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="A rollout's --out folder, verl's journal_dir, or a folder that holds several."
        ),
    ],
    json_output: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout; with --watch one a second, a line each.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until Ctrl-C.")] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Conversations that are shown, the oldest [default: 40; --json: all].")
    ] = None,
) -> None:
    """Say what is in flight now: every conversation, oldest first, what it waits for and since when.

    Reads files that each process of a run writes about once a second. So it works from any terminal and node that sees
    the folder, while a tool holds up the event loop (which it says), and after a run was killed: then it shows what was
    in flight. Nothing is asked of the run itself. docs/status.md explains the columns.

    A rollout in another terminal:

        sglang-multiturn rollout ... --out runs/a

        sglang-multiturn status runs/a --watch

    In verl, with journal_dir: runs/journal under rollout: in the tool YAML:

        sglang-multiturn status runs/journal

    Which conversations have waited for more than a minute?

        sglang-multiturn status runs/a --json | jq '.requests[] | select(.waiting_s > 60) | .request.request_id'
    """
    reader = StatusReader(run)
    if not watch:
        _say(reader, json_output=json_output, limit=limit)
        return
    with contextlib.suppress(KeyboardInterrupt):
        if json_output:
            _watch_as_json(reader, limit)
        else:
            _watch(reader, limit)


def _say(reader: StatusReader, *, json_output: bool, limit: int | None) -> None:
    now = reader.read()
    if json_output:
        typer.echo(to_json(now, limit=limit))
    else:
        _console().print(rendered(now, limit=limit or _SHOWN))


def _watch_as_json(reader: StatusReader, limit: int | None) -> None:
    while True:
        typer.echo(to_json(reader.read(), limit=limit))
        time.sleep(_WATCH_S)


def _watch(reader: StatusReader, limit: int | None) -> None:
    console = _console()
    if not console.is_terminal:
        raise ConfigError("--watch draws on a terminal, and stdout is none; --watch --json writes a line a second")
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            room = max(1, console.height - _MARGIN_LINES)
            live.update(rendered(reader.read(), limit=min(limit or room, room)), refresh=True)
            time.sleep(_WATCH_S)


def _console() -> Console:
    """One for stdout, wide enough where no terminal says how wide it is."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=max(_FILE_COLUMNS, console.width))
