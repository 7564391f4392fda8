"""From rows with images to prompts whose tokens have places for them."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from vision_models import picture

from rlcore.config import build_config
from rlcore.config.tree import DataConfig
from rlcore.data import check_dataset, load_dataset
from rlcore.errors import ConfigError, DataError
from rlcore.images.processor import ImageProcessor, own_template
from rlcore.preflight import check_data

PLACE = "<|vision_start|><|image_pad|><|vision_end|>"


def config(path: Path, **more: Any) -> DataConfig:
    keys = {"image": "pics"}
    return DataConfig(path=str(path), multimodal_keys=keys, apply_chat_template=True, **more)


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder, local_files_only=True)


def test_a_prompt_has_a_place_for_each_feature(
    tmp_path: Path, model_folder: Path, tokenizer: Any
) -> None:
    small, large = picture("red", 16, 8), picture("blue", 24, 16)
    (tmp_path / "one.png").write_bytes(small)
    second = f"data:image/png;base64,{base64.b64encode(large).decode()}"
    rows = [{"prompt": "a<image>b<image>?", "pics": ["one.png", second]}, {"prompt": "none"}]
    images = ImageProcessor(model_folder)
    data = load_dataset(
        config(lines(tmp_path / "d.jsonl", rows)), lambda: tokenizer, get_images=lambda: images
    )
    first, other = data.tokenized([0, 1], tokenizer)
    assert first.prompt == f"<|im_start|>user\na{PLACE}b{PLACE}?<|im_end|>\n<|im_start|>a\n"
    sample = first.sample()
    assert sample.multimodal_inputs == {
        "image": [{"bytes": small, "path": "one.png"}, {"bytes": large, "path": None}]
    }
    # 2 x 1 and 3 x 2 features of 8 x 8 pixels.
    assert sample.tokens.count(images.token) == 2 + 6
    pixels = images.pixels(sample.multimodal_inputs["image"])
    assert pixels.grids.tolist() == [[1, 2, 4], [1, 4, 6]]
    assert len(images.lay_out(sample.tokens, pixels).at) == 8
    assert other.sample().multimodal_inputs is None and images.token not in (other.tokens or [])
    # The data set itself holds no pictures.
    assert data.prompts[0].media == {"image": rows[0]["pics"]}


def test_an_image_that_the_model_refuses_is_told_with_its_row(
    tmp_path: Path, model_folder: Path, tokenizer: Any
) -> None:
    thin = io.BytesIO()
    Image.new("RGB", (1, 300)).save(thin, "PNG")
    (tmp_path / "thin.png").write_bytes(thin.getvalue())
    path = lines(tmp_path / "d.jsonl", [{"prompt": "<image>", "pics": "thin.png"}])
    images = ImageProcessor(model_folder)
    data = load_dataset(config(path), lambda: tokenizer, get_images=lambda: images)
    with pytest.raises(DataError, match=r"row 0: .* refuses image thin\.png \(1 x 300\): .*ratio"):
        data.tokenized([0], tokenizer)
    with pytest.raises(DataError, match=r"refuses image thin\.png \(1 x 300\)"):
        images.pixels([{"bytes": thin.getvalue(), "path": "thin.png"}])


@pytest.mark.parametrize("pic", [True, False])
def test_the_mark_of_an_image_in_the_text_of_a_row_is_told(
    pic: bool, tmp_path: Path, model_folder: Path, tokenizer: Any
) -> None:
    """Where there is no image to be mixed up with it is a token like any other."""
    (tmp_path / "a.png").write_bytes(picture("red"))
    said = "a<|image_pad|>b<image>" if pic else "a<|image_pad|>b"
    rows = [{"prompt": "<image>", "pics": "a.png"}]
    rows.append({"prompt": said} | ({"pics": "a.png"} if pic else {}))
    path = lines(tmp_path / "d.jsonl", rows)
    images = ImageProcessor(model_folder)
    data = load_dataset(config(path), lambda: tokenizer, get_images=lambda: images)
    tree = {
        "model": {"path": str(model_folder)},
        "data": config(path).model_dump(),
        "reward": {"rm_type": "math"},
    }
    run = build_config(tree)
    if not pic:
        check_data(run)
        assert images.token in (data.tokenized([1], tokenizer)[0].tokens or [])
        return
    fault = r"d\.jsonl row 1: the text of the prompt has '<\|image_pad\|>'.* take it out"
    with pytest.raises(DataError, match=fault):
        data.tokenized([0, 1], tokenizer)
    with pytest.raises(DataError, match=fault):
        check_data(run)


def test_lengths_count_the_features(tmp_path: Path, model_folder: Path, tokenizer: Any) -> None:
    (tmp_path / "a.png").write_bytes(picture("red", 32, 32))
    rows = [{"prompt": "<image>", "pics": "a.png"}, {"prompt": "short"}]
    data = load_dataset(
        config(lines(tmp_path / "d.jsonl", rows), max_prompt_len=28),
        lambda: tokenizer,
        get_images=lambda: ImageProcessor(model_folder),
    )
    assert data.too_long == 1 and len(data) == 1


def test_rows_of_a_table_hold_bytes(tmp_path: Path, model_folder: Path, tokenizer: Any) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "b.png").write_bytes(picture("red"))
    pics = [{"bytes": picture(), "path": "a.png"}, {"bytes": None, "path": "b.png"}]
    table = pa.table({"prompt": ["<image><image>"], "pics": [pics]})
    pq.write_table(table, tmp_path / "data" / "d.parquet")
    data = load_dataset(
        config(tmp_path / "data" / "d.parquet"),
        lambda: tokenizer,
        get_images=lambda: ImageProcessor(model_folder),
    )
    [prompt] = data.tokenized([0], tokenizer)
    assert str(prompt.prompt).count(PLACE) == 2
    assert prompt.sample().multimodal_inputs == {
        "image": [{"bytes": picture(), "path": "a.png"}, {"bytes": picture("red"), "path": "b.png"}]
    }


def test_a_row_without_its_image_is_told_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "whole.png").write_bytes(picture())
    (tmp_path / "cut.png").write_bytes(picture()[:60])
    rows = [{"prompt": "<image>", "pics": "whole.png"}, {"prompt": "<image>", "pics": "gone.png"}]
    path = lines(tmp_path / "d.jsonl", rows)
    with pytest.raises(
        DataError, match=r"d\.jsonl line 2, image 1: '(gone|a).png' is neither a file"
    ):
        check_dataset(config(path))
    assert check_dataset(config(path, skip_bad_rows=True)).skipped == 1
    rows[1] = {"prompt": "<image><image>", "pics": ["whole.png", "cut.png"]}
    with pytest.raises(DataError, match=r"line 2, image 2: image cut\.png is broken"):
        check_dataset(config(lines(path, rows)))


def test_an_image_that_went_away_is_told_with_its_row(
    tmp_path: Path, model_folder: Path, tokenizer: Any
) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    path = lines(tmp_path / "d.jsonl", [{"prompt": "<image>", "pics": "a.png"}])
    data = load_dataset(
        config(path), lambda: tokenizer, get_images=lambda: ImageProcessor(model_folder)
    )
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match=r"d\.jsonl row 0: '(gone|a).png' is neither a file"):
        data.tokenized([0], tokenizer)


def test_a_model_that_sees_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ConfigError, match="takes none"):
        ImageProcessor(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "other", "vision_config": {}}')
    with pytest.raises(ConfigError, match="in a way that is not known here"):
        ImageProcessor(tmp_path)
    assert own_template(tmp_path) is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ x }}"}')
    assert own_template(tmp_path) == "{{ x }}"
