"""House measures: sizes, docstrings, annotations, suppressions. Cheap, by `ast`; an exception stands here with its reason."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.syntax import syntax

ROOT = Path(__file__).parent.parent
PACKAGES = ("ftrain", "storage", "recovery")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MAX_FILE, MAX_FUNCTION, MAX_ARGUMENTS = 400, 50, 7
SUPPRESSION = re.compile(r"#\s*(noqa|type:\s*ignore)")

LONG_FILES = {"ftrain/config.py": "the whole configuration on one page: fields, no logic"}
MANY_ARGUMENTS = {
    "ftrain/cli/": "a command has one argument per option: click's form",
    "ftrain/checkpoint/checkpointer.py": "the face of a script's checkpoints: one keyword for each option, all with defaults",
}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_a_file_keeps_the_house_measures(path: Path) -> None:
    text = path.read_text()
    tree = syntax(path)
    problems = []
    if text.count("\n") > MAX_FILE and name(path) not in LONG_FILES:
        problems.append(f"{text.count(chr(10))} lines, at most {MAX_FILE}")
    if not ast.get_docstring(tree):
        problems.append("no module docstring")
    for function in functions(tree):
        lines = (function.end_lineno or 0) - function.lineno + 1
        if lines > MAX_FUNCTION:
            problems.append(f"{function.name} has {lines} lines, at most {MAX_FUNCTION}")
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        count = len([a for a in arguments if a.arg not in ("self", "cls")])
        if count > MAX_ARGUMENTS and not any(name(path).startswith(prefix) for prefix in MANY_ARGUMENTS):
            problems.append(f"{function.name} has {count} arguments, at most {MAX_ARGUMENTS}")
    assert not problems, f"{name(path)}: " + "; ".join(problems)


@pytest.mark.parametrize("package", ["storage", "recovery"])
def test_everything_public_has_a_docstring(package: str) -> None:
    missing = [
        f"{name(path)}:{node.lineno} {node.name}"
        for path in SOURCES
        if name(path).startswith(package + "/")
        for node in syntax(path).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    assert not missing


def test_most_of_ftrain_has_docstrings() -> None:
    nodes = [
        node
        for path in SOURCES
        if name(path).startswith("ftrain/")
        for node in syntax(path).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    documented = sum(bool(ast.get_docstring(node)) for node in nodes)
    assert documented >= 0.8 * len(nodes), f"{documented} of {len(nodes)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_suppressions_are_few(package: str) -> None:
    """At most 2 per 1000 lines."""
    texts = [path.read_text() for path in SOURCES if name(path).startswith(package + "/")]
    count = sum(len(SUPPRESSION.findall(text)) for text in texts)
    lines = sum(text.count("\n") for text in texts)
    assert count <= max(2, 2 * lines / 1000), f"{count} in {lines} lines"


def test_nothing_is_left_unfinished() -> None:
    words = re.compile(r"\b(TODO|FIXME|XXX|raise NotImplementedError)\b")
    found = [f"{name(path)}: {match.group()}" for path in SOURCES for match in words.finditer(path.read_text())]
    assert not found


def test_our_packages_are_the_ones_imported() -> None:
    """`storage` and `recovery` are short names: a foreign module of that name must never be taken for ours."""
    import recovery
    import storage

    for module in (storage, recovery):
        assert module.__file__ is not None
        assert Path(module.__file__).parent.parent == ROOT
