"""Parquet batches: samples come back as they were, readable by others, damaged files refused."""

import dataclasses
import hashlib
import time
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlcore.errors import Corrupt, DataError, StoreError
from rlcore.sample import Sample, Status
from rlcore.store import batch
from rlcore.store.batch import (
    SAMPLES,
    SCORES,
    SELECTION,
    SamplesWriter,
    read_parts,
    read_table,
    rows_to_table,
    samples_to_table,
    table_to_samples,
    write_samples,
    write_table,
)
from rlcore.store.objects import Objects
from rlcore.store.schema import VERSION_KEY

leaf = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
json_value = st.recursive(
    leaf,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)
json_dict = st.dictionaries(st.text(max_size=5), json_value, max_size=3)
ids = st.integers(0, 2**31 - 1)
float32 = st.floats(width=32, allow_nan=False)
int64 = st.integers(-(2**63), 2**63 - 1)
text = st.text(max_size=12)


@st.composite
def samples(draw: Any) -> Sample:
    length, prompt = draw(st.integers(0, 4)), draw(st.integers(0, 3))

    def maybe(strategy: Any) -> Any:
        return draw(st.none() | strategy)

    def per_token(element: Any, count: int = length) -> Any:
        return st.lists(element, min_size=count, max_size=count)

    experts = maybe(st.integers(0, 3).map(lambda k: np.arange(6 * k, dtype=np.int32)))
    return Sample(
        group_index=maybe(int64),
        index=maybe(int64),
        rollout_id=maybe(int64),
        prompt_id=draw(text),
        prompt=draw(text | st.lists(json_dict, max_size=2)),
        label=draw(json_value),
        tokens=draw(per_token(ids, length + prompt)),
        response=draw(text),
        response_length=length,
        loss_mask=maybe(per_token(st.integers(0, 1))),
        rollout_log_probs=maybe(per_token(float32)),
        weight_versions=draw(st.lists(text, max_size=3)),
        status=draw(st.sampled_from(Status)),
        reward=maybe(st.floats(allow_nan=False) | json_dict),
        remove_sample=draw(st.booleans()),
        seed=maybe(int64),
        metadata=draw(json_dict),
        train_metadata=maybe(json_dict),
        session_id=maybe(text),
        generate_function_path=maybe(text),
        custom_rm_path=maybe(text),
        apply_chat_template_kwargs=draw(json_dict),
        multimodal_inputs=maybe(json_dict),
        multimodal_train_inputs=maybe(json_dict),
        multimodal_train_input_id=draw(json_value),
        rollout_routed_experts=None if experts is None else experts.reshape(-1, 2, 3),
        rollout_top_p_token_ids=maybe(st.lists(ids, max_size=4)),
        rollout_top_p_token_offsets=maybe(per_token(ids, length + 1)),
        teacher_log_probs=maybe(per_token(float32)),
        spec_info=draw(json_dict),
        prefix_cache_info=draw(json_dict),
        non_generation_time=draw(st.floats(0, 1e6)),
    )


def plain(sample: Sample) -> dict[str, Any]:
    """All fields, the experts as (shape, type, list), so that == compares them."""
    fields = {f.name: getattr(sample, f.name) for f in dataclasses.fields(sample)}
    experts = fields["rollout_routed_experts"]
    if experts is not None:
        fields["rollout_routed_experts"] = (experts.shape, experts.dtype, experts.tolist())
    return fields


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(samples(), min_size=1, max_size=5))
def test_samples_come_back_as_they_were(made: list[Sample]) -> None:
    objects = Objects.open("memory://hypothesis")
    ref = write_table(objects, "p.parquet", samples_to_table(made))
    assert ref.rows == len(made)
    back = table_to_samples(read_table(objects, ref))
    assert [plain(s) for s in back] == [plain(s) for s in made]
    assert [type(s.status) for s in back] == [Status] * len(made)


