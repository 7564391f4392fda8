"""Samples <-> Arrow: columns built from flat arrays, without a Python step per token.

Invariant: `table_to_samples(samples_to_table(s)) == s`, for log-probs that are float32 and for JSON
fields made of what JSON has (texts, numbers, booleans, None, lists, dicts with text keys), and of
bytes, numpy arrays and torch tensors (`rlcore.store.packed`).
"""

import itertools
import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rlcore.errors import DataError
from rlcore.sample import Sample, Status
from rlcore.store.packed import MARK, pack, unpack
from rlcore.store.schema import SAMPLES, check_schema

_PLAIN = (
    "prompt_id",
    "group_index",
    "index",
    "rollout_id",
    "response",
    "response_length",
    "remove_sample",
    "seed",
    "session_id",
    "generate_function_path",
    "custom_rm_path",
    "non_generation_time",
    "weight_versions",
)
_NUMBER_LISTS = (
    "tokens",
    "loss_mask",
    "rollout_log_probs",
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
    "teacher_log_probs",
)
_JSON = (
    "label",
    "metadata",
    "train_metadata",
    "apply_chat_template_kwargs",
    "multimodal_inputs",
    "multimodal_train_inputs",
    "multimodal_train_input_id",
    "spec_info",
    "prefix_cache_info",
)

# json.dumps would make one for each value.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=pack)


def samples_to_table(samples: Sequence[Sample], first_row: int = 0) -> pa.Table:
    """Samples -> a table of schema SAMPLES, one row each, in their order.

    Args:
        samples: of a batch, or of a part of one.
        first_row: row of the first in the batch, for errors.

    Raises:
        DataError: a value does not fit its column; names the field and the row.
    """
    columns: dict[str, list[Any]] = {
        name: [getattr(s, name) for s in samples] for name in (*_PLAIN, *_NUMBER_LISTS, *_JSON)
    }
    columns["status"] = [s.status.value for s in samples]
    columns["prompt"] = [s.prompt if isinstance(s.prompt, str) else None for s in samples]
    columns["prompt_messages"] = [None if isinstance(s.prompt, str) else s.prompt for s in samples]
    columns["reward"] = [None if isinstance(s.reward, dict) else s.reward for s in samples]
    columns["reward_dict"] = [s.reward if isinstance(s.reward, dict) else None for s in samples]
    experts = [_experts(s.rollout_routed_experts, row) for row, s in enumerate(samples, first_row)]
    columns["routed_experts"] = [None if e is None else e.ravel() for e in experts]
    columns["routed_experts_shape"] = [None if e is None else list(e.shape) for e in experts]
    return pa.table([_column(f, columns[f.name], first_row) for f in SAMPLES], schema=SAMPLES)


def table_to_samples(table: pa.Table) -> list[Sample]:
    """The inverse of `samples_to_table`.

    Raises:
        StoreError: the table is no SAMPLES table of a known version.
    """
    check_schema(table.schema, "the table")
    table = table.combine_chunks()
    names = set(table.column_names)
    columns: dict[str, list[Any]] = {name: table[name].to_pylist() for name in _PLAIN}
    for name in _NUMBER_LISTS:
        columns[name] = _to_lists(table[name])
    for name in _JSON:
        columns[name] = _from_json(table[name]) if name in names else [None] * table.num_rows
    columns["status"] = [Status(text) for text in table["status"].to_pylist()]
    columns["prompt"] = _either(table["prompt"].to_pylist(), _from_json(table["prompt_messages"]))
    columns["reward"] = _either(table["reward"].to_pylist(), _from_json(table["reward_dict"]))
    columns["rollout_routed_experts"] = [
        None if flat is None else np.asarray(flat, np.int32).reshape(shape)
        for flat, shape in zip(
            _to_lists(table["routed_experts"], to_list=False),
            _to_lists(table["routed_experts_shape"]),
            strict=True,
        )
    ]
    fields = list(columns)
    rows = zip(*columns.values(), strict=True)
    return [Sample(**dict(zip(fields, row, strict=True))) for row in rows]


