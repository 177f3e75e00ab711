"""What `rollout` was asked, as `run.json` keeps it: all that is needed to go on after a crash, and to see that nothing
that decides what comes out has changed meanwhile."""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import platform
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from sglang_multiturn.config import RolloutConfig, validate_config
from sglang_multiturn.engine.base import SamplingParams
from sglang_multiturn.errors import ConfigError
from sglang_multiturn.run_folder.durable import replace_file

FREE_OPTIONS = frozenset({"max_concurrent", "journal_fsync"})
"""Options that change how fast or how safely a run goes, and nothing of what comes out."""

_FILES = ("data", "tools", "reward", "script")
_PACKAGES = ("sglang_multiturn", "sglang", "transformers", "torch")
_OVERRIDES = ("max_response_tokens", "max_assistant_turns", "max_concurrent", "rollout_timeout_s", "journal_fsync")
_SHOWN_CHANGES = 12
_BLOCK_BYTES = 1 << 20


class EngineName(StrEnum):
    """Engines the command line can start."""

    SGLANG = "sglang"
    SCRIPTED = "scripted"


class RunOptions(BaseModel):
    """The options of `rollout`, by their names there."""

    model_config = ConfigDict(frozen=True)

    data: str
    model: str | None = None
    tools: str | None = None
    engine: EngineName = EngineName.SGLANG
    script: str = "calls:1"
    reward: str | None = None
    samples: int = 1
    limit: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_response_tokens: int | None = None
    max_assistant_turns: int | None = None
    max_concurrent: int | None = None
    rollout_timeout_s: float | None = None
    seed: int = 0
    journal_fsync: bool | None = None

    def absolute(self) -> Self:
        """The same with absolute paths, which mean the same wherever the run is resumed."""
        named = {name: getattr(self, name) for name in (*_FILES, "model")}
        return self.model_copy(update={name: _absolute(name, v) for name, v in named.items() if v is not None})

    @property
    def sampling(self) -> SamplingParams:
        """How every turn is decoded."""
        return SamplingParams(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)

    def config(self, of_tools: RolloutConfig) -> RolloutConfig:
        """`rollout:` of the tool YAML, with the options on top. Raises ConfigError."""
        given = {key: getattr(of_tools, key) for key in of_tools.model_fields_set}
        asked = {key: value for key in _OVERRIDES if (value := getattr(self, key)) is not None}
        return validate_config({**given, **asked}, RolloutConfig, "command line")

    def files(self) -> Iterator[tuple[str, Path]]:
        """Options that name a file, and the file; a builtin's name is none."""
        for name in _FILES:
            value = getattr(self, name)
            if value is not None and (file := _file_of(name, value)) is not None:
                yield name, Path(file)


class InputFile(BaseModel):
    """A file that decides what comes out, recognised again by its content."""

    model_config = ConfigDict(frozen=True)

    path: str
    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Self:
        """What is there now. Raises OSError."""
        digest, num_bytes = hashlib.sha256(), 0
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                num_bytes += len(block)
        return cls(path=str(path), num_bytes=num_bytes, sha256=digest.hexdigest())

    def __str__(self) -> str:
        return f"{self.num_bytes} bytes, sha256 {self.sha256[:12]}"


class Attempt(BaseModel):
    """One process that worked on the run."""

    model_config = ConfigDict(frozen=True)

    started_at: str
    """ISO 8601, with the time zone."""
    host: str
    pid: int
    finished_before: int
    """Rollouts that had ended when it began."""
    wall_s: float | None = None
    """None while it runs; for one that was killed, until its last sign of life."""


