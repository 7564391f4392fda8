"""Large files stay on disk: the same prompts as from memory, and memory that does not grow."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlcore.config.tree import DataConfig
from rlcore.data import dataset, load_dataset
from rlcore.data.index import LinePrompts
from rlcore.errors import DataError

ROOT = Path(__file__).parents[3]


class CharTokenizer:
    """Ids are code points."""

    chat_template = "yes"

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(c) for c in t] for t in texts]}

    def apply_chat_template(self, messages: Any, tools: Any, tokenize: bool, **kw: Any) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Rows of all kinds: blank lines, a bad one, long ones, letters of several bytes."""
    lines = [json.dumps({"prompt": f"{k}é" * (k % 7 + 1), "y": k}) for k in range(50)]
    lines[10:10] = ["", "{broken", "   "]
    file = tmp_path / "rows.jsonl"
    file.write_text("\ufeff" + "\n".join(lines) + "\n", encoding="utf-8")
    return file


@pytest.mark.parametrize("part", ["", "@[5:40]", "@[-20:]"])
@pytest.mark.parametrize("more", [{}, {"max_prompt_len": 12}, {"apply_chat_template": True}])
def test_the_prompts_are_those_that_memory_would_hold(
    path: Path, monkeypatch: pytest.MonkeyPatch, part: str, more: dict[str, Any]
) -> None:
    config = DataConfig(path=f"{path}{part}", label_key="y", skip_bad_rows=True, **more)
    held = load_dataset(config, CharTokenizer)
    monkeypatch.setattr(dataset, "IN_MEMORY", 0)
    indexed = load_dataset(config, CharTokenizer)
    assert isinstance(indexed.prompts, LinePrompts) and isinstance(held.prompts, list)
    counts = [(len(d), d.skipped, d.too_long, d.columns) for d in (held, indexed)]
    assert counts[0] == counts[1]
    order = [*range(len(held))][::-1]
    assert indexed.tokenized(order, CharTokenizer()) == held.tokenized(order, CharTokenizer())


def test_a_file_that_changes_meanwhile_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "IN_MEMORY", 0)
    data = load_dataset(DataConfig(path=str(path), skip_bad_rows=True), CharTokenizer)
    path.write_text(path.read_text() + "\n")
    with pytest.raises(DataError, match=r"rows\.jsonl was changed while it was in use"):
        data.tokenized([3], CharTokenizer())


PROGRAM = """
import resource, sys
from rlcore.config.tree import DataConfig
from rlcore.data import Cursor, check_dataset, load_dataset

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def tokenize(texts, add_special_tokens):
    return {"input_ids": [[1, 2] for _ in texts]}

config = DataConfig(path=sys.argv[1])
order_first = __import__("numpy")
start = peak()
rows = check_dataset(config).rows
data = load_dataset(config, lambda: None)
picked, _ = data.order(0, True).plan(Cursor(), 1000)
assert len(data.tokenized(picked, tokenize)) == 1000 and len(data) == rows
print(rows, peak() - start)
"""


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    file, row = tmp_path / "big.jsonl", 4096
    filler = "x" * row
    with file.open("w") as out:
        for k in range(30_000):
            out.write(f'{{"prompt": "{k}", "metadata": {{"text": "{filler}"}}}}\n')
    size = file.stat().st_size
    assert size > 120e6
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(file)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    rows, grown = map(int, done.stdout.split())
    assert rows == 30_000
    assert grown < 24e6, f"{grown / 1e6:.0f} MB for a file of {size / 1e6:.0f} MB"
