"""From a YAML to the tools of a run: what each is called, shows the model, takes and runs in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sglang_multiturn.config import ToolConfig, ToolsConfig, ToolSettings, closest
from sglang_multiturn.errors import ConfigError, DataError
from sglang_multiturn.request import RequestSpec
from sglang_multiturn.schemas import ToolSchema
from sglang_multiturn.tools.arguments import ArgumentRules
from sglang_multiturn.tools.base import Tool
from sglang_multiturn.tools.schema_mistakes import schema_mistakes
from sglang_multiturn.tools.tool_classes import keeps_snapshots, load_class, make_tool

__all__ = ["ToolEntry", "ToolRegistry", "ToolSource", "load_class", "make_tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSource:
    """What another process makes the tool of."""

    class_path: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolEntry:
    """One tool of a run. Exactly one of `tool` and `source` is given.

    A tool of `execution: process` or `ray` is never made here: its constructor may load what belongs into its process.
    """

    name: str
    schema: ToolSchema
    """What the model is shown."""
    settings: ToolSettings
    tool: Tool | None = None
    source: ToolSource | None = None
    place: str | None = None
    """`file:line` of its entry, where it has one."""
    keeps_snapshots: bool = False
    """Whether it has `snapshot` and `restore`."""


class ToolRegistry:
    """The tools of a run, by name. One object of each serves all conversations of its process."""

    def __init__(
        self,
        tools: Iterable[Tool] = (),
        source: str = "tools",
        settings: Mapping[str, ToolSettings] | None = None,
        schemas: Mapping[str, ToolSchema] | None = None,
    ) -> None:
        """A registry of tools that were made already.

        Args:
            tools: In the order in which the model is to see them.
            source: What names them in messages.
            settings: By name; the defaults for a tool that has none here.
            schemas: By name, whole, for tools that keep less of what they were made with (verl's classes do).

        Raises:
            ConfigError: two tools of one name, settings for a tool that is not there or that runs elsewhere, a schema
                that is no JSON Schema, or a tool with only one of `snapshot` and `restore`.
        """
        self._entries: dict[str, ToolEntry] = {}
        self._rules: dict[str, ArgumentRules] = {}
        given = dict(settings or {})
        for tool in tools:
            own = given.pop(tool.name, ToolSettings())
            if own.execution in ("process", "ray"):
                raise ConfigError(
                    f"{source}: tool {tool.name!r} was made here and cannot run as `execution: {own.execution}`; give "
                    "its class in a YAML, or use async or thread"
                )
            schema = _schema_of(tool, (schemas or {}).get(tool.name))
            keeps = keeps_snapshots(type(tool), source)
            self._add(ToolEntry(name=tool.name, schema=schema, settings=own, tool=tool, keeps_snapshots=keeps), source)
        for name in given:
            raise ConfigError(
                f"{source}: settings for {name!r}, which is no tool of these{closest(name, self._entries)}"
            )

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Tools of a YAML file. Raises ConfigError."""
        return cls.from_config(ToolsConfig.from_yaml(path), str(path))

    @classmethod
    def from_config(cls, config: ToolsConfig, source: str = "tools") -> Self:
        """Tools of a configuration, which knows its lines if it was read from a file. Raises ConfigError."""
        if mistakes := list(_mistakes(config, source)):
            raise ConfigError("\n".join(mistakes))
        entries = []
        for index, tool in enumerate(config.tools):
            place = config.place("tools", index, otherwise=source)
            entries.append(_make_entry(tool, place, config.place("tools", index, "class_name", otherwise=source)))
        return cls.from_entries(entries, source)

    @classmethod
    def from_entries(cls, entries: Iterable[ToolEntry], source: str = "tools") -> Self:
        """Entries of other registries, together. Raises ConfigError for two of one name."""
        registry = cls((), source)
        for entry in entries:
            registry._add(entry, source)
        return registry

    def _add(self, entry: ToolEntry, source: str) -> None:
        place = entry.place or source
        if (other := self._entries.get(entry.name)) is not None:
            where = f"; the other one stands at {other.place}" if other.place and entry.place else ""
            raise ConfigError(f"{place}: two tools are named {entry.name!r}{where}; rename one of them")
        if entry.name != entry.schema.name:
            raise ConfigError(
                f"{place}: the tool calls itself {entry.name!r} and its schema calls it {entry.schema.name!r}; the model "
                "could not call it. Give both one name"
            )
        self._entries[entry.name] = entry
        self._rules[entry.name] = ArgumentRules(entry.schema, place)

    @property
    def names(self) -> tuple[str, ...]:
        """Names, in the order of the YAML."""
        return tuple(self._entries)

    @property
    def entries(self) -> tuple[ToolEntry, ...]:
        """All tools, in the order of the YAML."""
        return tuple(self._entries.values())

    def entry(self, name: str) -> ToolEntry:
        """The tool of that name. Raises ConfigError when there is none."""
        if name not in self._entries:
            raise ConfigError(f"tool {name!r} is not configured{closest(name, self._entries)}")
        return self._entries[name]

    def get(self, name: str) -> Tool | None:
        """The tool object of that name; None when there is none, or none in this process."""
        entry = self._entries.get(name)
        return None if entry is None else entry.tool

    def schemas(self, names: Sequence[str] | None = None) -> list[ToolSchema]:
        """What the model is shown, of all tools or of some. Raises ConfigError for a name that is not configured."""
        for name in names or ():
            self.entry(name)
        return [entry.schema for name, entry in self._entries.items() if names is None or name in names]

    def explain_arguments(self, name: str, arguments: dict[str, Any]) -> str | None:
        """One sentence for the model when the arguments break the tool's schema; None when they fit."""
        return self._rules[name].explain(arguments)

    def with_defaults(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """What the tool is handed: a copy of arguments that fit, with the schema's defaults where a key was left out."""
        return self._rules[name].with_defaults(arguments)

    def check_row(self, spec: RequestSpec, place: str) -> None:
        """Refuse a dataset row that names a tool which is not configured.

        Where no tool is configured at all, arguments for tools are passed over: a run that compares without them.

        Raises:
            DataError: naming `place` (`file:line`), the key, and the nearest name.
        """
        named = [("tool_selection", name) for name in spec.tool_names or ()]
        named += [("tools_kwargs", name) for name in spec.tools_kwargs if self._entries]
        for key, name in named:
            if name not in self._entries:
                raise DataError(
                    f"{place}: extra_info.{key} names {name!r}, which is not configured{closest(name, self._entries)}"
                )


def _mistakes(config: ToolsConfig, source: str) -> Iterable[str]:
    """What is wrong with the schemas as they stand in the YAML."""
    for index, entry in enumerate(config.tools):
        if entry.tool_schema is None:
            continue
        # An entry with `config.type` is written for verl's own loader too, which asks for neither `required` nor `items`.
        for mistake in schema_mistakes(entry.tool_schema, strict="type" not in entry.config):
            keys = ("tools", index, "tool_schema", *mistake.path)
            place = config.place(*keys, *filter(None, [mistake.key]), otherwise=source)
            yield f"{place}: {'.'.join(map(str, keys))!r} {mistake.said}"


def _make_entry(entry: ToolConfig, place: str, class_place: str) -> ToolEntry:
    settings = ToolSettings.model_validate(entry.model_dump(include=set(ToolSettings.model_fields), exclude_unset=True))
    if entry.execution not in ("process", "ray"):
        tool = make_tool(entry.class_name, entry.config, entry.tool_schema, class_place)
        schema = _schema_of(tool, entry.tool_schema)
        keeps = keeps_snapshots(type(tool), class_place)
        return ToolEntry(
            name=tool.name, schema=schema, settings=settings, tool=tool, place=place, keeps_snapshots=keeps
        )
    tool_class = load_class(entry.class_name, class_place)
    schema = entry.tool_schema or _default_schema(tool_class, entry, class_place)
    return ToolEntry(
        name=schema.name,
        schema=schema,
        settings=settings,
        source=ToolSource(class_path=entry.class_name, config=entry.config),
        place=place,
        keeps_snapshots=keeps_snapshots(tool_class, class_place),
    )


def _default_schema(tool_class: type, entry: ToolConfig, place: str) -> ToolSchema:
    """The schema that a class brings, for a tool that is not made here."""
    made = tool_class.default_schema() if hasattr(tool_class, "default_schema") else None
    if made is None:
        raise ConfigError(
            f"{place}: {entry.class_name} is made in a process of its own (`execution: {entry.execution}`), so its schema "
            "must be known before: write a tool_schema, or a classmethod default_schema() that returns one"
        )
    return made if isinstance(made, ToolSchema) else ToolSchema.model_validate(_written(made))


def _schema_of(tool: Tool, in_yaml: ToolSchema | None) -> ToolSchema:
    """What the model is shown: the YAML's schema whole, unless the tool made one of its own that says otherwise."""
    own = getattr(tool, "tool_schema", None)
    if own is None and hasattr(tool, "get_openai_tool_schema"):
        own = tool.get_openai_tool_schema()
    if isinstance(own, ToolSchema):
        return own
    if own is None:
        if in_yaml is None:
            raise ConfigError(f"tool {tool.name!r} has no tool_schema; give it one, or write one in the YAML")
        return in_yaml
    written = _written(own)
    if in_yaml is not None and _is_part_of(written, in_yaml.for_template()):
        return in_yaml  # verl's classes drop what is nested
    return ToolSchema.model_validate(written)


def _written(schema: Any) -> dict[str, Any]:
    """A schema of verl's, or any other that pydantic made, without what was left out."""
    written: dict[str, Any] = schema if isinstance(schema, dict) else schema.model_dump(exclude_unset=True)
    return written


def _is_part_of(part: Any, whole: Any) -> bool:
    if isinstance(part, Mapping) and isinstance(whole, Mapping):
        return all(key in whole and _is_part_of(value, whole[key]) for key, value in part.items())
    return bool(part == whole)
