"""`sglang-multiturn doctor`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sglang_multiturn.doctor.examination import examine
from sglang_multiturn.doctor.launch import split_overrides
from sglang_multiturn.doctor.report import print_report, to_json
from sglang_multiturn.doctor.subject import Inputs
from sglang_multiturn.errors import ConfigError

_SHIPPED = Path(__file__).parents[1] / "tool_configs"


def doctor(
    overrides: Annotated[list[str] | None, typer.Argument(help="Further overrides of verl's, as in --verl.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Folder with tokenizer and chat template; weights are not needed.")
    ] = None,
    tools: Annotated[
        Path | None, typer.Option(help="Tool YAML, or the name of a shipped one: calculator, gsm8k.")
    ] = None,
    data: Annotated[
        list[Path] | None, typer.Option(help="Rows as .jsonl or .parquet; may be given several times.")
    ] = None,
    reward: Annotated[str | None, typer.Option(help="gsm8k, or file.py[:function] with verl's signature.")] = None,
    verl: Annotated[
        list[str] | None, typer.Option(help="'key=value ...' of a verl launch, or @file with one a line.")
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Ask every node of the running Ray cluster (never starts one).")
    ] = False,
    run_tools: Annotated[
        bool, typer.Option("--run-tools", help="Let the scripted conversation call your own tools.")
    ] = False,
    row: Annotated[int, typer.Option(min=0, help="Which row's prompt is shown and played, from 0.")] = 0,
    max_rows: Annotated[
        int, typer.Option(min=1, help="More rows than these are sampled, the longest among them.")
    ] = 2000,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also list what was looked at and is fine.")] = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout, and nothing else there.")
    ] = False,
) -> None:
    """Say what would go wrong in training, before a GPU is paid for.

    Offline and in seconds: shows the exact prompt of a row, proves what follows an assistant turn, plays a conversation
    with two calls through template, parser and token ledger, and looks at tools, rows, budgets and verl's launch keys.
    Ends with exit code 1 when something has to be mended. Every check is explained in docs/doctor.md.

    A model with your tools and rows:

        sglang-multiturn doctor --model Qwen/Qwen2.5-3B-Instruct --tools my_tools.yaml --data train.parquet

    A whole launch; model, tools, rows and reward function are taken from it:

        sglang-multiturn doctor --verl "actor_rollout_ref.model.path=$MODEL data.train_files=$DATA/train.parquet ..."
        sglang-multiturn doctor --verl @overrides.txt --ray

    In a script: doctor --json ... > report.json || exit 1
    """
    with contextlib.redirect_stdout(sys.stderr):  # users' modules may print while they are imported
        inputs = Inputs(
            model=model,
            tools=None if tools is None else shipped_tools(tools),
            data=tuple(data or ()),
            reward=reward,
            overrides=split_overrides([*(verl or ()), *(overrides or ())]),
            row=row,
            max_rows=max_rows,
            run_tools=run_tools,
            ray=ray,
        )
        if inputs.model is None and inputs.tools is None and not inputs.data and not inputs.overrides:
            raise ConfigError("nothing to look at: give --model, --tools, --data or --verl; --help has examples")
        result = examine(inputs)
    if json_output:
        typer.echo(to_json(result))
    else:
        print_report(result, Console(highlight=False), verbose=verbose)
    raise typer.Exit(int(result.has_problem))


def shipped_tools(tools: Path) -> Path:
    """The path of a shipped tool YAML where only its name was given."""
    shipped = _SHIPPED / f"{tools}.yaml"
    return shipped if not tools.suffix and not tools.exists() and shipped.is_file() else tools
