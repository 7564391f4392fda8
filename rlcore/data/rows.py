"""Rows of a data file as plain dicts, one after another, each with its number and place.

Invariants:
- `Row.number` counts from 0 over the whole file, whatever the slice, so a prompt keeps its identity
  when only part of the file is used. Blank lines of a JSONL file are no rows.
- A line that cannot be read comes out as a `Row` with its error, for the caller to raise or to
  count.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rlcore.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

SLICE = re.compile(r"^(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")
LINES = (".jsonl", ".json")
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file.

    Attributes:
        number: counted from 0 in the whole file.
        place: where a person finds it, such as `prompts.jsonl line 3`.
        values: the columns; empty where `error` says what is wrong with the row.
        offset: byte of its file that its line begins at; -1 where it has none.
    """

    number: int
    place: str
    values: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    offset: int = -1


def split_slice(path: str) -> tuple[Path, slice]:
    """`file.jsonl@[0:100]` as the file and the rows to take; either bound may be empty or negative.

    Raises:
        DataError: what follows the '@' is no slice.
    """
    found = SLICE.match(path)
    if found is None:
        if re.search(r"@\[[^/]*$", path):
            raise DataError(f"{path}: write a slice as file.jsonl@[start:stop], with whole numbers")
        return Path(path), slice(None)
    start, stop = found["start"], found["stop"]
    if "-" in (start, stop):
        raise DataError(f"{path}: write a slice as file.jsonl@[start:stop], with whole numbers")
    return Path(found["path"]), slice(int(start) if start else None, int(stop) if stop else None)


def read_rows(spec: str) -> Iterator[Row]:
    """The rows that a path names: JSONL, Parquet, a folder of Parquet, or a saved Hugging Face data
    set.

    Raises:
        DataError: the file is missing, of an unknown kind or not readable at all.
    """
    path, part = split_slice(spec)
    if not path.exists():
        raise DataError(f"data file {path} does not exist{_nearest_file(path)}")
    if path.is_dir():
        yield from _table_rows(_read_folder(path), path, part)
    elif path.suffix in LINES:
        yield from _line_rows(path, part)
    elif path.suffix == ".parquet":
        yield from _table_rows(_read_parquet([path]), path, part)
    else:
        raise DataError(
            f"data file {path} is of an unknown kind; give a .jsonl or .parquet file, a folder of "
            "Parquet files, or a folder saved by Hugging Face datasets"
        )


# --- JSON lines -----------------------------------------------------------------------------------


def _line_rows(path: Path, part: slice) -> Iterator[Row]:
    start, stop = _bounds(path, part)
    number = -1
    try:
        with path.open("rb") as file:
            end = 0
            for line_number, line in enumerate(file, start=1):
                offset, end = end, end + len(line)
                if not line.removeprefix(BOM).strip():
                    continue
                number += 1
                if stop is not None and number >= stop:
                    return
                if number >= start:
                    yield parse_line(line, number, f"{path} line {line_number}", offset)
    except OSError as error:
        raise DataError(f"data file {path} cannot be read: {error}") from None


def _bounds(path: Path, part: slice) -> tuple[int, int | None]:
    start, stop = part.start or 0, part.stop
    if start >= 0 and (stop is None or stop >= 0):
        return start, stop
    with path.open("rb") as file:
        count = sum(1 for line in file if line.strip())
    start, stop, _ = part.indices(count)
    return start, stop


def parse_line(line: bytes, number: int, place: str, offset: int = -1) -> Row:
    """A line as a row; one that cannot be read has its error."""
    # The standard parser, not a faster one: it keeps integers of any size, which are labels in
    # maths.
    try:
        values = _DECODER.decode(line.removeprefix(BOM).decode("utf-8"))
    except UnicodeDecodeError as error:
        return Row(number, place, error=f"is not UTF-8 (byte {error.start + 1})")
    except json.JSONDecodeError as error:
        return Row(number, place, error=f"is not valid JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return Row(number, place, error=f"is not valid JSON: {error}")
    if not isinstance(values, dict):
        return Row(number, place, error=f"holds {_kind(values)}, not a JSON object with columns")
    return Row(number, place, values, offset=offset)


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


# json.loads would make one for each line.
_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _kind(value: Any) -> str:
    names = {
        list: "a list",
        str: "a text",
        int: "a number",
        float: "a number",
        bool: "true or false",
    }
    return "null" if value is None else names.get(type(value), type(value).__name__)


# --- tables ---------------------------------------------------------------------------------------


def _table_rows(table: "pa.Table", path: Path, part: slice) -> Iterator[Row]:
    start, stop, _ = part.indices(table.num_rows)
    number = start
    for batch in table.slice(start, max(0, stop - start)).to_batches(max_chunksize=4096):
        for values in batch.to_pylist():
            yield Row(number, f"{path} row {number}", values)
            number += 1


def _read_folder(path: Path) -> "pa.Table":
    if (path / "dataset_dict.json").exists():
        splits = sorted(p.name for p in path.iterdir() if p.is_dir())
        raise DataError(
            f"data folder {path} holds several splits ({', '.join(splits)}); "
            f"name one of them, such as {path / splits[0] if splits else path / 'train'}"
        )
    if (path / "state.json").exists():
        return _read_saved_dataset(path)
    files = sorted(path.glob("*.parquet"))
    if not files:
        raise DataError(
            f"data folder {path} holds neither Parquet files nor a saved data set (state.json)"
        )
    return _read_parquet(files)


def _read_saved_dataset(path: Path) -> "pa.Table":
    """What `datasets.Dataset.save_to_disk` wrote: Arrow streams, listed in order in state.json."""
    import pyarrow as pa

    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        tables = []
        for entry in state["_data_files"]:
            with pa.memory_map(str(path / entry["filename"])) as source:
                tables.append(pa.ipc.open_stream(source).read_all())
        return pa.concat_tables(tables)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"data folder {path} is no whole saved data set: {error}") from None


def _read_parquet(files: list[Path]) -> "pa.Table":
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = []
    for file in files:
        try:
            tables.append(pq.read_table(file, partitioning=None))
        except (OSError, ValueError) as error:
            raise DataError(f"data file {file} is no readable Parquet file: {error}") from None
    try:
        return pa.concat_tables(tables)
    except pa.ArrowInvalid as error:
        raise DataError(
            f"the Parquet files of {files[0].parent} have different columns: {error}"
        ) from None


def _nearest_file(path: Path) -> str:
    import difflib

    if not path.parent.is_dir():
        return f", nor does its folder {path.parent}"
    near = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir()], n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""