def test_the_fields_of_slime_s_sample_all_have_a_column() -> None:
    fields = [
        "group_index",
        "index",
        "rollout_id",
        "prompt",
        "tokens",
        "multimodal_inputs",
        "multimodal_train_inputs",
        "multimodal_train_input_id",
        "apply_chat_template_kwargs",
        "response",
        "response_length",
        "label",
        "reward",
        "loss_mask",
        "weight_versions",
        "rollout_log_probs",
        "rollout_top_p_token_ids",
        "rollout_top_p_token_offsets",
        "rollout_routed_experts",
        "remove_sample",
        "teacher_log_probs",
        "status",
        "metadata",
        "generate_function_path",
        "custom_rm_path",
        "train_metadata",
        "session_id",
        "non_generation_time",
        "spec_info",
        "prefix_cache_info",
    ]
    own = {f.name for f in dataclasses.fields(Sample)}
    assert set(fields) <= own
    renamed = {"rollout_routed_experts": "routed_experts"}
    assert {renamed.get(name, name) for name in own} <= set(SAMPLES.names)


def test_what_a_processor_makes_of_an_image_comes_back_bit_for_bit() -> None:
    import torch

    pixels = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    made = Sample(
        multimodal_inputs={"image": [{"bytes": bytes(range(256)), "path": None}]},
        multimodal_train_inputs={
            "pixel_values": pixels.transpose(2, 0, 1),
            "image_grid_thw": torch.tensor([[1, 4, 6]]),
            "half": torch.tensor([[0.1, -3.0]], dtype=torch.bfloat16),
            "none": torch.empty((0, 2), dtype=torch.float16),
            "flags": np.array([True, False]),
            "scale": np.float16(0.1),
        },
    )
    [back] = table_to_samples(samples_to_table([made]))
    assert back.multimodal_inputs == made.multimodal_inputs
    assert made.multimodal_train_inputs and back.multimodal_train_inputs
    for name, was in made.multimodal_train_inputs.items():
        now = back.multimodal_train_inputs[name]
        assert (type(now), now.dtype, tuple(now.shape)) == (type(was), was.dtype, tuple(was.shape))
        assert (now == was).all()
    with pytest.raises(DataError, match=r"sample 0: field metadata has no JSON form.*object"):
        samples_to_table([Sample(metadata={"x": object()})])


def test_samples_of_an_older_version_are_read() -> None:
    made = group(4)
    table = samples_to_table(made).drop_columns(["multimodal_train_input_id"])
    old = table.replace_schema_metadata(table.schema.metadata | {VERSION_KEY: b"1"})
    objects = Objects.open("memory://older")
    back = table_to_samples(read_table(objects, write_table(objects, "p.parquet", old)))
    assert [plain(s) for s in back] == [plain(s) for s in made]


def group(count: int, length: int = 6) -> list[Sample]:
    return [
        Sample(
            group_index=i // 4,
            index=i,
            prompt_id=f"p{i // 4}",
            prompt="7=",
            label="777",
            tokens=[7, 8, *range(i, i + length)],
            response="777",
            response_length=length,
            loss_mask=[1] * length,
            rollout_log_probs=[-0.5] * length,
            weight_versions=["3"],
            status=Status.COMPLETED,
            reward=i / 4,
            metadata={"level": i},
        )
        for i in range(count)
    ]


def test_no_samples_make_an_empty_table(disk: Objects) -> None:
    ref = write_table(disk, "p.parquet", samples_to_table([]))
    assert ref.rows == 0 and table_to_samples(read_table(disk, ref)) == []


def test_equal_tables_give_equal_files(objects: Objects) -> None:
    made = group(20)
    first = write_table(objects, "a.parquet", samples_to_table(made))
    second = write_table(objects, "b.parquet", samples_to_table(made))
    assert (first.sha256, first.bytes) == (second.sha256, second.bytes)
    assert objects.get("a.parquet") == objects.get("b.parquet")


def test_others_can_read_it(disk: Objects) -> None:
    ref = write_table(disk, "p.parquet", samples_to_table(group(8)))
    path = str(disk.local_path(ref.key))
    table = pq.read_table(path)
    assert table["tokens"][3].as_py() == [7, 8, 3, 4, 5, 6, 7, 8]
    assert pa.types.is_int32(table.schema.field("tokens").type.value_type)
    assert pa.types.is_float32(table.schema.field("rollout_log_probs").type.value_type)
    assert pa.types.is_int8(table.schema.field("loss_mask").type.value_type)
    assert table.schema.field("tokens").metadata[b"unit"].startswith(b"token id")
    frame = pd.read_parquet(path)
    assert frame["reward"].tolist() == [i / 4 for i in range(8)]
    assert frame["tokens"][2].tolist() == [7, 8, 2, 3, 4, 5, 6, 7]
    found = duckdb.sql(
        f"SELECT sum(len(tokens)), sum(list_sum(rollout_log_probs)), max(metadata->>'level'), "
        f"min(label) FROM '{path}' WHERE status = 'completed'"
    ).fetchall()
    assert found == [(64, -24.0, "7", '"777"')]