def _column(field: pa.Field, values: list[Any], first_row: int) -> pa.Array:
    if (field.metadata or {}).get(b"encoding") == b"json":
        values = [
            None if v is None else _dump(v, field.name, row)
            for row, v in enumerate(values, first_row)
        ]
    is_numbers = pa.types.is_list(field.type) and field.type.value_type != pa.string()
    build: Callable[[list[Any], pa.DataType], pa.Array] = _from_lists if is_numbers else pa.array
    try:
        return build(values, field.type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        row = first_row + _first_misfit(build, values, field.type)
        raise DataError(
            f"sample {row}: field {field.name} does not fit {field.type} "
            f"({field.metadata[b'unit'].decode()}): {error}"
        ) from None


def _first_misfit(
    build: Callable[[list[Any], pa.DataType], pa.Array], values: list[Any], kind: pa.DataType
) -> int:
    for row, value in enumerate(values):
        try:
            build([value], kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            return row
    return len(values)


def _from_lists(lists: list[Any], kind: pa.ListType) -> pa.ListArray:
    """Lists of numbers (None: null) -> a list column, by way of one flat array."""
    dtype = np.dtype(kind.value_type.to_pandas_dtype())
    present = [x for x in lists if x is not None]
    lengths = [0 if x is None else len(x) for x in lists]
    total = sum(lengths)
    if total > np.iinfo(np.int32).max:
        raise ValueError(f"{total} values in one part; write the batch in more parts")
    if dtype == np.int8:
        # bytes() walks a list four times as fast as numpy does; a mask is 0 or 1.
        flat = np.frombuffer(b"".join(map(bytes, present)), np.int8)
        if flat.size and flat.min() < 0:
            raise ValueError("a value is above 127")
    elif present and all(isinstance(x, np.ndarray) for x in present):
        joined = np.concatenate(present)
        flat = joined.astype(dtype, casting="same_kind")
        if dtype.kind == "i" and not np.array_equal(flat, joined):
            raise OverflowError(f"a value is beyond {dtype}")
    else:
        flat = _flatten(present, dtype, total)
    offsets = np.zeros(len(lists) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    absent = None
    if len(present) < len(lists):
        absent = pa.array([x is None for x in lists])
    return pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(flat, kind.value_type), type=kind, mask=absent
    )


def _flatten(lists: list[Any], dtype: np.dtype[Any], total: int) -> "np.ndarray[Any, Any]":
    """Numbers of several lists as one array."""
    code = {"int32": "i", "float32": "f"}.get(dtype.name)
    if code is not None:
        try:
            # Takes a list half the time that numpy does, and refuses what is no such number.
            return np.frombuffer(
                b"".join([struct.pack(f"{len(x)}{code}", *x) for x in lists]), dtype
            )
        except (struct.error, OverflowError, TypeError):
            pass  # Its errors say less than numpy's.
    return np.fromiter(itertools.chain.from_iterable(lists), dtype, total)


def _to_lists(column: pa.ChunkedArray, *, to_list: bool = True) -> list[Any]:
    """A list column -> a list (or an array) a row, None for null."""
    out: list[Any] = []
    for chunk in column.chunks:
        offsets = chunk.offsets.to_numpy().tolist()
        flat = chunk.values.to_numpy(zero_copy_only=False)
        values = flat.tolist() if to_list else flat
        spans = itertools.pairwise(offsets)
        if chunk.null_count:
            valid = chunk.is_valid().to_pylist()
            out += [values[a:b] if ok else None for ok, (a, b) in zip(valid, spans, strict=True)]
        else:
            out += [values[a:b] for a, b in spans]
    return out


def _experts(value: Any, row: int) -> "np.ndarray[Any, np.dtype[np.int32]] | None":
    if value is None:
        return None
    array = np.asarray(value)
    if not np.issubdtype(array.dtype, np.integer) and array.size:
        raise DataError(
            f"sample {row}: rollout_routed_experts has type {array.dtype}; expert ids are integers"
        )
    return array.astype(np.int32)


def _dump(value: Any, field: str, row: int) -> str:
    if isinstance(value, dict) and not value:
        return "{}"  # Most JSON fields of a sample are, and a call of the encoder costs 3 us.
    try:
        return _ENCODER.encode(value)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"sample {row}: field {field} has no JSON form: {error}; use numbers, texts, lists, "
            "dicts, bytes and arrays"
        ) from None


def _from_json(column: pa.ChunkedArray) -> list[Any]:
    return [
        # The hook costs a call for each dict.
        None if text is None else json.loads(text, object_hook=unpack if MARK in text else None)
        for text in column.to_pylist()
    ]


def _either(first: list[Any], second: list[Any]) -> list[Any]:
    return [a if b is None else b for a, b in zip(first, second, strict=True)]
