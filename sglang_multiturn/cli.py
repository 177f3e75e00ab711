"""The command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sglang_multiturn.doctor.command import doctor, shipped_tools
from sglang_multiturn.errors import ConfigError
from sglang_multiturn.run_folder.asked import EngineName, RunOptions
from sglang_multiturn.standalone import new_run, resume_run
from sglang_multiturn.status.command import status

app = typer.Typer(
    help="Multi-turn, tool-using rollouts on SGLang.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(doctor)
app.command()(status)


@app.callback()
def _root() -> None:
    """Multi-turn, tool-using rollouts on SGLang."""


@app.command()
def rollout(
    context: typer.Context,
    data: Annotated[
        Path | None, typer.Option(help="Rows as .jsonl or .parquet: verl's shape, or {'messages': [...]}.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run: trajectories.jsonl, summary.json.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this folder; no other option is needed.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model folder or hub name; not needed by a scripted run.")] = None,
    tools: Annotated[
        Path | None, typer.Option(help="Tool YAML, or the name of a shipped one: calculator, gsm8k.")
    ] = None,
    engine: Annotated[EngineName, typer.Option(help="'scripted' is a dry run without a model.")] = EngineName.SGLANG,
    script: Annotated[
        str, typer.Option(help="Scripted only: calls:N, gsm8k, or file.py:function (RequestSpec -> turns).")
    ] = "calls:1",
    reward: Annotated[str | None, typer.Option(help="gsm8k, or file.py[:function] with verl's signature.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Rollouts a row: the group size.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0)] = 1.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    top_k: Annotated[int, typer.Option(help="-1 is off.")] = -1,
    max_response_tokens: Annotated[int | None, typer.Option(help="Budget of a whole conversation.")] = None,
    max_assistant_turns: Annotated[int | None, typer.Option(help="Generations a conversation.")] = None,
    max_concurrent: Annotated[int | None, typer.Option(help="Conversations at the same time.")] = None,
    rollout_timeout_s: Annotated[float | None, typer.Option(help="Seconds a conversation may take.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the engine.")] = 0,
    journal_fsync: Annotated[
        bool | None,
        typer.Option("--journal-fsync/--no-journal-fsync", help="Keep what has ended through a power cut too."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier run left in --out.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="With --resume: ask those that FAILED again.")
    ] = False,
) -> None:
    """Roll out every row of a data file and write one trajectory for each.

    Try it without a model:

        sglang-multiturn rollout --engine scripted --script calls:2 --tools tool_configs/calculator.yaml --data rows.jsonl --out runs/dry

    After Ctrl-C, a crash or kill -9, go on where it was. What has ended is kept, everything else is asked again:

        sglang-multiturn rollout --resume runs/dry
    """
    given = _given(context)
    if resume is not None:
        _refuse_with_resume(resume, given)
        options = {key: value for key, value in given.items() if key in RunOptions.model_fields}
        raise typer.Exit(resume_run(resume, options, retry_failed=retry_failed))
    if data is None or out is None:
        raise ConfigError("--data and --out are needed, or --resume with the folder of a run that was begun")
    if retry_failed:
        raise ConfigError("--retry-failed goes with --resume: only a run that was begun has rollouts that FAILED")
    raise typer.Exit(new_run(RunOptions.model_validate(given), out, overwrite=overwrite))


def _given(context: typer.Context) -> dict[str, Any]:
    """The options that stand on the command line, whether or not they say what the default says."""
    given = {
        name: value
        for name, value in context.params.items()
        if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    }
    if (tools := given.get("tools")) is not None:
        given["tools"] = shipped_tools(tools)
    return {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}


def _refuse_with_resume(folder: Path, given: dict[str, Any]) -> None:
    if "out" in given and Path(given["out"]).resolve() != folder.resolve():
        raise ConfigError(
            f"--out {given['out']} contradicts --resume {folder}: a run stays in its folder; leave it out"
        )
    if "overwrite" in given:
        raise ConfigError("--overwrite contradicts --resume: one forgets what has ended, the other keeps it")