class Asked(BaseModel):
    """All of `run.json`."""

    model_config = ConfigDict(frozen=True)

    format: Literal[1] = 1
    options: RunOptions
    files: dict[str, InputFile]
    """By the option that names it."""
    rollouts: int
    """How many trajectories the run has when it is complete."""
    versions: dict[str, str]
    attempts: tuple[Attempt, ...] = ()

    @classmethod
    def new(cls, options: RunOptions, rollouts: int) -> Self:
        """A run that begins now. Raises OSError: a file cannot be read."""
        options = options.absolute()
        files = {name: InputFile.of(path) for name, path in options.files()}
        return cls(options=options, files=files, rollouts=rollouts, versions=installed_versions())

    @classmethod
    def read(cls, folder: Path) -> Self:
        """What the run in `folder` was asked. Raises ConfigError: none was begun there, or not by this version."""
        path = folder / "run.json"
        if not path.is_file():
            raise ConfigError(f"--resume {folder}: no run was begun there: {path} does not exist")
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(
                f"{path}: {where!r}: {first['msg']}; it was written by another version of this package, or edited"
            ) from error

    def write(self, folder: Path) -> None:
        """In one step. Raises OSError."""
        replace_file(folder / "run.json", self.model_dump_json(indent=2) + "\n")

    def with_options(self, given: Mapping[str, Any], folder: Path) -> Self:
        """The same run with the options that a `--resume` brings.

        `FREE_OPTIONS` may differ. A file may stand elsewhere, if its content is the same.

        Raises:
            ConfigError: an option contradicts what the run was asked, or a file has changed or is gone.
        """
        now = RunOptions.model_validate({**self.options.model_dump(), **given}).absolute()
        for name in given:
            if (
                name not in FREE_OPTIONS
                and name not in self.files
                and getattr(now, name) != getattr(self.options, name)
            ):
                raise _contradiction(name, getattr(now, name), getattr(self.options, name), folder)
        for name, file in self.files.items():
            self._check_file(name, file, now, folder)
        return self.model_copy(update={"options": now})

    def _check_file(self, name: str, then: InputFile, now: RunOptions, folder: Path) -> None:
        was, wanted = getattr(self.options, name), getattr(now, name)
        path = dict(now.files()).get(name)
        if path is None or _function_of(name, wanted) != _function_of(name, was):
            raise _contradiction(name, wanted, was, folder)
        kept = f" (there is a copy: {folder / KEPT_TOOLS})" if name == "tools" else ""
        try:
            found = InputFile.of(path)
        except OSError as error:
            raise ConfigError(
                f"--resume {folder}: --{name} {path} cannot be read ({error.strerror}); put it back{kept}, or say where it "
                f"is now with --{name}"
            ) from error
        if found.sha256 != then.sha256:
            changes = _changes(folder / KEPT_TOOLS, path) if name == "tools" else ""
            raise ConfigError(
                f"--resume {folder}: --{name} {path} is not what the run was begun with: it was {then}, and is {found}. "
                f"Put the old one back{kept}, or begin another run with another --out{changes}"
            )

    def other_versions(self) -> list[str]:
        """What is installed now and was not when the run began, a few words each."""
        now = installed_versions()
        names = sorted({*now, *self.versions})
        return [
            f"{name} {now.get(name, 'is not installed')} (was {self.versions.get(name, 'not installed')})"
            for name in names
            if now.get(name) != self.versions.get(name)
        ]


KEPT_TOOLS = "tools.yaml"
"""The copy of the tool YAML in the run's folder."""


def installed_versions() -> dict[str, str]:
    """Of what decides the tokens."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _absolute(name: str, value: str) -> str:
    if name == "model":
        return str(Path(value).resolve()) if Path(value).is_dir() else value
    file = _file_of(name, value)
    return value if file is None else str(Path(file).resolve()) + value[len(file) :]


def _file_of(name: str, value: str) -> str | None:
    """The file an option names: `--reward` and `--script` may name a function in it too, or a builtin."""
    if name in ("data", "tools"):
        return value
    file, found, _ = value.rpartition(".py:")
    if found:
        return f"{file}.py"
    return value if value.endswith(".py") else None


def _function_of(name: str, value: str | None) -> str:
    file = None if value is None else _file_of(name, value)
    return "" if value is None or file is None else value[len(file) :]


def _contradiction(name: str, now: object, then: object, folder: Path) -> ConfigError:
    option = f"--{name.replace('_', '-')}"
    was = f"{option} {then}" if then is not None else f"no {option}"
    wants = f"{option} {now}" if now is not None else f"no {option}"
    return ConfigError(
        f"{wants} contradicts the run in {folder}, which was asked with {was}; leave it out to go on, or begin another "
        "run with another --out"
    )


def _changes(before: Path, after: Path) -> str:
    """The first lines that differ, for people; empty where a file cannot be read."""
    try:
        old, new = (path.read_text(encoding="utf-8", errors="replace").splitlines() for path in (before, after))
    except OSError:
        return ""
    lines = list(difflib.unified_diff(old, new, "then", "now", lineterm="", n=0))
    more = [f"... and {len(lines) - _SHOWN_CHANGES} lines more"] if len(lines) > _SHOWN_CHANGES else []
    return "\n" + "\n".join([*lines[:_SHOWN_CHANGES], *more])
