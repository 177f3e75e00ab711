"""What a version of verl has of what this package relies on, and what of it would not work.

Facts are small enough to be kept as JSON, one file a version, so that a version can be judged where its source is not.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import yaml
from verl_versions.promises import CALLED, LINES, Called
from verl_versions.reliance import Reliance
from verl_versions.sources import VerlSource

KEPT = Path(__file__).parent / "facts"
_CONFIG = "trainer/config/_generated_ppo_trainer.yaml"


@dataclass(slots=True, kw_only=True)
class Facts:
    """Of one version."""

    version: str
    names: dict[str, str | None] = field(default_factory=dict)
    """What each name is (see `VerlSource.signature`); None where there is none, or not even its module."""
    config: dict[str, bool] = field(default_factory=dict)
    """Whether the trainer's configuration has the key."""
    lines: dict[str, bool] = field(default_factory=dict)
    calls: dict[str, list[str] | None] = field(default_factory=dict)

    @classmethod
    def of(cls, source: VerlSource, relied_on: Reliance) -> Facts:
        """Read them from the source."""
        keys = _keys(yaml.safe_load(source.text(_CONFIG)))
        names = relied_on.names.keys() | relied_on.overrides.keys()
        names |= {name.partition(":")[0] for name in names}
        return cls(
            version=source.version,
            names={name: source.signature(name) for name in sorted(names)},
            config={key: key in keys for key in sorted(relied_on.config)},
            lines={line.name: all(source.says(line.within, words) for words in line.words) for line in LINES},
            calls={call.name: source.calls(call.within, call.callee) for call in CALLED},
        )

    @classmethod
    def kept(cls, version: str) -> Facts:
        return cls(**json.loads((KEPT / f"{version}.json").read_text(encoding="utf-8")))

    def keep(self) -> Path:
        file = KEPT / f"{self.version}.json"
        file.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return file


def lacking(facts: Facts, relied_on: Reliance, tested: Facts, ours: VerlSource) -> dict[str, str]:
    """What of our reliance does not hold in a version, and why; what is missing stands for all that is in it.

    Args:
        facts: of the version that is judged.
        relied_on: what our source relies on.
        tested: of the version that our tests run: a method of ours overrides one of verl's if it does so there.
        ours: this package's source, read as verl's is.
    """
    found = _missing(facts, [*relied_on.names, *(name for name in relied_on.overrides if tested.names[name])])
    for name, keywords in relied_on.keywords.items():
        if refused := _refused(facts.names[name], keywords):
            found[name] = f"does not take {', '.join(refused)}"
    for name, arguments in relied_on.overrides.items():
        if name.endswith(".__init__") or tested.names[name] is None:
            continue  # verl makes nothing of ours by its base class's arguments; our own methods are our own
        if given := _refused_by_ours(facts.names[name], arguments):
            found[name] = f"is called with {', '.join(given)}, which ours does not take"
    unknown = [key for key, known in facts.config.items() if not known]
    found |= {key: "is not in the configuration" for key in unknown if not _is_below(key, unknown)}
    found |= {name: "is not so" for name, holds in facts.lines.items() if not holds}
    for call in CALLED:
        if problem := _call_problem(call, facts.calls[call.name], ours):
            found[call.name] = problem
    return found


def _missing(facts: Facts, names: Iterable[str]) -> dict[str, str]:
    """Names that are not there, or their modules or classes where those are not."""
    missing = {}
    for name in names:
        if facts.names[name] is not None:
            continue
        module, _, path = name.partition(":")
        owners = [module, f"{module}:{path.partition('.')[0]}"]
        gone = [owner for owner in owners if facts.names.get(owner, "") is None]
        missing[gone[0] if gone else name] = "is not there"
    return missing


def _is_below(key: str, others: Iterable[str]) -> bool:
    return any(key.startswith(f"{other}.") for other in others)


def _refused(signature: str | None, keywords: set[str]) -> list[str]:
    """Which keywords of ours verl does not take."""
    if signature is None or not signature.startswith("("):
        return []
    theirs = _arguments(signature)
    return [] if theirs.kwarg is not None else sorted(keywords - _names(theirs))


def _refused_by_ours(signature: str | None, ours: ast.arguments) -> list[str]:
    """Which arguments of verl's method, with which verl calls ours, ours does not take."""
    if signature is None or not signature.startswith("(") or ours.kwarg is not None:
        return []
    return sorted(_names(_arguments(signature)) - _names(ours))


def _call_problem(call: Called, given: list[str] | None, ours: VerlSource) -> str | None:
    signature = ours.signature(call.ours)
    assert signature is not None, f"{call.ours} is no function of this package"
    if given is None:
        return "is not so"
    taken = _arguments(signature)
    named = {word for word in given if not word.startswith("*")} - set(call.besides)
    if (call.all_named or taken.kwarg is None) and (unknown := sorted(named - _names(taken))):
        return f"passes {', '.join(unknown)}, which ours does not take"
    missing = [word for word in _needed(taken)[given.count("*") :] if word not in named]
    return f"does not pass {', '.join(missing)}" if missing and "**" not in given else None


def _arguments(signature: str) -> ast.arguments:
    function = ast.parse(f"def f{signature}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return function.args


def _names(arguments: ast.arguments) -> set[str]:
    return {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def _needed(arguments: ast.arguments) -> list[str]:
    """Parameters without a default, the positional ones first."""
    plain = [*arguments.posonlyargs, *arguments.args]
    needed = [argument.arg for argument in plain[: len(plain) - len(arguments.defaults)]]
    keyword_only = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return needed + [argument.arg for argument, default in keyword_only if default is None]


def _keys(tree: object, above: str = "") -> set[str]:
    """All keys of a configuration, with dots."""
    found: set[str] = set()
    if isinstance(tree, dict):
        for name, below in tree.items():
            found |= {above + name, *_keys(below, f"{above}{name}.")}
    return found
