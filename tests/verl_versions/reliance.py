"""What this package's own source relies on in verl, read out of it, so that the list cannot grow stale.

Taken from every file of the package that imports verl or waits for one of its modules: what is imported, what is asked of
it by name, which keywords it is called with, which methods are overridden, and which keys of verl's configuration are read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Names = Mapping[str, str]
"""Local names and the name in verl (`module:Class.member`) each stands for."""


@dataclass(slots=True)
class Reliance:
    """By names as `sources` writes them; the values say where in our source it stands."""

    names: dict[str, str] = field(default_factory=dict)
    keywords: dict[str, set[str]] = field(default_factory=dict)
    """What a class or function is called with by keyword."""
    overrides: dict[str, ast.arguments] = field(default_factory=dict)
    """Methods of ours that verl calls as its own, where the base class has one of that name."""
    config: dict[str, str] = field(default_factory=dict)
    """Keys of verl's configuration, with dots."""


def reliance(package: Path) -> Reliance:
    """What all files below `package` rely on."""
    files = {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(package.rglob("*.py"))}
    waits = _waits(files)
    found = Reliance()
    for file, tree in files.items():
        if "verl" in {name.partition(".")[0] for name in _imports(tree).values()} or waits.keys() & _functions(tree):
            _Reader(found, str(file.relative_to(package)), tree, waits).read()
    return found