def test_some_rows_and_columns(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "GROUP_BYTES", 2000)
    made = group(60)
    refs = [
        write_table(objects, "a.parquet", samples_to_table(made[:40])),
        write_table(objects, "b.parquet", samples_to_table(made[40:])),
    ]
    with objects.open_read("a.parquet") as file:
        assert pq.ParquetFile(file).metadata.num_row_groups > 3
    wanted = [39, 2, 17, 2]
    table = read_table(objects, refs[0], ["index", "tokens"], wanted)
    assert table.schema.names == ["index", "tokens"]
    assert table["index"].to_pylist() == wanted
    assert table["tokens"].to_pylist() == [made[i].tokens for i in wanted]
    wanted = [59, 0, 40, 39, 0]
    assert read_parts(objects, refs, ["index"], wanted)["index"].to_pylist() == wanted
    assert read_parts(objects, refs, ["index"])["index"].to_pylist() == list(range(60))
    assert [plain(s) for s in table_to_samples(read_parts(objects, refs))] == [
        plain(s) for s in made
    ]
    assert read_parts(objects, refs, ["index"], []).num_rows == 0
    with pytest.raises(DataError, match="no row 60; it has 60 rows"):
        read_parts(objects, refs, ["index"], [60])
    with pytest.raises(DataError, match="no row -1"):
        read_table(objects, refs[0], None, [-1])
    with pytest.raises(DataError, match="no column nope"):
        read_table(objects, refs[0], ["nope"])


@pytest.mark.parametrize("some", [None, ["tokens"]])
def test_damage_is_found(objects: Objects, some: list[str] | None) -> None:
    ref = write_table(objects, "p.parquet", samples_to_table(group(50)))
    data = objects.get("p.parquet")
    at = pq.ParquetFile(pa.BufferReader(data)).metadata.row_group(0).column(9)
    assert at.path_in_schema == "tokens.list.element"
    bad = bytearray(data)
    bad[at.data_page_offset + at.total_compressed_size - 3] ^= 4
    for content in (bytes(bad), data[:-1], data + b"x", b""):
        objects.put("p.parquet", content)
        with pytest.raises(Corrupt, match=r"p\.parquet"):
            read_table(objects, ref, some)
    objects.delete("p.parquet")
    with pytest.raises(Corrupt, match="is missing"):
        read_table(objects, ref, some)


def test_an_unknown_version_is_refused(disk: Objects) -> None:
    table = samples_to_table(group(2))
    newer = table.replace_schema_metadata(table.schema.metadata | {VERSION_KEY: b"7"})
    with pytest.raises(StoreError, match="samples version 7, expected 2"):
        write_table(disk, "p.parquet", newer)
    with pytest.raises(StoreError, match="samples version 7, expected 2"):
        table_to_samples(newer)
    with disk.writer("p.parquet") as file:
        pq.write_table(newer, file)
    data = disk.get("p.parquet")
    ref = write_table(disk, "q.parquet", table).model_copy(
        update={"key": "p.parquet", "bytes": len(data), "sha256": sha(data)}
    )
    for columns in (None, ["tokens"]):
        with pytest.raises(StoreError, match="samples version 7, expected 2"):
            read_table(disk, ref, columns)
    with pytest.raises(StoreError, match="schema 'none'"):
        write_table(disk, "p.parquet", pa.table({"a": [1]}))


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tokens": [1, 2**31]}, "tokens"),
        ({"tokens": [1, "x"]}, "tokens"),
        ({"loss_mask": [1, 300]}, "loss_mask"),
        ({"loss_mask": [1, 200]}, "loss_mask"),
        ({"metadata": {"a": object()}}, "metadata"),
        ({"response": "\ud800"}, "response"),
        ({"reward": "high"}, "reward"),
        ({"rollout_routed_experts": np.array([[[0.5]]])}, "rollout_routed_experts"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], field: str) -> None:
    made = [*group(2), dataclasses.replace(group(1)[0], **change)]
    with pytest.raises(DataError, match=f"sample 2: .*{field}"):
        samples_to_table(made)


