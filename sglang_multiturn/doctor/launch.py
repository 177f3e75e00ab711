"""A launch command as verl resolves it: hydra's composition of verl's own configuration files, without importing verl."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_multiturn.errors import ConfigError, MissingDependencyError
from sglang_multiturn.verl_plugin.compat import LOOP_CLASS, LOOP_NAME

ROLLOUT = "actor_rollout_ref.rollout"
CONFIG_NAME = "ppo_trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """verl's whole configuration with the overrides in it."""

    overrides: tuple[str, ...]
    config: Any
    """A `DictConfig`."""

    def get(self, key: str, default: Any = None) -> Any:
        """The value at a dotted key, plain; `default` where it is null, missing or cannot be resolved."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            value = OmegaConf.select(self.config, key, default=None)
        except OmegaConfBaseException:
            return default
        if value is None:
            return default
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value

    def says(self, key: str) -> bool:
        """Whether an override names this key."""
        return any(override.lstrip("+~").partition("=")[0] == key for override in self.overrides)

    @property
    def entry(self) -> Mapping[str, Any] | None:
        """Our loop's entry in `agent.agent_loop_config_path`; None where there is none. Raises ConfigError."""
        name = self.get(f"{ROLLOUT}.agent.default_agent_loop")
        return next((entry for entry in self.loop_entries if entry.get("name") == name), None)

    @property
    def loop_entries(self) -> list[Mapping[str, Any]]:
        """All entries of `agent.agent_loop_config_path`. Raises ConfigError."""
        path = self.get(f"{ROLLOUT}.agent.agent_loop_config_path")
        return [] if path is None else _read_entries(Path(path))

    @property
    def is_ours(self) -> bool:
        """Whether the default loop is this package's, by its own name or by another entry's class. Raises ConfigError."""
        name = self.get(f"{ROLLOUT}.agent.default_agent_loop")
        entry = self.entry
        return name == LOOP_NAME if entry is None else entry.get("_target_") == LOOP_CLASS

    @property
    def own_names(self) -> frozenset[str]:
        """Names under which verl runs this package's loop. Raises ConfigError."""
        return frozenset({LOOP_NAME, *(str(e["name"]) for e in self.loop_entries if e["_target_"] == LOOP_CLASS)})

    def files(self, key: str) -> list[str]:
        """Paths at a key that holds one or several."""
        value = self.get(key)
        return [value] if isinstance(value, str) else [str(one) for one in value or ()]


def compose(overrides: Sequence[str]) -> Launch:
    """Resolve overrides as `python -m verl.trainer.main_ppo` does.

    Raises:
        MissingDependencyError: verl is not installed.
        ConfigError: hydra refuses an override, with its reason.
    """
    verl = importlib.util.find_spec("verl")
    if verl is None or verl.origin is None:
        raise MissingDependencyError.for_extra("--verl", "verl", "verl")
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    folder = Path(verl.origin).parent / "trainer" / "config"
    try:
        with initialize_config_dir(config_dir=str(folder), version_base=None):
            config = hydra_compose(CONFIG_NAME, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(str(error)) from error
    return Launch(overrides=tuple(overrides), config=config)


def split_overrides(given: Sequence[str]) -> tuple[str, ...]:
    """Overrides of `--verl` options: `"a=1 b=2"` as a shell would split it, or `@file` with one a line.

    Raises:
        ConfigError: the file is missing, or a word is no override.
    """
    words = [word for text in given for word in _words(text)]
    if wrong := next(
        (word for word in words if word.startswith("-") or ("=" not in word and not word.startswith("~"))), None
    ):
        raise ConfigError(f"--verl: {wrong!r} is no override; write key=value as on verl's command line")
    return tuple(words)


def _words(text: str) -> Iterator[str]:
    if not text.startswith("@"):
        yield from shlex.split(text)
        return
    path = Path(text[1:])
    if not path.is_file():
        raise ConfigError(f"--verl: the file {str(path)!r} does not exist")
    for line in path.read_text(encoding="utf-8").splitlines():
        yield from shlex.split(line, comments=True)


def _read_entries(path: Path) -> list[Mapping[str, Any]]:
    import yaml

    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(read, list) or not all(isinstance(e, Mapping) and "name" in e and "_target_" in e for e in read):
        raise ConfigError(f"{path}: expected a list of entries, each with `name` and `_target_`")
    return read
