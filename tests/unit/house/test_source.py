"""House rules that can be read off the source: sizes, docstrings, import direction, no print."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = ("flows", "tasks", "rlcore")
TREES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for package in PACKAGES
    for path in sorted(ROOT.joinpath(package).rglob("*.py"))
}
COMMAND_LINE = ("flows/cli", "flows/commands/inspect", "flows/commands/launch")
LONGEST_FILE, LONGEST_FUNCTION = 600, 80


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and absolute name of each import, those inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute in this repository"
            yield node.lineno, node.module or ""


def forbidden(file: str) -> set[str]:
    """Top-level packages that a file must not import."""
    if file.startswith("flows/"):
        return set()
    if file.startswith("tasks/"):
        return {"flows"}
    names = {"prefect", "flows", "tasks"}
    if file.startswith(("rlcore/config/", "rlcore/store/", "rlcore/algorithms/")):
        names |= {"ray", "sglang", "megatron"}
    if file.startswith("rlcore/config/"):
        names |= {"torch", "transformers"}
    return names


def test_the_packages_are_found() -> None:
    assert {file.split("/")[0] for file in TREES} == set(PACKAGES)


def test_imports_go_one_way() -> None:
    wrong = [
        f"{file}:{line} imports {name}"
        for file, tree in TREES.items()
        for line, name in imported(tree)
        if name.split(".")[0] in forbidden(file)
    ]
    assert wrong == []


def test_a_module_says_what_it_is_for() -> None:
    assert [file for file, tree in TREES.items() if not ast.get_docstring(tree)] == []


def test_files_are_small() -> None:
    lines = {f: len((ROOT / f).read_text(encoding="utf-8").splitlines()) for f in TREES}
    assert {file: count for file, count in lines.items() if count > LONGEST_FILE} == {}


def test_functions_are_small() -> None:
    sizes = {
        f"{file}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: size for name, size in sizes.items() if size > LONGEST_FUNCTION} == {}


def test_only_the_command_line_prints() -> None:
    calls = [
        f"{file}:{node.lineno}"
        for file, tree in TREES.items()
        if not file.startswith(COMMAND_LINE)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        if isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert calls == []


def test_nothing_is_left_to_do_in_comments() -> None:
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in TREES}
    words = ("TODO", "FIXME", "NotImplementedError")
    assert [(f, word) for f, text in texts.items() for word in words if word in text] == []


def test_nothing_is_run_between_fork_and_exec() -> None:
    """It can hang in a process with threads; `rlcore.with_parent` does without."""
    found = [
        f"{file}:{node.lineno}"
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and any(k.arg == "preexec_fn" for k in node.keywords)
    ]
    assert found == []
