"""Bad input: one clear sentence that names the place, exit code 2, nothing written."""

from collections.abc import Callable
from pathlib import Path

import pytest
from real_runs import Sluice, short


def misspelt_key(folder: Path) -> tuple[list[str], str]:
    return ["--set", "rollout.temprature=1"], "rollout.temprature: did you mean rollout.temperature"


def missing_data_file(folder: Path) -> tuple[list[str], str]:
    return ["--set", f"data.path={folder}/none.jsonl"], f"{folder}/none.jsonl"


def broken_line(folder: Path) -> tuple[list[str], str]:
    path = folder / "broken.jsonl"
    path.write_text('{"prompt": "1=", "label": "111"}\n' * 2 + '{"prompt": \n')
    return ["--set", f"data.path={path}"], "broken.jsonl line 3"


def missing_label(folder: Path) -> tuple[list[str], str]:
    return ["--set", "data.label_key=answer"], "answer"


def unknown_reward(folder: Path) -> tuple[list[str], str]:
    path = folder / "rewards.py"
    path.write_text("def reward(args, sample, **kwargs):\n    return 1.0\n")
    return ["--set", f"reward.custom_rm_path={path}:rewrd"], "did you mean 'reward'"


def raising_reward(folder: Path) -> tuple[list[str], str]:
    path = folder / "raises.py"
    path.write_text("def reward(args, sample, **kwargs):\n    raise KeyError('gold')\n")
    return ["--set", f"reward.custom_rm_path={path}:reward"], "KeyError"


def endless_reward(folder: Path) -> tuple[list[str], str]:
    path = folder / "hangs.py"
    path.write_text("def reward(args, sample, **kwargs):\n    while True:\n        pass\n")
    return ["--set", f"reward.custom_rm_path={path}:reward", "--set", "reward.timeout_s=1"], "1 s"


def model_without_config(folder: Path) -> tuple[list[str], str]:
    (folder / "empty").mkdir()
    return ["--set", f"model.path={folder}/empty", "--set", "model.build="], "config.json"


def builder_of_another_form(folder: Path) -> tuple[list[str], str]:
    path = folder / "builds.py"
    path.write_text("def build():\n    pass\n")
    return ["--set", f"model.build={path}:build"], "called as (folder, seed)"


def contradiction(folder: Path) -> tuple[list[str], str]:
    return ["--set", "train.global_batch_size=63"], "train.global_batch_size"


CASES = [
    misspelt_key,
    missing_data_file,
    broken_line,
    missing_label,
    unknown_reward,
    raising_reward,
    endless_reward,
    model_without_config,
    builder_of_another_form,
    contradiction,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_bad_input_is_one_sentence_and_writes_nothing(
    case: Callable[[Path], tuple[list[str], str]], sluice: Sluice, tmp_path: Path
) -> None:
    arguments, place = case(tmp_path)
    said = sluice(
        "train", str(short(tmp_path, iterations=1)), "--run-id", "bad", *arguments, code=2
    )
    assert said.startswith("error: "), said
    assert place in said
    assert said.count("\n") == 1
    assert "Traceback" not in said
    assert not Path(sluice.root).exists()


def test_an_unwritable_root_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    said = Sluice(file / "root", cwd=tmp_path)("train", str(short(tmp_path, iterations=1)), code=2)
    assert said.startswith("error: storage.root = ")
    assert str(file) in said
    assert file.read_text() == ""


def test_an_unknown_option_is_bad_input(sluice: Sluice, tmp_path: Path) -> None:
    sluice("train", str(short(tmp_path, iterations=1)), "--nonsense", code=2)


def test_a_name_that_no_run_can_have_is_bad_input(sluice: Sluice) -> None:
    assert "'../x'" in sluice("show", "../x", code=2)


def test_a_run_id_is_text_even_if_it_looks_like_a_number(sluice: Sluice, tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    for name in ("2026", "2026-01-01"):
        said = sluice(
            "train",
            str(short(tmp_path, iterations=1)),
            *("--run-id", name, "--set", f"data.path={path}"),
            code=2,
        )
        assert said.startswith(f"error: data file {path}"), said


def test_json_output_holds_what_json_knows(sluice: Sluice) -> None:
    assert sluice.json("sql", "select 'nan'::float a, [1 / 0] b") == [{"a": None, "b": [None]}]
