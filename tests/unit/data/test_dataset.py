"""Reading data sets: kinds of files, slices, identities, and the errors of bad ones."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from vision_models import picture

from rlcore.config.tree import DataConfig
from rlcore.data import check_dataset, load_dataset
from rlcore.data.dataset import OPTIONAL, first_rows, require_columns
from rlcore.errors import DataError


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def config(path: Path | str, **settings: Any) -> DataConfig:
    return DataConfig(path=str(path), **settings)


def no_tokenizer() -> Any:
    raise AssertionError("no tokenizer is needed here")


class CharTokenizer:
    """Ids are code points: enough of a tokenizer to count by."""

    chat_template = "yes"

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        assert not add_special_tokens
        return {"input_ids": [[ord(c) for c in t] for t in texts]}

    def apply_chat_template(self, messages: Any, tools: Any, tokenize: bool, **kw: Any) -> str:
        body = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return f"{body}{len(tools or [])}<assistant>" + json.dumps(kw, sort_keys=True)


ROWS = [{"prompt": f"{i}=", "answer": i, "metadata": {"k": i}} for i in range(10)]


def test_jsonl_gives_prompts_labels_and_metadata_in_file_order(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", ROWS)
    data = load_dataset(config(path, label_key="answer"), no_tokenizer)
    assert [p.prompt for p in data.prompts] == [r["prompt"] for r in ROWS]
    assert [p.label for p in data.prompts] == list(range(10))
    assert data.prompts[3].metadata == {"k": 3}
    assert data.columns == ["prompt", "answer", "metadata"]


@pytest.mark.parametrize(
    ("part", "rows"),
    [
        ("[0:3]", [0, 1, 2]),
        ("[7:]", [7, 8, 9]),
        ("[-2:]", [8, 9]),
        ("[:-8]", [0, 1]),
        ("[:]", list(range(10))),
    ],
)
def test_a_slice_keeps_the_identity_of_its_prompts(
    tmp_path: Path, part: str, rows: list[int]
) -> None:
    path = lines(tmp_path / "a.jsonl", ROWS)
    table = tmp_path / "t.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), table)
    for file in (path, table):
        whole = load_dataset(config(file), no_tokenizer).prompts
        some = load_dataset(config(f"{file}@{part}"), no_tokenizer).prompts
        assert [p.row for p in some] == rows
        assert [p.prompt_id for p in some] == [whole[r].prompt_id for r in rows]


def test_lines_outside_the_slice_are_not_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\nbroken\n')
    assert len(load_dataset(config(f"{path}@[0:2]"), no_tokenizer)) == 2


def test_every_row_has_its_own_id_even_with_equal_content(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"prompt": "x"}] * 5)
    ids = [p.prompt_id for p in load_dataset(config(path), no_tokenizer).prompts]
    assert len(set(ids)) == 5


def test_an_id_depends_on_name_row_and_content_but_not_on_folder_or_key_order(
    tmp_path: Path,
) -> None:
    (tmp_path / "sub").mkdir()

    def first(path: Path, row: dict[str, Any]) -> str:
        return load_dataset(config(lines(path, [row])), no_tokenizer).prompts[0].prompt_id

    base = first(tmp_path / "a.jsonl", {"prompt": "x", "n": 1})
    assert base == first(tmp_path / "sub" / "a.jsonl", {"n": 1, "prompt": "x"})
    assert base != first(tmp_path / "b.jsonl", {"prompt": "x", "n": 1})
    assert base != first(tmp_path / "a.jsonl", {"prompt": "x", "n": 2})


def test_parquet_file_folder_and_saved_data_set_hold_the_same(tmp_path: Path) -> None:
    import datasets

    table = pa.Table.from_pylist(ROWS)
    (tmp_path / "many").mkdir()
    pq.write_table(table.slice(0, 4), tmp_path / "many" / "part-0.parquet")
    pq.write_table(table.slice(4), tmp_path / "many" / "part-1.parquet")
    pq.write_table(table, tmp_path / "one.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"), num_shards=3)
    for name in ("one.parquet", "many", "saved"):
        data = load_dataset(config(tmp_path / name, label_key="answer"), no_tokenizer)
        assert [(p.prompt, p.label, p.metadata) for p in data.prompts] == [
            (r["prompt"], r["answer"], r["metadata"]) for r in ROWS
        ]


def test_a_folder_of_several_splits_asks_for_one(tmp_path: Path) -> None:
    import datasets

    one = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(DataError, match=r"several splits \(test, train\)"):
        check_dataset(config(tmp_path / "d"))
    assert check_dataset(config(tmp_path / "d" / "train")).rows == 10


def test_labels_keep_integers_of_any_size(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x", "y": 123456789012345678901234567890}\n')
    data = load_dataset(config(path, label_key="y"), no_tokenizer)
    assert data.prompts[0].label == 123456789012345678901234567890


BAD_LINES = [
    (b'{"prompt": ', "is not valid JSON"),
    (b'["a"]', "holds a list"),
    (b'{"prompt": "\xff"}', "is not UTF-8"),
    (b'{"prompt": "x", "v": NaN}', "NaN is no JSON number"),
    (b'{"prompt": ""}', "must be a text or a list of chat messages"),
    (b'{"prompt": 3}', "must be a text or a list of chat messages"),
    (b'{"prompt": ["x"]}', "not of chat messages"),
    (b'{"prompt": "\\ud800"}', "half of a surrogate pair"),
    (b'{"prompt": "x", "metadata": 3}', "must be a JSON object"),
    (b'{"prompt": "x", "metadata": "{"}', "not valid JSON"),
    (b'{"promt": "x"}', "did you mean 'promt'"),
    (b"[" * 100_000, "is not valid JSON"),
]


@pytest.mark.parametrize(("line", "text"), BAD_LINES)
def test_a_bad_line_is_named_or_skipped_and_counted(tmp_path: Path, line: bytes, text: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\n' + line + b'\n{"prompt": "b"}\n')
    with pytest.raises(DataError, match=r"x\.jsonl line 3") as caught:
        check_dataset(config(path))
    assert text in str(caught.value)
    info = check_dataset(config(path, skip_bad_rows=True))
    assert (info.rows, info.skipped) == (2, 1)


def test_only_bad_rows_is_an_error_with_the_first_reason(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", [{"q": 1}, {"q": 2}])
    with pytest.raises(DataError, match=r"all 2 are bad.*line 1 has no column 'prompt'"):
        check_dataset(config(path, skip_bad_rows=True))


def test_first_rows_are_those_that_can_be_used(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", [{"q": 1}, {"prompt": "a"}, {"prompt": "b"}, 3])
    assert [p.prompt for p in first_rows(config(path, skip_bad_rows=True), 2)] == ["a", "b"]
    with pytest.raises(DataError, match="line 1"):
        first_rows(config(path), 2)


def test_a_missing_label_key_names_key_row_columns_and_nearest(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", ROWS)
    with pytest.raises(DataError) as caught:
        check_dataset(config(path, label_key="anser"))
    for part in (
        "line 1",
        "'anser'",
        "data.label_key",
        "'prompt', 'answer'",
        "did you mean 'answer'",
    ):
        assert part in str(caught.value)


def test_missing_and_unknown_files(tmp_path: Path) -> None:
    lines(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(DataError, match=r"does not exist; did you mean .*train\.jsonl"):
        check_dataset(config(tmp_path / "trian.jsonl"))
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(DataError, match="unknown kind"):
        check_dataset(config(tmp_path / "a.csv"))
    (tmp_path / "bad.parquet").write_text("x")
    with pytest.raises(DataError, match="no readable Parquet"):
        check_dataset(config(tmp_path / "bad.parquet"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no rows that can be used"):
        check_dataset(config(tmp_path / "empty.jsonl"))
    with pytest.raises(DataError, match="write a slice as"):
        check_dataset(config(f"{tmp_path / 'train.jsonl'}@[0-3]"))


def test_tools_come_as_list_or_json_text(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "x.jsonl",
        [{"prompt": "a", "t": [{"name": "f"}]}, {"prompt": "b", "t": '[{"name": "g"}]'}],
    )
    data = load_dataset(config(path, tool_key="t"), no_tokenizer)
    assert [p.metadata["tools"][0]["name"] for p in data.prompts] == ["f", "g"]
    bad = lines(tmp_path / "y.jsonl", [{"prompt": "a", "t": 3}])
    with pytest.raises(DataError, match="must be a list of tools"):
        check_dataset(config(bad, tool_key="t"))


def test_the_chat_template_gets_messages_tools_and_more_arguments(tmp_path: Path) -> None:
    rows = [{"prompt": "hi", "t": [1]}, {"prompt": [{"role": "system", "content": "be"}], "t": []}]
    path = lines(tmp_path / "x.jsonl", rows)
    cfg = config(
        path, tool_key="t", apply_chat_template=True, apply_chat_template_kwargs={"think": False}
    )
    data = load_dataset(cfg, CharTokenizer)
    more = '{"add_generation_prompt": true, "think": false}'
    assert data.prompts[0].prompt == f"<user>hi1<assistant>{more}"
    assert data.prompts[1].prompt == f"<system>be0<assistant>{more}"


def test_messages_without_a_template_are_refused_where_text_is_needed(tmp_path: Path) -> None:
    rows = [{"prompt": "x"}, {"prompt": [{"role": "user", "content": "y"}]}]
    path = lines(tmp_path / "x.jsonl", rows)
    with pytest.raises(DataError, match=r"row 1.*apply_chat_template = true"):
        check_dataset(config(path), needs_text=True)
    data = load_dataset(config(path), no_tokenizer)
    assert data.tokenized([0], CharTokenizer())[0].tokens == [ord("x")]
    with pytest.raises(DataError, match="apply_chat_template = true"):
        data.tokenized([1], CharTokenizer())


def test_prompts_that_are_too_long_are_counted(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", [{"prompt": "a" * n} for n in (1, 5, 9, 5)])
    data = load_dataset(config(path, max_prompt_len=5), CharTokenizer)
    assert ([p.row for p in data.prompts], data.too_long) == ([0, 1, 3], 1)
    with pytest.raises(DataError, match="the shortest has 1"):
        load_dataset(
            config(path, max_prompt_len=5).model_copy(update={"max_prompt_len": 0}), CharTokenizer
        )


def test_a_sample_shares_nothing_with_its_prompt(tmp_path: Path) -> None:
    data = load_dataset(config(lines(tmp_path / "x.jsonl", ROWS)), no_tokenizer)
    prompt = data.tokenized([2], CharTokenizer())[0]
    sample = prompt.sample()
    sample.tokens.append(1)
    sample.metadata["new"] = 1
    again = prompt.sample()
    assert again.tokens == [ord("2"), ord("=")]
    assert again.metadata == {"k": 2}


def test_media_take_the_places_that_the_prompt_has_for_them(tmp_path: Path) -> None:
    rows = [
        {"prompt": "<image>What is<image>?", "pics": ["a.png", {"type": "image", "url": "b"}]},
        {"prompt": [{"role": "user", "content": "hear <audio>"}], "sound": "c.wav"},
        {"prompt": "no media"},
    ]
    for name in ("a.png", "b"):
        (tmp_path / name).write_bytes(picture())
    path = lines(tmp_path / "m.jsonl", rows)
    cfg = config(path, multimodal_keys={"image": "pics", "audio": "sound"})
    prompts = load_dataset(cfg, no_tokenizer).prompts
    assert prompts[0].prompt == [
        {
            "role": "user",
            "content": [
                {"type": "image", "image": "a.png"},
                {"type": "text", "text": "What is"},
                {"type": "image", "url": "b"},
                {"type": "text", "text": "?"},
            ],
        }
    ]
    assert isinstance(prompts[1].prompt, list)
    assert prompts[1].prompt[0]["content"][1] == {"type": "audio", "audio": "c.wav"}
    assert [p.sample().multimodal_inputs for p in prompts] == [
        {"image": rows[0]["pics"]},
        {"audio": ["c.wav"]},
        None,
    ]
    for prompt, fault in (("<image><image><image>", "has more <image>"), ("no place", "2 items")):
        path = lines(tmp_path / "w.jsonl", [rows[0] | {"prompt": prompt}])
        with pytest.raises(DataError, match=fault):
            check_dataset(config(path, multimodal_keys={"image": "pics"}))
    # A place is no text where the row lacks what belongs there: not all of it, and not the column.
    for row in ({"prompt": "<image>?"}, {"prompt": "<image>?", "pics": None}):
        path = lines(tmp_path / "w.jsonl", [row])
        with pytest.raises(DataError, match="line 1 has more <image> than items"):
            check_dataset(config(path, multimodal_keys={"image": "pics"}))
    [text] = load_dataset(config(path), no_tokenizer).prompts
    assert text.prompt == "<image>?"


@pytest.mark.parametrize(
    ("params", "fault"),
    [
        (3, "must be an object"),
        ({"stopp": ["x"]}, "engines know no such parameter"),
        ({"temperature": 0.5}, "it changes the probabilities"),
        ({"max_new_tokens": -1}, "0 or more"),
    ],
)
def test_a_row_s_own_parameters_are_checked(tmp_path: Path, params: Any, fault: str) -> None:
    path = lines(tmp_path / "p.jsonl", [{"prompt": "a", "own": params}])
    with pytest.raises(DataError, match=rf"line 1: 'own'.*{fault}"):
        check_dataset(config(path, sampling_params_key="own"))
    if fault.startswith("it changes"):
        check_dataset(config(path, sampling_params_key="own"), evaluation=True)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"multimodal_keys": {"image": "pic"}}, "multimodal_keys.image"),
        ({"generate_function_key": "pic"}, "generate_function_key"),
        ({"custom_rm_key": "pic"}, "custom_rm_key"),
        ({"sampling_params_key": "pic"}, "sampling_params_key"),
        ({"metadata_key": "pic"}, "metadata_key"),
        ({"mix": [{"path": "{path}", "metadata_key": "pic"}]}, "metadata_key"),
    ],
)
def test_a_column_that_no_row_has_is_a_slip(
    tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    path = lines(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "b", "pics": None}])
    if "mix" in settings:
        settings = {"mix": [settings["mix"][0] | {"path": str(path)}]}
    wrong = config(path, **settings)
    with pytest.raises(DataError, match=rf"no row .* column 'pic' \(data\.{named}\).*'pics'\?"):
        require_columns(wrong, check_dataset(wrong).columns, OPTIONAL)
    right = config(path, multimodal_keys={"image": "pics"})
    require_columns(right, check_dataset(right).columns, OPTIONAL)


def test_a_row_names_its_functions_as_text(tmp_path: Path) -> None:
    path = lines(tmp_path / "f.jsonl", [{"prompt": "a", "g": 3}])
    with pytest.raises(DataError, match="'g' must name a function; it is 3"):
        check_dataset(config(path, generate_function_key="g"))
