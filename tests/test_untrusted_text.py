"""What a model or a tool says never becomes code: not through `eval`, not through a shell, not through a format string."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sglang_multiturn

PACKAGE = Path(sglang_multiturn.__file__).parent
SOURCES = sorted(path for path in PACKAGE.rglob("*.py"))
CHILD = Path(__file__).parent / "hostile_rollout.py"

EXECUTES = {"eval", "exec", "compile", "__import__"}
SHELLS = {"system", "popen", "getoutput", "getstatusoutput", "create_subprocess_shell"}
ALLOWED = {
    # SGLang's process and its parent: numbers and settings go to and fro, both ends are this package's own.
    ("engine/sglang_child/messages.py", "pickle.loads"),
}
LOGS = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def name_of(call: ast.Call) -> tuple[str, str]:
    """What a call's function is an attribute of, and its name."""
    if isinstance(call.func, ast.Attribute):
        owner = call.func.value
        return (owner.id if isinstance(owner, ast.Name) else "", call.func.attr)
    return "", call.func.id if isinstance(call.func, ast.Name) else ""


def faults_of(call: ast.Call) -> list[str]:
    """Ways in which a call could make code of a text."""
    owner, name = name_of(call)
    found = []
    if owner in ("", "builtins") and name in EXECUTES:
        found.append(f"{name}()")
    if name in SHELLS or any(k.arg == "shell" and not is_false(k.value) for k in call.keywords):
        found.append("a shell")
    if owner in ("pickle", "cloudpickle", "marshal") and name in ("load", "loads"):
        found.append(f"{owner}.{name}")
    if owner == "yaml" and name in ("load", "load_all", "unsafe_load", "full_load"):
        found.append(f"yaml.{name}")
    formats = name in ("format", "format_map") and isinstance(call.func, ast.Attribute)
    if formats and not is_constant(call.func.value):
        found.append("a format string that is no literal")
    if owner in ("logger", "logging") and name in LOGS and call.args:
        template = call.args[1] if name == "log" and len(call.args) > 1 else call.args[0]
        if not isinstance(template, ast.Constant):
            found.append("a log message that is no literal")
    return found


def is_constant(node: ast.expr) -> bool:
    """A literal, or a constant of the module by its name."""
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id.isupper())


def is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_line_makes_code_of_text(source: Path) -> None:
    tree = ast.parse(source.read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    place = source.relative_to(PACKAGE).as_posix()
    assert [(c.lineno, fault) for c in calls for fault in faults_of(c) if (place, fault) not in ALLOWED] == []


@pytest.mark.parametrize(
    "line",
    [
        "eval(x)",
        "builtins.exec(x)",
        "os.system(x)",
        "subprocess.run(x, shell=True)",
        "asyncio.create_subprocess_shell(x)",
        "pickle.loads(x)",
        "yaml.load(x)",
        "x.format(1)",
        "logger.warning(x)",
        "logger.warning(f'{x}')",
        "logger.log(10, x)",
    ],
)
def test_the_search_finds_each_kind(line: str) -> None:
    (call,) = (node for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Call))
    assert faults_of(call)


@pytest.mark.parametrize(
    "line", ["'{}'.format(x)", "re.compile(x)", "yaml.safe_load(x)", "logger.warning('%s', x)", "subprocess.run([x])"]
)
def test_the_search_lets_others_pass(line: str) -> None:
    (call,) = (node for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Call))
    assert faults_of(call) == []


def test_hostile_words_run_nothing(tmp_path: Path) -> None:
    """Whole conversations in every call format, under Python's audit hooks, in a folder where nothing may appear."""
    done = subprocess.run(
        [sys.executable, str(CHILD)], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.splitlines()[-1].endswith("conversations, nothing was run")
    assert list(tmp_path.iterdir()) == []
