"""The examples' own parts, without running them: settings that load, model, rewards, rows."""

import hashlib
import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType

import pytest

from rlcore.config import load_config
from rlcore.sample import Sample

EXAMPLES = Path(__file__).parents[3] / "examples"


def module(name: str) -> ModuleType:
    """A file of an example as a module."""
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.parametrize(
    "file", sorted(p.relative_to(EXAMPLES).as_posix() for p in EXAMPLES.rglob("*.toml"))
)
def test_every_example_s_settings_load_and_lie_beside_a_readme(file: str) -> None:
    config = load_config(EXAMPLES / file)
    assert Path(config.reward.custom_rm_path.rpartition(":")[0]).exists()
    assert (EXAMPLES / file).with_name("README.md").exists()


def test_examples_are_short() -> None:
    files = [
        p for p in EXAMPLES.rglob("*") if p.suffix in (".py", ".toml") and "out" not in p.parts
    ]
    assert len(files) >= 7
    assert {p.name: n for p in files if (n := len(p.read_text().splitlines())) > 150} == {}


def test_the_quickstart_s_model_is_drawn_from_its_seed_and_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    build = module("quickstart/model").build
    digests = []
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        build(tmp_path / folder, seed)
        weights = (tmp_path / folder / "model.safetensors").read_bytes()
        digests.append(hashlib.sha256(weights).hexdigest())
    assert digests[0] == digests[1] != digests[2]

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert sum(p.numel() for p in model.parameters()) == 793_600
    assert model.config.model_type == "qwen3" and str(model.dtype) == "torch.float32"
    assert tokenizer.encode("7=") == [10, 14]
    assert tokenizer.decode([10, 10, 10, 1], skip_special_tokens=True) == "777"
    assert (tokenizer.eos_token, model.config.eos_token_id) == ("<eos>", tokenizer.eos_token_id)


def test_the_quickstart_s_rows_are_the_ten_prompts() -> None:
    for name, count in (("prompts", 320), ("eval", 10)):
        lines = (EXAMPLES / f"quickstart/{name}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert len(rows) == count
        assert {(r["prompt"], r["label"]) for r in rows} == {
            (f"{d}=", f"{d}" * 3) for d in range(10)
        }


@pytest.mark.parametrize(
    ("response", "expected"),
    [("777", 1.0), ("77", 2 / 3), ("7777", 0.75), ("", 0.0), ("177", 2 / 3), ("abc", 0.0)],
)
def test_the_quickstart_s_reward_is_the_share_of_right_characters(
    response: str, expected: float
) -> None:
    given = module("quickstart/reward").reward(None, Sample(response=response, label="777"))
    assert math.isclose(given, expected)


def test_geo3k_vlm_s_pictures_are_those_of_its_script() -> None:
    from PIL import Image

    draw, folder = module("geo3k_vlm/draw"), EXAMPLES / "geo3k_vlm"
    for name, colours in draw.COLOURS.items():
        lines = (folder / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == draw.rows(name)
        for row in draw.rows(name):
            colour, size = Path(row["image"]).stem.split("-")
            assert colour in colours
            width, height = map(int, size.split("x"))
            with Image.open(folder / row["image"]) as found:
                drawn = draw.picture(width, height, colour)
                assert found.convert("RGB").tobytes() == drawn.tobytes()


def test_geo3k_vlm_s_prompts_have_16_tokens_a_picture(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from rlcore.data import load_dataset
    from rlcore.images.processor import ImageProcessor

    module("geo3k_vlm/model").build(tmp_path, 0)
    data = load_dataset(
        load_config(EXAMPLES / "geo3k_vlm" / "run.toml").data,
        lambda: AutoTokenizer.from_pretrained(tmp_path),
        get_images=lambda: ImageProcessor(tmp_path),
    )
    assert len(data) == 3 * 16 * 2
    [prompt] = data.tokenized([0], AutoTokenizer.from_pretrained(tmp_path))
    assert prompt.tokens == [3, *[5] * 16, 4, 6]


@pytest.mark.parametrize(
    ("response", "expected"),
    [("3", 1.0), ("4", 0.0), ("33", 0.0), ("3w", 0.0), ("", 0.0)],
)
def test_geo3k_vlm_s_reward_is_for_the_whole_number(response: str, expected: float) -> None:
    sample = Sample(response=response, label="3")
    assert module("geo3k_vlm/reward").reward(None, sample) == expected


@pytest.mark.parametrize(
    ("response", "label", "exact", "near"),
    [
        ("The answer is 5.", "5", 1.0, 1.0),
        ("2 + 3 = 5", "5", 1.0, 1.0),
        ("5, or rather 6", "5", 0.0, 0.25),
        ("It is -17", "-17", 1.0, 1.0),
        ("17", "-17", 0.0, 0.5 / 35),
        ("no idea", "5", 0.0, 0.0),
        ("", "0", 0.0, 0.0),
    ],
)
def test_smollm2_s_rewards_look_at_the_last_integer(
    response: str, label: str, exact: float, near: float
) -> None:
    rewards = module("smollm2/reward")
    sample = Sample(response=response, label=label)
    assert (rewards.exact(None, sample), rewards.near(None, sample)) == (exact, near)


def test_smollm2_is_trained_on_no_sum_that_is_held_out() -> None:
    data = module("smollm2/data")
    easy = [{"sum": f"{n} + 1 =", "label": f"{n + 1}"} for n in range(600)]
    hard = [{"sum": f"{n} + 1 =", "label": f"{n + 1}"} for n in range(100, 2000)]
    files = data.files(easy, hard)
    assert files["eval.jsonl"] == easy[:256] and files["train.jsonl"] == easy[256:]
    assert files["hard-eval.jsonl"] == hard[500:756], "the easy ones are not held out twice"
    assert files["hard-train.jsonl"] == hard[156:500] + hard[756:]


def test_smollm2_s_curve_is_drawn_beside_the_peer_s(tmp_path: Path) -> None:
    script = module("smollm2/curve")
    curve = script.Curve(
        "mine", [0.1] * 21 + [0.3], [float(n) for n in range(22)], {10: 0.2, 20: 0.4}
    )
    script.draw([curve], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    table = script.table([curve])
    assert "| 21 | 0.068 | 0.100 |" in table and "| 41 | 0.219 |  |" in table
    assert "| held-out accuracy of 0.35 | never | after 20 iterations, 19 s |" in table
