"""Loading custom functions, and what is said when that fails."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.errors import PluginError
from rlcore.plugins import check_signature, load_checked, load_function

SETTING = "reward.custom_rm_path"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_three_spellings(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.py", "def score(args, sample):\n    return 1.0\n")
    assert load_function(f"{file}:score", SETTING)(None, None) == 1.0
    assert load_function("json:dumps", SETTING)({}) == "{}"
    assert load_function("os.path.join", SETTING)("a", "b") == "a/b"


def test_a_file_is_loaded_once_and_again_when_it_changed(tmp_path: Path) -> None:
    file = write(tmp_path / "once.py", "def f(): return 1\n")
    first = load_function(f"{file}:f", SETTING)
    assert load_function(f"{file}:f", SETTING) is first
    write(file, "def f(): return 22\n")
    assert load_function(f"{file}:f", SETTING)() == 22


def test_two_files_of_one_name_do_not_meet(tmp_path: Path) -> None:
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "reward.py", f"def f(): return {value}\n")
    assert [load_function(f"{tmp_path}/{d}/reward.py:f", SETTING)() for d in "ab"] == [1, 2]


def test_siblings_are_importable_and_dataclasses_pickle(tmp_path: Path) -> None:
    write(tmp_path / "sluice_test_sibling.py", "VALUE = 7\n")
    file = write(
        tmp_path / "main_one.py",
        "from dataclasses import dataclass\nfrom sluice_test_sibling import VALUE\n\n"
        "@dataclass\nclass P:\n    x: int\n\ndef f(): return P(VALUE)\n",
    )
    value = load_function(f"{file}:f", SETTING)()
    assert pickle.loads(pickle.dumps(value)).x == 7


@pytest.mark.parametrize(
    ("text", "spec", "said"),
    [
        ("def score(a, s): ...", "{file}:scor", "did you mean 'score'?"),
        ("x = 1", "{file}:f", "it has no functions"),
        ("f = 3", "{file}:f", "f is a int, not a function"),
        ("def f(:", "{file}:f", "SyntaxError"),
        ("\nraise KeyError('boom')", "{file}:f", "KeyError: 'boom' (line 2)"),
        ("import not_a_module_at_all", "{file}:f", "No module named 'not_a_module_at_all'"),
        ("", "{folder}/pluginn.py:f", "did you mean"),
        ("", "/no/such/folder/p.py:f", "nor its folder"),
        ("", "no_such_module_here:f", "there is no module 'no_such_module_here'"),
        ("", "json.nothing.deep:f", "there is no module 'json.nothing'"),
        ("", "{file}", "write module:function"),
        ("", "name", "write module:function"),
        ("", "{file}:", "write module:function"),
    ],
)
def test_errors_name_setting_spec_and_reason(
    tmp_path: Path, text: str, spec: str, said: str
) -> None:
    file = write(tmp_path / "plugin.py", text + "\n")
    spec = spec.format(file=file, folder=tmp_path)
    with pytest.raises(PluginError) as caught:
        load_function(spec, SETTING)
    assert SETTING in str(caught.value)
    assert spec in str(caught.value)
    assert said in str(caught.value)


def test_signatures(tmp_path: Path) -> None:
    async def generate(args, sample, sampling_params, evaluation=False): ...  # type: ignore[no-untyped-def]
    def plain(args, sample, sampling_params): ...  # type: ignore[no-untyped-def]
    def reward(args, sample, **kwargs): ...  # type: ignore[no-untyped-def]
    async def async_filter(args, samples): ...  # type: ignore[no-untyped-def]
    def three(args, sample, other): ...  # type: ignore[no-untyped-def]

    check_signature(generate, "generate", "x")
    check_signature(reward, "reward", "x")
    check_signature(reward, "filter", "x")
    with pytest.raises(PluginError, match="must be an `async def"):
        check_signature(plain, "generate", "x")
    with pytest.raises(
        PluginError,
        match=r"called as \(args, sample\), but its signature is \(args, sample, other\)",
    ):
        check_signature(three, "reward", "x")
    with pytest.raises(PluginError, match="plain `def`"):
        check_signature(async_filter, "filter", "x")


def test_it_imports_in_a_fresh_process_without_the_heavy_packages(tmp_path: Path) -> None:
    file = write(tmp_path / "light.py", "def f(args, sample): return 1\n")
    code = (
        "import sys; from rlcore.plugins import load_checked; "
        f"load_checked({str(file)!r} + ':f', 'x', 'reward'); "
        "print(sorted({'torch', 'ray', 'prefect', 'transformers'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
    assert load_checked(f"{file}:f", SETTING, "reward")
