"""Batches as Parquet: written in one pass, hashed on the way, read back only where the digest
agrees.

Invariants:
- Every field of a `Sample` comes back as it was (log-probs as float32, which is what engines give).
- Equal tables give equal bytes, so equal digests.
- A file holds row groups of about `GROUP_BYTES`, so a trainer rank reads only what it needs.
- Whoever reads a whole file, or any part of a local one, has its SHA-256 checked. Reading some rows
  or columns of a remote file checks its length and the checksum of each page that is read; its
  SHA-256 was checked when the stage was looked up.
"""

import bisect
import hashlib
import itertools
import json
import os
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from rlcore.errors import Corrupt, DataError, NotFound
from rlcore.sample import Sample
from rlcore.store.files import damage_text, find_damage
from rlcore.store.manifest import FileRef, Manifest
from rlcore.store.objects import Objects
from rlcore.store.rows import samples_to_table, table_to_samples
from rlcore.store.schema import SAMPLES, SCORES, SELECTION, check_schema

__all__ = [
    "SAMPLES",
    "SCORES",
    "SELECTION",
    "SamplesWriter",
    "read_parts",
    "read_samples",
    "read_table",
    "rows_to_table",
    "samples_to_table",
    "table_to_samples",
    "write_samples",
    "write_table",
]

T = TypeVar("T")

GROUP_BYTES = 8 << 20
"""Raw bytes of a row group: small enough to skip, large enough to compress."""
PART_TOKENS = 2 << 20
"""Tokens of a part: some 27 MB of columns."""
_WRITERS = 8

_SPLIT_TYPES = (pa.int32(), pa.int64(), pa.float32(), pa.float64())
# (key, inode, mtime, digest) of local files found whole by this process; parts never change.
_verified: set[tuple[str, int, int, str]] = set()


