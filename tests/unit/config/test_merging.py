"""Layers of settings, whatever they hold: files, presets and options over one another."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.config import build_config, config_digest, load_config, with_sets
from rlcore.config.load import merge, parse_set, with_values
from rlcore.config.presets import PRESETS

bounded = settings(deadline=None, derandomize=True, max_examples=20)
NAMES = st.sampled_from("abc")
TREES = st.recursive(
    st.dictionaries(NAMES, st.integers() | st.lists(st.integers(), max_size=2), max_size=3),
    lambda inner: st.dictionaries(NAMES, inner | st.integers(), max_size=3),
    max_leaves=8,
)
SMALLEST = {"model.path": "/m", "data.path": "/d.jsonl", "reward.rm_type": "math"}
CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "run.seed": st.integers(0, 2**31 - 1),
    "algorithm.clip_low": st.sampled_from([0.125, 0.2, 0.25]),
    "algorithm.clip_high": st.sampled_from([0.28, 0.3, 0.5]),
    "algorithm.use_kl_loss": st.booleans(),
    "algorithm.loss_aggregation": st.sampled_from(["token_mean", "sequence_mean"]),
    "data.input_key": st.text("xyz .=#", min_size=1, max_size=6).filter(str.strip),
}
LAYERS = st.lists(st.fixed_dictionaries({}, optional=CHANGES), min_size=1, max_size=3)


def leaves(tree: dict[str, Any], above: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Every value that is no table, and every empty table, by its path."""
    out: dict[tuple[str, ...], Any] = {}
    for key, value in tree.items():
        path = (*above, key)
        out |= leaves(value, path) if isinstance(value, dict) and value else {path: value}
    return out


def toml(values: dict[str, Any]) -> str:
    """Settings by dotted name as lines of TOML; of these types JSON is written the same way."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


def at(config: Any, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


@bounded
@given(TREES, TREES, TREES)
def test_layers_may_be_laid_in_any_bracketing_where_tables_stay_tables(
    a: dict[str, Any], b: dict[str, Any], c: dict[str, Any]
) -> None:
    kept = json.dumps([a, b])
    assert merge(a, {}) == a == merge({}, a) == merge(a, a)
    over = merge(a, b)
    assert json.dumps([a, b]) == kept
    for path, value in leaves(b).items():
        found: Any = over
        for part in path:
            found = found[part]
        assert value == {} or found == value
    for path, value in leaves(a).items():
        if path[0] not in b:
            assert leaves(over)[path] == value
    # Where a value of the middle layer stands between two tables, the bracketing shows.
    if not any(isinstance(v, int | list) for v in leaves(b).values()):
        assert merge(merge(a, b), c) == merge(a, merge(b, c))


@bounded
@given(LAYERS, st.sampled_from([None, "dapo", "gspo"]), st.integers(0, 3))
def test_the_last_layer_that_names_a_setting_wins(
    layers: list[dict[str, Any]], preset: str | None, as_options: int
) -> None:
    """Of the layers the last few are given as options, the others as files that extend."""
    cut = max(len(layers) - as_options, 0)
    with TemporaryDirectory() as folder:
        below = f'extends = "preset:{preset}"\n' if preset else ""
        top = Path(folder) / "base.toml"
        top.write_text(below + toml(SMALLEST))
        for i, layer in enumerate(layers[:cut]):
            upper = Path(folder) / f"{i}.toml"
            upper.write_text(f'extends = "{top.name}"\n' + toml(layer))
            top = upper
        options = [f"{k}={json.dumps(v)}" for layer in layers[cut:] for k, v in layer.items()]
        config = load_config(top, options)
    named = {
        f"{section}.{name}": value
        for section, table in (PRESETS[preset] if preset else {}).items()
        for name, value in table.items()
    }
    for layer in layers:
        named |= layer
    assert {key: at(config, key) for key in named} == named
    assert config_digest(build_config(config.model_dump())) == config_digest(config)


@bounded
@given(st.fixed_dictionaries({}, optional=CHANGES))
def test_options_and_values_are_the_same_change_in_any_order(change: dict[str, Any]) -> None:
    plain = with_values(
        build_config(
            {"model": {"path": "/m"}, "data": {"path": "/d.jsonl"}, "reward": {"rm_type": "math"}}
        ),
        {},
    )
    options = [f"{key}={json.dumps(value)}" for key, value in change.items()]
    changed = with_values(plain, change)
    assert with_sets(plain, options) == with_sets(plain, options[::-1]) == changed
    assert with_sets(changed, options) == changed
    for key in SMALLEST:
        assert at(changed, key) == at(plain, key)


# DEL must be escaped in TOML and is not in JSON.
WRITABLE = st.characters(codec="utf-8", exclude_characters="\x7f")


@bounded
@given(st.text(WRITABLE, max_size=8), st.integers(-(2**60), 2**60))
def test_an_options_value_is_read_whole(text: str, number: int) -> None:
    assert parse_set(f"a.b={json.dumps(text, ensure_ascii=False)}") == (["a", "b"], text)
    assert parse_set(f"a.b={number}") == (["a", "b"], number)
    for lines in (f"{number}\nc = {number}", f"{number}\n[c]"):
        assert parse_set(f"a.b={lines}") == (["a", "b"], lines)