def test_narrow_rows(disk: Objects) -> None:
    rows = [
        {"row": 0, "group_index": 0, "index": 0, "reward": 1.0, "keep": True, "reason": None},
        {"row": 1, "group_index": 0, "index": 1, "reward": None, "keep": False, "reason": "x"},
    ]
    ref = write_table(disk, "s.parquet", rows_to_table(SELECTION, rows))
    assert read_table(disk, ref).to_pylist() == rows
    with pytest.raises(DataError, match="row 1 differs from its schema in reason"):
        rows_to_table(SELECTION, [rows[0], {k: v for k, v in rows[1].items() if k != "reason"}])
    with pytest.raises(DataError, match="do not fit"):
        rows_to_table(SELECTION, [rows[0] | {"keep": "yes"}])
    assert rows_to_table(SCORES, []).num_rows == 0


def test_a_full_disk_is_an_error_and_leaves_nothing(disk: Objects, monkeypatch: Any) -> None:
    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

    real = batch._HashingSink
    monkeypatch.setattr(batch, "_HashingSink", lambda file: real(Full(file)))
    with pytest.raises(StoreError, match=r"d/p\.parquet: No space left"):
        write_table(disk, "d/p.parquet", samples_to_table(group(2)))
    assert disk.list("d") == []
    assert [p.name for p in Path(str(disk.local_path("d"))).iterdir()] == []


def test_units_are_written(disk: Objects) -> None:
    for schema in (SAMPLES, SCORES, SELECTION):
        assert all(field.metadata[b"unit"] for field in schema)


def test_a_large_batch_is_written_in_parts_and_read_as_one(
    shared: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlcore.store.batch.PART_TOKENS", 40)
    samples = [
        Sample(
            prompt_id=f"p{n // 3}",
            group_index=n // 3,
            index=n,
            tokens=list(range(n, n + 9)),
            response_length=4,
            rollout_log_probs=[-0.5 * n] * 4,
            status=Status.COMPLETED,
        )
        for n in range(50)
    ]
    files = write_samples(shared, lambda part: f"parts/{part}", samples)
    assert len(files) == 9 and [file.rows for file in files] == [6] * 8 + [2]
    assert table_to_samples(read_parts(shared, files)) == samples
    wanted = [49, 0, 7, 30, 7]
    some = read_parts(shared, files, ["index", "tokens"], wanted)
    assert some["index"].to_pylist() == wanted
    assert write_samples(shared, lambda part: f"parts/{part}", samples) == files


def test_parts_are_stored_while_more_samples_come(
    disk: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlcore.store.batch.PART_TOKENS", 6)
    samples = [Sample(group_index=n // 2, index=n, tokens=[n, 1, 2]) for n in range(10)]
    writer = SamplesWriter(disk, lambda part: f"parts/{part}")
    for start in range(0, 8, 2):
        writer.add(samples[start : start + 2])
    deadline = time.monotonic() + 30
    while not disk.exists("parts/2"):
        assert time.monotonic() < deadline, "nothing is stored before the end"
        time.sleep(0.01)
    assert writer.count == 8
    writer.add(samples[writer.count :])
    files = writer.finish()
    whole = write_samples(disk, lambda part: f"whole/{part}", samples)
    assert [(file.rows, file.sha256) for file in files] == [(f.rows, f.sha256) for f in whole]
    assert table_to_samples(read_parts(disk, files)) == samples


def test_what_does_not_fit_in_a_later_part_is_named_by_its_row(
    disk: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlcore.store.batch.PART_TOKENS", 2)
    samples = [Sample(group_index=n, index=n, tokens=[1, 2]) for n in range(6)]
    samples[4].tokens = [1, 2**31]
    with pytest.raises(DataError, match="sample 4: field tokens does not fit"):
        write_samples(disk, lambda part: f"parts/{part}", samples)
