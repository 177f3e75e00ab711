"""A version of verl as source text, installed, unpacked or in its wheel: nothing of it is ever imported.

A name is written `module:Class.member`, a module alone without the colon.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from zipfile import Path as ZipPath

_DATA_CLASSES = frozenset({"dataclass", "BaseModel", "NamedTuple", "BaseConfig"})


@dataclass(frozen=True, eq=False)
class Found:
    """Where a name stands: a module, a class, a function, or any other statement that binds it."""

    module: str
    node: ast.AST


class VerlSource:
    """Looks names up as Python would, re-exports and base classes included, as far as verl's own files go."""

    def __init__(self, root: Traversable) -> None:
        """`root` is the folder, or the wheel, that holds `verl/`."""
        self._root = root
        self.tree = functools.cache(self._parse)

    @classmethod
    def installed(cls) -> VerlSource | None:
        """What `import verl` would find; None where there is none."""
        spec = importlib.util.find_spec("verl")
        if spec is None or spec.origin is None:
            return None
        return cls(Path(spec.origin).parents[1])

    @classmethod
    def of_wheel(cls, wheel: Path) -> VerlSource:
        return cls(ZipPath(wheel))

    @property
    def version(self) -> str:
        return self.text("version/version").strip()

    def text(self, file: str) -> str:
        """A file below `verl/`."""
        return self._root.joinpath("verl", *file.split("/")).read_text(encoding="utf-8")

    def _parse(self, module: str) -> ast.Module | None:
        path = module.replace(".", "/")
        for file in (f"{path}/__init__.py", f"{path}.py"):
            found = self._root.joinpath(file)
            if found.is_file():
                return ast.parse(found.read_text(encoding="utf-8"))
        return None

    def find(self, name: str) -> Found | None:
        """The statement that makes `name`; None where this version has no such thing."""
        module, _, path = name.partition(":")
        tree = self.tree(module)
        found = None if tree is None else Found(module, tree)
        for part in path.split(".") if path else ():
            found = self._step(found, part) if found is not None else None
        return found

    def _step(self, found: Found, part: str) -> Found | None:
        match found.node:
            case ast.Module():
                return self._in_module(found.module, found.node, part)
            case ast.ClassDef():
                return self._in_class(found, found.node, part)
            case _:
                return None

    def _in_module(self, module: str, tree: ast.Module, part: str) -> Found | None:
        for node in _statements(tree.body):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == part:
                        return self._imported(module, node, alias.name)
            elif part in _bound_by(node):
                return Found(module, node)
        submodule = self.tree(f"{module}.{part}")
        return None if submodule is None else Found(f"{module}.{part}", submodule)

    def _imported(self, module: str, node: ast.ImportFrom, name: str) -> Found | None:
        origin = self._origin(module, node)
        if origin.partition(".")[0] != "verl":
            return Found(module, node)  # another package's: that it is imported here is all that can be said
        tree = self.tree(origin)
        return None if tree is None else self._in_module(origin, tree, name)

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = self._root.joinpath(f"{module.replace('.', '/')}/__init__.py").is_file()
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, node.module] if node.module else parts)

    def _in_class(self, found: Found, node: ast.ClassDef, part: str) -> Found | None:
        for statement in _statements(node.body):
            if part in _bound_by(statement):
                return Found(found.module, statement)
        for base in self.bases(found):
            if (inherited := self._step(base, part)) is not None:
                return inherited
        for statement in ast.walk(node):
            if f"self.{part}" in _bound_by(statement):
                return Found(found.module, statement)
        return None

    def bases(self, found: Found) -> Iterator[Found]:
        """The base classes that are verl's own."""
        assert isinstance(found.node, ast.ClassDef)
        for base in found.node.bases:
            dotted = ast.unparse(base).partition("[")[0]
            resolved = self.find(f"{found.module}:{dotted}")
            if resolved is not None and isinstance(resolved.node, ast.ClassDef):
                yield resolved

    # -- what is written there ----------------------------------------------------------------------------------------

    def signature(self, name: str) -> str | None:
        """How it is called, without annotations; `value` or `module` for what is not; None where there is none.

        Defaults are written `...`: what they are is no matter here.
        """
        found = self.find(name)
        if found is None:
            return None
        match found.node:
            case ast.Module():
                return "module"
            case ast.FunctionDef() | ast.AsyncFunctionDef() as function:
                return _signature(function)
            case ast.ClassDef():
                return self._constructor(found)
            case _:
                return "value"

    def _constructor(self, found: Found) -> str:
        init = self._step(found, "__init__")
        if init is not None and isinstance(init.node, ast.FunctionDef):
            return _signature(init.node)
        fields = list(dict.fromkeys(self._fields(found)))
        return f"(*, {', '.join(fields)})" if fields else "(*args, **kwargs)"

    def _fields(self, found: Found) -> Iterator[str]:
        assert isinstance(found.node, ast.ClassDef)
        for base in self.bases(found):
            yield from self._fields(base)
        made_of = {ast.unparse(base).rpartition(".")[2] for base in found.node.bases}
        made_of |= {ast.unparse(made).partition("(")[0].rpartition(".")[2] for made in found.node.decorator_list}
        if made_of & _DATA_CLASSES or any(True for _ in self.bases(found)):
            for statement in found.node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    yield statement.target.id + ("=..." if statement.value is not None else "")

    def says(self, name: str, words: str) -> bool | None:
        """Whether the code of `name` holds these words, however they are laid out; None where there is no such name.

        Comments do not count, and strings stand in single quotes.
        """
        found = self.find(name)
        return None if found is None else words in ast.unparse(found.node)

    def calls(self, name: str, callee: str) -> list[str] | None:
        """The arguments of the first call of `callee` in `name`: keywords, `**` and one `*` a positional one.

        None where there is no such call.
        """
        found = self.find(name)
        for node in ast.walk(found.node) if found is not None else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(callee):
                return ["*"] * len(node.args) + [keyword.arg or "**" for keyword in node.keywords]
        return None


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    arguments = function.args
    decorators = {ast.unparse(decorator) for decorator in function.decorator_list}
    if "property" in decorators:
        return "value"
    plain = [*arguments.posonlyargs, *arguments.args]
    if plain and plain[0].arg in ("self", "cls"):
        plain = plain[1:]
    optional = len(arguments.defaults)
    words = [argument.arg for argument in plain]
    if optional:
        words = words[: -optional or None] + [f"{word}=..." for word in words[-optional:]]
    if arguments.vararg or arguments.kwonlyargs:
        words.append(f"*{arguments.vararg.arg if arguments.vararg else ''}")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        words.append(argument.arg + ("=..." if default is not None else ""))
    if arguments.kwarg:
        words.append(f"**{arguments.kwarg.arg}")
    return f"({', '.join(words)})"


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module or class, also those under `if`, `try` and `with`."""
    for node in body:
        if isinstance(node, ast.If | ast.Try | ast.With):
            for name in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, name, ()))
        else:
            yield node


def _bound_by(node: ast.AST) -> set[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            return {ast.unparse(name) for target in targets for name in getattr(target, "elts", [target])}
        case ast.AnnAssign(target=target):
            return {ast.unparse(target)}
        case ast.Import(names=names):
            return {(alias.asname or alias.name).partition(".")[0] for alias in names}
        case _:
            return set()