def rows_to_table(schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows as dicts -> a table of SCORES or SELECTION.

    Raises:
        DataError: a row lacks a column, has another one, or a value of the wrong type.
    """
    names = set(schema.names)
    for position, row in enumerate(rows):
        if row.keys() != names:
            wrong = ", ".join(sorted(names ^ row.keys()))
            raise DataError(f"row {position} differs from its schema in {wrong}")
    try:
        return pa.Table.from_pylist(list(rows), schema=schema)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"rows do not fit their schema: {error}") from None


def write_table(objects: Objects, key: str, table: pa.Table) -> FileRef:
    """Write one Parquet file and give its reference. It appears whole or not at all.

    Args:
        objects: the store.
        key: a part's key, with this execution's attempt in it.
        table: of one of the schemas in `schema`.

    Raises:
        StoreError: the table has no known schema, or the store refuses.
    """
    check_schema(table.schema, f"the table for {objects.url(key)}")
    with objects.writer(key) as file:
        sink = _HashingSink(file)
        try:
            _encode(table, sink)
        finally:
            sink.close()
    return FileRef(key=key, bytes=sink.size, rows=table.num_rows, sha256=sink.hexdigest())


class SamplesWriter:
    """Writes a batch as parts of about `PART_TOKENS` tokens while it is made.

    Give it the samples as they are ready, in the order of the rows, whole groups at a time, then
    `finish`. Parts are turned into tables, encoded, digested and stored by threads, so that whoever
    generates the rest is not held up, and neither all columns of a large batch nor all its bytes
    are in memory at once.
    """

    def __init__(self, objects: Objects, key_of: Callable[[int], str]) -> None:
        """
        Args:
            objects: the store.
            key_of: number of a part, from 0 -> its key.
        """
        self._objects = objects
        self._key_of = key_of
        self._open: list[Sample] = []
        self._rows = 0
        self._parts: list[Future[FileRef]] = []
        self._threads = ThreadPoolExecutor(min(_WRITERS, os.cpu_count() or 1), "parts")

    @property
    def count(self) -> int:
        """How many samples it has been given."""
        return self._rows + len(self._open)

    def add(self, samples: Sequence[Sample]) -> None:
        """The next samples. They must not change any more."""
        self._open += samples
        *full, rest = itertools.pairwise([*_part_starts(self._open), len(self._open)])
        for start, end in full:
            self._write(self._open[start:end])
        self._open = self._open[rest[0] :]

    def finish(self) -> list[FileRef]:
        """Write what is left; all parts, once they are stored.

        Raises:
            DataError: a value does not fit its column; names the field and the row of the batch.
            StoreError: the store refuses.
        """
        if self._open or not self._parts:
            self._write(self._open)
        self._open = []
        try:
            return [part.result() for part in self._parts]
        finally:
            self.close()

    def close(self) -> None:
        """Give up what is not written yet."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _write(self, samples: list[Sample]) -> None:
        first_row, key = self._rows, self._key_of(len(self._parts))

        def write() -> FileRef:
            return write_table(self._objects, key, samples_to_table(samples, first_row=first_row))

        self._parts.append(self._threads.submit(write))
        self._rows += len(samples)


def write_samples(
    objects: Objects, key_of: Callable[[int], str], samples: Sequence[Sample]
) -> list[FileRef]:
    """Write a batch that is there; see `SamplesWriter`."""
    writer = SamplesWriter(objects, key_of)
    writer.add(samples)
    return writer.finish()


def _part_starts(samples: Sequence[Sample]) -> list[int]:
    """The first row of each part, the last of which may grow; groups stay together."""
    starts, tokens = [0], 0
    for row, sample in enumerate(samples):
        begins_group = row == 0 or sample.group_index != samples[row - 1].group_index
        if tokens >= PART_TOKENS and begins_group:
            starts.append(row)
            tokens = 0
        tokens += len(sample.tokens)
    return starts


def read_table(
    objects: Objects,
    ref: FileRef,
    columns: Sequence[str] | None = None,
    rows: Sequence[int] | None = None,
) -> pa.Table:
    """Read a file, or some of it.

    Args:
        objects: the store.
        ref: the file.
        columns: names, in the order wanted; None: all.
        rows: row numbers in the file, in the order wanted; None: all.

    Raises:
        Corrupt: the file is missing or its bytes are not those that were committed.
        StoreError: the schema version is not known.
        DataError: there is no such row or column.
    """
    where = objects.url(ref.key)
    try:
        if columns is None and rows is None:
            return _read_whole(objects, ref)
        return _read_some(objects, ref, columns, rows)
    except NotFound:
        raise Corrupt(f"{where} is missing; its manifest names it") from None
    except pa.ArrowException as error:
        raise Corrupt(f"{where} cannot be read: {error}") from error
    except OSError as error:
        # Arrow reports a failed page checksum as a bare OSError.
        if type(error) is not OSError:
            raise
        raise Corrupt(f"{where} cannot be read: {error}") from error


def read_parts(
    objects: Objects,
    refs: Sequence[FileRef],
    columns: Sequence[str] | None = None,
    rows: Sequence[int] | None = None,
) -> pa.Table:
    """Read a batch of several files. `rows` counts over them in order; see `read_table`.

    Raises:
        DataError: there are no files, or no such row.
    """
    if not refs:
        raise DataError("a batch without files cannot be read; its stage wrote none")
    if rows is None:
        return pa.concat_tables(_side_by_side(lambda ref: read_table(objects, ref, columns), refs))
    ends: list[int] = []
    for ref in refs:
        ends.append(ref.rows + (ends[-1] if ends else 0))
    _check_rows(rows, ends[-1], f"the batch of {refs[0].key}")
    wanted: dict[int, list[int]] = {}
    for row in rows:
        wanted.setdefault(bisect.bisect_right(ends, row), []).append(row)
    asked: list[tuple[FileRef, list[int]]] = []
    place: dict[int, int] = {}
    for part, own in sorted(wanted.items()):
        start = ends[part] - refs[part].rows
        own = list(dict.fromkeys(own))
        place.update(zip(own, itertools.count(len(place))))
        local = [row - start for row in own]
        asked.append((refs[part], local))
    if not asked:
        return read_table(objects, refs[0], columns, [])
    tables = _side_by_side(lambda one: read_table(objects, one[0], columns, one[1]), asked)
    return pa.concat_tables(tables).take([place[row] for row in rows])


def _side_by_side(read: Callable[[T], pa.Table], parts: Sequence[T]) -> list[pa.Table]:
    """The tables of several parts, read by threads, in order."""
    if len(parts) == 1:
        return [read(parts[0])]
    with ThreadPoolExecutor(min(_WRITERS, os.cpu_count() or 1, len(parts))) as threads:
        return list(threads.map(read, parts))


def read_samples(
    objects: Objects, manifests: Mapping[str, Manifest], limit: int | None = None
) -> list[dict[str, Any]]:
    """The samples of an iteration as people look at them, in the order of the rollout.

    Args:
        objects: the store.
        manifests: of the iteration's rollout, and of reward and filter as far as they are done.
        limit: at most so many.

    Returns:
        Dicts of row, group_index, index, prompt_id, prompt (text or messages), response, label,
        status, response_length, reward, reward_details, error, keep and reason.
    """
    files = manifests["rollout"].files
    count = sum(file.rows for file in files)
    rows = range(count if limit is None else min(limit, count))
    shown = read_parts(objects, files, _SHOWN, rows).to_pylist()
    for row, sample in enumerate(shown):
        messages, detail = sample.pop("prompt_messages"), sample.pop("reward_dict")
        if messages is not None:
            sample["prompt"] = json.loads(messages)
        if sample["label"] is not None:
            sample["label"] = json.loads(sample["label"])
        details = None if detail is None else json.loads(detail)
        sample |= {"row": row, "reward_details": details, "error": None}
        sample |= {"keep": True, "reason": None}
    for stage, columns in (("reward", _SHOWN_SCORES), ("filter", ["reward", "keep", "reason"])):
        if stage in manifests and rows:
            narrow = read_parts(objects, manifests[stage].files, columns, rows).to_pylist()
            for sample, more in zip(shown, narrow, strict=True):
                details = more.pop("details", None)
                sample |= more
                if details is not None:
                    sample["reward_details"] = json.loads(details)
    return shown


_SHOWN = [
    "group_index",
    "index",
    "prompt_id",
    "prompt",
    "prompt_messages",
    "response",
    "response_length",
    "label",
    "status",
    "reward",
    "reward_dict",
]
_SHOWN_SCORES = ["reward", "status", "details", "error"]


def _encode(table: pa.Table, sink: "_HashingSink") -> None:
    texts, split = [], {}
    for field in table.schema:
        nested = pa.types.is_list(field.type)
        kind = field.type.value_type if nested else field.type
        path = f"{field.name}.list.element" if nested else field.name
        if kind in _SPLIT_TYPES:
            split[path] = "BYTE_STREAM_SPLIT"
        elif field.name != "response":
            texts.append(path)
    row_bytes = max(1, table.nbytes // max(1, table.num_rows))
    pq.write_table(
        table,
        pa.PythonFile(sink, mode="w"),
        row_group_size=max(1, GROUP_BYTES // row_bytes),
        compression="zstd",
        use_dictionary=texts,
        # The samples of a group hold the same images: each is written once.
        dictionary_pagesize_limit=GROUP_BYTES,
        column_encoding=split,
        write_statistics=[name for name in table.schema.names if name in _WITH_STATISTICS],
        write_page_checksum=True,
    )


# Ranges that a reader may want to skip by; those of token ids say nothing and cost a tenth.
_WITH_STATISTICS = frozenset({"row", "prompt_id", "group_index", "index", "reward", "status"})


def _read_whole(objects: Objects, ref: FileRef) -> pa.Table:
    data = objects.get(ref.key)
    digest = hashlib.sha256(data).hexdigest()
    if (len(data), digest) != (ref.bytes, ref.sha256):
        raise Corrupt(damage_text(objects, ref, len(data), digest))
    table = pq.read_table(pa.BufferReader(data))
    check_schema(table.schema, objects.url(ref.key))
    return table


def _read_some(
    objects: Objects,
    ref: FileRef,
    columns: Sequence[str] | None,
    rows: Sequence[int] | None,
) -> pa.Table:
    where = objects.url(ref.key)
    _check_unread(objects, ref)
    with objects.open_read(ref.key) as source:
        file = pq.ParquetFile(source, page_checksum_verification=True)
        check_schema(file.schema_arrow, where)
        names = list(columns) if columns is not None else file.schema_arrow.names
        missing = [name for name in names if name not in file.schema_arrow.names]
        if missing:
            raise DataError(f"{where} has no column {', '.join(missing)}")
        if rows is None:
            return file.read(columns=names).select(names)
        _check_rows(rows, file.metadata.num_rows, where)
        return _take_rows(file, names, rows)


def _take_rows(file: pq.ParquetFile, names: list[str], rows: Sequence[int]) -> pa.Table:
    """The rows asked for, from the row groups that hold them."""
    ends: list[int] = []
    for group in range(file.metadata.num_row_groups):
        ends.append(file.metadata.row_group(group).num_rows + (ends[-1] if ends else 0))
    groups = sorted({bisect.bisect_right(ends, row) for row in rows})
    shift, before = {}, 0
    for group in groups:
        start = ends[group - 1] if group else 0
        shift[group] = before - start
        before += ends[group] - start
    table = file.read_row_groups(groups, columns=names).select(names)
    places = [row + shift[bisect.bisect_right(ends, row)] for row in rows]
    return table.take(pa.array(places, pa.int64()))


def _check_unread(objects: Objects, ref: FileRef) -> None:
    """What can be checked of a file without reading all of it over a network."""
    path = objects.local_path(ref.key)
    if path is None:
        size = objects.size(ref.key)
        if size != ref.bytes:
            raise Corrupt(damage_text(objects, ref, size, None))
        return
    if not path.is_file():
        raise NotFound(f"{path} does not exist")
    stat = path.stat()
    mark = (str(path), stat.st_ino, stat.st_mtime_ns, ref.sha256)
    if mark not in _verified:
        damage = find_damage(objects, ref)
        if damage:
            raise Corrupt(damage)
        _verified.add(mark)


def _check_rows(rows: Iterable[int], count: int, where: str) -> None:
    wrong = next((row for row in rows if not 0 <= row < count), None)
    if wrong is not None:
        raise DataError(f"{where} has no row {wrong}; it has {count} rows, counted from 0")


class _HashingSink:
    """A file for Arrow to write to.

    A thread digests and writes while Arrow encodes the next page.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.size = 0
        self.closed = False
        self._file = file
        self._digest = hashlib.sha256()
        self._error: Exception | None = None
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=64)
        self._thread = threading.Thread(target=self._drain, name="parquet-sink", daemon=True)
        self._thread.start()

    def write(self, data: Any) -> int:
        if self._error is not None:
            raise self._error
        size = memoryview(data).nbytes
        self.size += size
        self._queue.put(data)
        return size

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Nothing to do: `close` waits for all that was written."""

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._queue.put(None)
            self._thread.join()
        if self._error is not None:
            raise self._error

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def _drain(self) -> None:
        while (data := self._queue.get()) is not None:
            if self._error is None:
                try:
                    self._digest.update(data)
                    self._file.write(data)
                except OSError as error:
                    self._error = error
