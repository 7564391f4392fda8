"""The pages say what is so: tables are those of the code, links lead somewhere, commands parse."""

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

from flows.cli import app
from rlcore.config import load_config
from rlcore.observe.sql import connect
from rlcore.store.objects import Objects

REPO = Path(__file__).parents[3]
PAGES = sorted([*REPO.glob("*.md"), *REPO.glob("docs/*.md"), *REPO.glob("examples/*/README.md")])
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
COMMAND = re.compile(r"^ {4}(?:\$ )?(?P<line>sluice [^\n#]*)", re.MULTILINE)
INLINE = re.compile(r"`sluice (?P<name>[a-z][a-z-]*)[^`]*`")
PLACEHOLDERS = {"CONFIG", "RUN", "N", "ROOT", "NAME"}


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in heads}


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """The script that writes the tables."""
    spec = importlib.util.spec_from_file_location("docs_generate", REPO / "docs" / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_generated_tables_are_those_of_the_code(generate: ModuleType) -> None:
    seen = []
    for page in REPO.glob("docs/*.md"):
        text = text_of(page)
        assert generate.filled(text) == text, f"run `python docs/generate.py`: {page.name} is old"
        seen += [m["name"] for m in generate.BLOCK.finditer(text)]
    assert sorted(seen) == sorted(generate.TABLES)


def test_a_changed_table_is_noticed(generate: ModuleType) -> None:
    text = text_of(REPO / "docs" / "configuration.md")
    assert "| `lr` | number ≥ 0 |" in text
    assert generate.filled(text.replace("| `lr` | number ≥ 0 |", "| `lr` | text |")) == text


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(REPO).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for match in LINK.finditer(text_of(page)):
        target = match["target"]
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(there), f"{page.name}: {target} names no heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(REPO).as_posix())
def test_commands_take_what_the_pages_give_them(page: Path) -> None:
    for match in COMMAND.finditer(text_of(page)):
        words = shlex.split(match["line"])[1:]
        if PLACEHOLDERS & {w.strip("[].") for w in words} or any(w[0] in "[<" for w in words):
            continue
        if words and words[-1].startswith("rollout.temprature"):
            continue  # Shown for its error.
        app.parse_args(words, exit_on_error=False, print_error=False)
    for match in INLINE.finditer(text_of(page)):
        assert match["name"] in app, f"{page.name}: there is no `sluice {match['name']}`"


def test_every_command_has_its_place_in_the_page() -> None:
    text = text_of(REPO / "docs" / "commands.md")
    names = [name for name in app if not name.startswith("-")]
    assert len(names) >= 8
    assert [n for n in names if f"\n## {n}\n" not in text] == []


def test_the_views_have_the_columns_that_the_page_says(tmp_path: Path) -> None:
    sql = connect(Objects.open(tmp_path))
    text = text_of(REPO / "docs" / "store.md")
    for view in ("iterations", "stages"):
        [line] = re.findall(rf"^\| `{view}` \|.*$", text, re.MULTILINE)
        said = re.findall(r"`(\w+)`", line)[1:]
        assert said == [row[0] for row in sql.execute(f"DESCRIBE {view}").fetchall()]
    own = [row[0] for row in sql.execute("DESCRIBE samples").fetchall()]
    assert {"run_id", "iteration", "row", "details", "error", "keep", "reason"} <= set(own)


def test_the_settings_in_the_pages_load(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(REPO / "examples")
    found = {
        name: body
        for page in REPO.glob("docs/*.md")
        for name, body in re.findall(
            r"^```toml file=(\S+)\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL
        )
    }
    assert len(found) >= 6
    for name, body in found.items():
        (tmp_path / name).write_text(body)
        config = load_config(tmp_path / name)
        assert config.reward.rm_type or config.reward.custom_rm_path.endswith(":reward")


def test_the_tests_that_the_table_of_features_names_exist() -> None:
    named = re.findall(r"`(tests/[^`:]+)(?:::([a-z0-9_]+))?`", text_of(REPO / "docs/features.md"))
    assert len(named) > 40
    for file, name in named:
        text = (REPO / file).read_text(encoding="utf-8")
        assert f"def {name}(" in text if name else "def test_" in text, (file, name)
