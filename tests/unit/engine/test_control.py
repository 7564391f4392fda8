"""Abort, pause, flush, weights and memory while requests are in flight."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from rlcore.errors import EngineError

LONG = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}}
SHORT = {
    "input_ids": [5, 6, 7],
    "sampling_params": {"max_new_tokens": 20, "sampling_seed": 3, "ignore_eos": True},
    "return_logprob": True,
}


def ids(answer: Any) -> list[int]:
    return answer["output_ids"]


def update(engine: Any, apply: Callable[[Any], int], flush: bool = True, version: str = "2") -> Any:
    return engine.ask(lambda: engine.scheduler.update(apply, flush, version), when_idle=True)


def test_abort_of_one_keeps_what_it_has(engine: Any) -> None:
    one, other = engine.submit({**LONG, "rid": "one"}), engine.submit({**LONG, "rid": "other"})
    engine.wait_running(2)
    assert engine.ask(lambda: engine.scheduler.abort("one")) == 1
    answer = one()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(ids(answer)) < 3000
    assert engine.scheduler.running == 1
    assert engine.ask(lambda: engine.scheduler.abort(None)) == 1
    assert other()["meta_info"]["finish_reason"]["message"] == "Aborted"


def test_the_callers_id_aborts_all_samples(engine: Any) -> None:
    body = {**LONG, "rid": "mine", "sampling_params": {**LONG["sampling_params"], "n": 3}}
    wait = engine.submit(body)
    engine.wait_running(3)
    assert engine.ask(lambda: engine.scheduler.abort("mine")) == 3
    assert len(wait()) == 3


def test_pause_with_abort_ends_all_and_holds_what_comes(engine: Any) -> None:
    running = engine.submit(LONG)
    engine.wait_running()
    engine.ask(lambda: engine.scheduler.pause("abort"))
    assert running()["meta_info"]["finish_reason"]["type"] == "abort"
    held = engine.submit(SHORT)
    assert engine.ask(lambda: (engine.scheduler.running, engine.scheduler.waiting)) == (0, 1)
    engine.ask(engine.scheduler.resume)
    assert len(ids(held())) == 20


def test_retract_is_refused(engine: Any) -> None:
    with pytest.raises(EngineError, match="'retract' ends a real server"):
        engine.ask(lambda: engine.scheduler.pause("retract"))
    assert not engine.scheduler.paused


def test_flush_is_refused_while_anything_runs(engine: Any) -> None:
    running = engine.submit(LONG)
    engine.wait_running()
    assert engine.ask(engine.scheduler.flush) is False
    engine.ask(lambda: engine.scheduler.abort(None))
    running()
    assert engine.ask(engine.scheduler.flush) is True


def test_new_weights_from_a_folder(
    model_folder: Path, other_folder: Path, start_engine: Any
) -> None:
    """After an update the engine is as one started on the new weights, cached prompts included."""
    engine, other = start_engine(model_folder), start_engine(other_folder)
    before = engine.generate(SHORT)
    assert update(engine, lambda runner: runner.update_from_folder(other_folder)) > 0
    after = engine.generate(SHORT)
    expected = other.generate(SHORT)
    assert ids(after) == ids(expected) != ids(before)
    key = "output_token_logprobs"
    assert after["meta_info"][key] == expected["meta_info"][key]
    assert after["meta_info"]["weight_version"] == "2"
    assert after["meta_info"]["cached_tokens"] == 0


def test_new_weights_in_several_blobs(
    model_folder: Path, other_folder: Path, start_engine: Any
) -> None:
    engine, other = start_engine(model_folder), start_engine(other_folder)
    tensors = load_file(other_folder / "model.safetensors")
    names = sorted(tensors)
    for part in (names[::2], names[1::2]):
        blob = base64.b64encode(save({name: tensors[name] for name in part})).decode()
        update(engine, lambda runner, blob=blob: runner.update_from_blobs([blob]))
    assert ids(engine.generate(SHORT)) == ids(other.generate(SHORT))


def test_an_update_waits_for_what_runs(
    model_folder: Path, other_folder: Path, start_engine: Any
) -> None:
    engine = start_engine(model_folder)
    expected = engine.generate(SHORT)
    running = [engine.submit(SHORT) for _ in range(3)]
    done = engine.scheduler.ask(
        lambda: engine.scheduler.update(
            lambda runner: runner.update_from_folder(other_folder), True, "2"
        ),
        when_idle=True,
    )
    later = engine.submit(SHORT)
    assert done.result(60) > 0
    assert later()["meta_info"]["weight_version"] == "2"
    for wait in running:
        assert ids(wait()) == ids(expected)
    answer = running[0]()
    assert ids(answer) == ids(expected)
    assert answer["meta_info"]["weight_version"] == "default"


def test_an_update_in_place_goes_on_with_the_new_weights(
    model_folder: Path, other_folder: Path, start_engine: Any
) -> None:
    engine = start_engine(model_folder)
    params = {**LONG["sampling_params"], "max_new_tokens": 400}
    running = engine.submit({**LONG, "sampling_params": params})
    engine.wait_running()
    engine.ask(lambda: engine.scheduler.pause("in_place"))
    apply = lambda runner: runner.update_from_folder(other_folder)  # noqa: E731
    with pytest.raises(EngineError, match="flush_cache=false"):
        update(engine, apply)
    update(engine, apply, flush=False)
    engine.ask(engine.scheduler.resume)
    answer = running()
    assert len(ids(answer)) == 400
    assert answer["meta_info"]["weight_version"] == "2"


def test_a_refused_update_changes_nothing(
    model_folder: Path, other_folder: Path, start_engine: Any, tmp_path: Path
) -> None:
    engine = start_engine(model_folder)
    before = engine.generate(SHORT)
    tensors = load_file(other_folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    bad: dict[str, dict[str, torch.Tensor]] = {
        "lacks model.layers.1.mlp.up_proj.weight": {k: v for k, v in tensors.items() if k != name},
        "which the model has not": {**tensors, "lm_head.bias": torch.zeros(3)},
        "has shape": {**tensors, name: torch.zeros(3, 4)},
    }
    for part, offered in bad.items():
        save_file(offered, tmp_path / "model.safetensors")
        with pytest.raises(EngineError, match=part):
            update(engine, lambda runner: runner.update_from_folder(tmp_path))
    with pytest.raises(EngineError, match="not found"):
        update(engine, lambda runner: runner.update_from_folder(tmp_path / "none"))
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(EngineError, match="not a readable safetensors file"):
        update(engine, lambda runner: runner.update_from_folder(tmp_path))
    for blob, part in ((b"\x80\x04]\x94.", "pickle"), (b"none", "no safetensors blob")):
        text = base64.b64encode(blob).decode()
        with pytest.raises(EngineError, match=part):
            update(engine, lambda runner, text=text: runner.update_from_blobs([text]))
    with pytest.raises(EngineError, match="not base64"):
        update(engine, lambda runner: runner.update_from_blobs(["***"]))
    after = engine.generate(SHORT)
    assert ids(after) == ids(before)
    assert after["meta_info"]["weight_version"] == "default"


def test_released_weights_answer_once_they_are_updated(
    model_folder: Path, start_engine: Any
) -> None:
    engine = start_engine(model_folder)
    scheduler, both = engine.scheduler, frozenset(("weights", "kv_cache"))
    before = engine.generate(SHORT)
    state = scheduler.runner.state
    engine.ask(lambda: scheduler.release(both))
    assert sum(tensor.untyped_storage().nbytes() for tensor in state.values()) == 0
    with pytest.raises(EngineError, match="resume_memory_occupation"):
        update(engine, lambda runner: 0)
    engine.ask(lambda: scheduler.reoccupy(both))
    assert "have no values" in scheduler.unable
    norm = {"model.norm.weight": state["model.norm.weight"].clone()}
    update(engine, lambda runner: runner.update_from_tensors(norm))
    assert "have no values" in scheduler.unable
    update(engine, lambda runner: runner.update_from_folder(model_folder))
    assert scheduler.unable is None
    assert ids(engine.generate(SHORT)) == ids(before)


def test_memory_is_released_and_taken_back_once(engine: Any) -> None:
    """A real server ends where it is asked twice."""
    scheduler, cache = engine.scheduler, frozenset(("kv_cache",))
    with pytest.raises(EngineError, match="kv_cache memory was not released"):
        engine.ask(lambda: scheduler.reoccupy(cache))
    engine.ask(lambda: scheduler.release(cache))
    with pytest.raises(EngineError, match="released already"):
        engine.ask(lambda: scheduler.release(cache))
    engine.ask(lambda: scheduler.reoccupy(cache))
    assert ids(engine.generate(SHORT))


def test_memory_is_not_released_under_running_requests(engine: Any) -> None:
    running = engine.submit(LONG)
    engine.wait_running()
    with pytest.raises(EngineError, match="1 running"):
        engine.ask(lambda: engine.scheduler.release(frozenset(("weights",))))
    engine.ask(lambda: engine.scheduler.abort(None))
    running()


def test_broken_weights_end_requests_with_a_reason(model_folder: Path, start_engine: Any) -> None:
    engine = start_engine(model_folder)

    def spoil(runner: Any) -> int:
        runner.state["model.norm.weight"].fill_(float("nan"))
        return 1

    update(engine, spoil)
    reason = engine.generate(SHORT)["meta_info"]["finish_reason"]
    assert reason["type"] == "abort"
    assert "not finite" in reason["message"]