class _Reader:
    """Reads one file."""

    def __init__(self, found: Reliance, file: str, tree: ast.Module, waits: Mapping[str, set[str]]) -> None:
        self._found = found
        self._file = file
        self._tree = tree
        self._waits = waits
        self._names = _imports(tree)
        self._names |= _renamed(tree, self._names)
        self._classes: dict[str, str] = {}

    def read(self) -> None:
        for name in self._names.values():
            self._note(name, self._tree.body[0])
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ClassDef):
                self._class(node)
        self._uses(self._tree, self._names | self._classes)
        for node in ast.walk(self._tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for module in self._waits.get(node.name, ()):
                    self._uses(node, {node.args.args[0].arg: module})
                if self._file.startswith("verl_plugin"):
                    self._config(node)

    def _note(self, name: str, node: ast.AST) -> None:
        self._found.names.setdefault(name, f"{self._file}:{getattr(node, 'lineno', 1)}")

    def _class(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            verls = _resolve(base, self._names)
            if verls is None:
                continue
            self._note(verls, node)
            own = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
            if "__init__" not in own:
                self._classes[node.name] = verls
            for method in own.values():
                if not any(ast.unparse(decorator) == "property" for decorator in method.decorator_list):
                    self._found.overrides.setdefault(f"{verls}.{method.name}", method.args)
            self._inherited(node, verls)

    def _inherited(self, node: ast.ClassDef, verls: str) -> None:
        """What of the base class is used as `self.x` or `super().x` and is not made here."""
        made = {target for item in ast.walk(node) for target in _made_by(item)}
        for item in ast.walk(node):
            if not isinstance(item, ast.Attribute) or not isinstance(item.ctx, ast.Load):
                continue
            of = ast.unparse(item.value)
            own = item.attr in made or item.attr.startswith("__")
            if (of == "super()" and item.attr != "__init__") or (of == "self" and not own):
                self._note(f"{verls}.{item.attr}", item)

    def _uses(self, tree: ast.AST, names: Names) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and (name := _resolve(node, names)) is not None:
                self._note(name, node)
            if isinstance(node, ast.Call) and (name := _resolve(node.func, names)) is not None:
                self._note(name, node)
                given = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
                self._found.keywords.setdefault(name, set()).update(given)

    def _config(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        paths = _config_names(function)
        outer = {id(node.value) for node in ast.walk(function) if isinstance(node, ast.Attribute | ast.Subscript)}
        for node in ast.walk(function):
            path = _config_path(node, paths)
            if path and id(node) not in outer:
                self._found.config.setdefault(".".join(path), f"{self._file}:{node.lineno}")  # type: ignore[attr-defined]


def _imports(tree: ast.Module) -> dict[str, str]:
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "verl":
            names |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {
                alias.asname or alias.name: alias.name for alias in node.names if alias.name.partition(".")[0] == "verl"
            }
    return names


def _renamed(tree: ast.Module, names: Names) -> dict[str, str]:
    """`verls: Any = async_sglang_server` at module level."""
    renamed = {}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Name) and node.value.id in names:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            renamed[ast.unparse(target)] = names[node.value.id]
    return renamed


def _functions(tree: ast.Module) -> set[str]:
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def _waits(files: Mapping[Path, ast.Module]) -> dict[str, set[str]]:
    """Functions that get one of verl's modules once it is imported, by name: `after_import(module, function)`."""
    constants = {
        node.targets[0].id: str(node.value.value)
        for tree in files.values()
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    waits: dict[str, set[str]] = {}
    for tree in files.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "after_import":
                module, function = node.args
                name = module.value if isinstance(module, ast.Constant) else constants[_last(module)]
                waits.setdefault(_last(function), set()).add(str(name))
    return waits


def _last(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


def _resolve(node: ast.expr, names: Names) -> str | None:
    """The name in verl that an expression stands for: of a module's member, and of a class's, no deeper.

    What has a small name and members is taken for a module: `from verl.a import b` and `b.C` are `verl.a.b:C`.
    """
    if isinstance(node, ast.Name):
        return names.get(node.id)
    owner = _resolve(node.value, names) if isinstance(node, ast.Attribute) else None
    if owner is None:
        return None
    module, _, path = owner.partition(":")
    attribute = ast.unparse(node).rpartition(".")[2]
    if path == path.lower() and "." not in path and not path.startswith("_"):
        return f"{'.'.join(filter(None, [module, path]))}:{attribute}"
    return f"{owner}.{attribute}" if path[0].isupper() and "." not in path else None


def _made_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for name in getattr(target, "elts", [target]):
                yield ast.unparse(name).removeprefix("self.")


# -- verl's configuration ---------------------------------------------------------------------------------------------

_Path = tuple[str, ...]
_ROLLOUT = ("actor_rollout_ref", "rollout")
_OF_MAPPINGS = frozenset({"get", "items", "keys", "values", "pop"})


def _config_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, _Path]:
    """Variables that hold a part of verl's configuration: parameters called `config`, `rollout`, and what is taken from them."""
    parameters = {argument.arg: ast.unparse(argument.annotation or ast.Name("Any")) for argument in function.args.args}
    paths: dict[str, _Path] = {}
    if parameters.get("config") == "Any":
        paths["config"] = ()
    if parameters.get("rollout") == "Any":
        paths["rollout"] = _ROLLOUT
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target = node.targets[0]
        pairs = (
            zip(target.elts, node.value.elts, strict=True)
            if _are_tuples(target, node.value)
            else [(target, node.value)]
        )  # type: ignore[attr-defined]
        for name, value in pairs:
            path = _config_path(value, paths)
            if isinstance(name, ast.Name) and path:
                paths[name.id] = path
    return paths


def _are_tuples(*nodes: ast.expr) -> bool:
    return all(isinstance(node, ast.Tuple) for node in nodes)


def _config_path(node: ast.AST, names: Mapping[str, _Path]) -> _Path | None:
    match node:
        case ast.Name(id=name):
            return names.get(name)
        case ast.BoolOp(values=[first, *_]):
            return _config_path(first, names)
        case ast.Call(func=ast.Attribute(value=owner, attr="get"), args=[ast.Constant(value=str(key)), *_]):
            path = _config_path(owner, names)
            return None if path is None else (*path, key)
        case ast.Subscript(value=owner, slice=ast.Constant(value=str(key))):
            path = _config_path(owner, names)
            return None if path is None else (*path, key)
        case ast.Attribute(value=owner, attr=key) if key not in _OF_MAPPINGS:
            path = _config_path(owner, names)
            return None if path is None else (*path, key)
        case _:
            return None
