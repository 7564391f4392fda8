"""New weights while requests are in flight: which policy chose each token, and its log-prob."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from rlcore.errors import EngineError
from rlcore.rollout.client import EngineClient, GenerateRequest
from rlcore.rollout.generate import apply_result
from rlcore.sample import Sample, Status
from rlcore.weights.sync import SyncSpec, WeightSync

PROMPT, TOKENS = [5, 6, 7, 8], 900
TRIES = 20
"""A request may have ended before the weights came; that is no fault."""


def weights_of(trainer: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.named_tensors("float32")}


def change(trainer: Any) -> None:
    with torch.no_grad():
        for _, parameter in trainer._held()[0].weights():
            local = parameter.to_local()
            local += 0.02 * torch.randn_like(local)


def replayed(
    folder: Path, output: list[int], first: int, old: dict[str, Tensor], new: dict[str, Tensor]
) -> list[float]:
    """Log-probs of a response whose first tokens are by one model, whose cache the other keeps."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    before, after = [*PROMPT, *output[: first - 1]], output[first - 1 : -1]
    with torch.no_grad():
        model.load_state_dict(old, strict=False)
        begun = model(torch.tensor([before]), use_cache=True)
        model.load_state_dict(new, strict=False)
        rest = model(torch.tensor([after]), past_key_values=begun.past_key_values)
        logits = torch.cat([begun.logits[0, len(PROMPT) - 1 :], rest.logits[0]])
    chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(output)[:, None])
    return [float(value) for value in chosen[:, 0]]


def asked(engine_url: str, answers: list[dict[str, Any]]) -> threading.Thread:
    """A long request, once the engine has it or has answered it."""

    def ask() -> None:
        body = {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": TOKENS, "ignore_eos": True, "sampling_seed": 3},
            "return_logprob": True,
        }
        answers.append(httpx.post(f"{engine_url}/generate", json=body, timeout=300).json())

    request = threading.Thread(target=ask)
    request.start()
    while request.is_alive() and not httpx.get(f"{engine_url}/get_load").json()[0]["num_reqs"]:
        time.sleep(0.001)
    return request


@pytest.fixture
def spec(engine_url: str, model_folder: Path, tmp_path: Path) -> SyncSpec:
    return SyncSpec(
        urls=(engine_url,),
        version="1",
        transport="distributed",
        dtype="float32",
        model_folder=model_folder,
        scratch=tmp_path,
        canary_prompts=1,
        canary_tolerance=1e-4,
        vocab_size=45,
        context_length=1024,
        pause_mode="in_place",
    )


@pytest.mark.parametrize("transport", ["disk", "distributed"])
def test_tokens_and_their_log_probs_are_of_the_policy_that_chose_them(
    trainer: Any, engine_url: str, model_folder: Path, spec: SyncSpec, transport: Any
) -> None:
    def sync(version: int) -> None:
        changed = replace(spec, version=str(version), transport=transport)
        report = weight_sync.run(trainer, changed)
        assert report is not None and report.metrics["canary_abs_diff"] < 1e-5

    weight_sync = WeightSync(rank=0)
    answers: list[dict[str, Any]] = []
    version = 1
    sync(version)
    for _ in range(TRIES):
        old = weights_of(trainer)
        change(trainer)
        request = asked(engine_url, answers)
        version += 1
        sync(version)
        request.join()
        if "weight_versions" in answers[-1]["meta_info"]:
            break
    weight_sync.close()

    [answer, meta] = answers[-1], answers[-1]["meta_info"]
    (first, n), (second, m) = meta["weight_versions"]
    assert (first, second, n + m) == (str(version - 1), str(version), TOKENS)
    assert n > 0 < m and meta["weight_version"] == second
    got = [entry[0] for entry in meta["output_token_logprobs"]]
    reference = replayed(model_folder, answer["output_ids"], n, old, weights_of(trainer))
    assert got == pytest.approx(reference, abs=1e-4)

    sample = Sample(prompt="x", tokens=list(PROMPT))
    apply_result(
        sample, EngineClient(engine_url)._result(answer, GenerateRequest(list(PROMPT), {}))
    )
    assert sample.weight_versions == [first, second]
    assert (sample.status, sample.response_length) == (Status.TRUNCATED, TOKENS)
    assert sample.rollout_log_probs == got


def test_nothing_goes_on_with_weights_of_which_some_are_old(
    trainer: Any, engine_url: str, spec: SyncSpec
) -> None:
    class Lossy:
        """A trainer whose last weight the engine does not know."""

        log_probs = trainer.log_probs

        def named_tensors(self, dtype: Any, device: str) -> Iterator[Any]:
            yield from trainer.named_tensors(dtype, device)
            yield "not.there", torch.ones(1)

    answers: list[dict[str, Any]] = []
    # Held, so that it is in flight for certain.
    httpx.post(f"{engine_url}/pause_generation", json={"mode": "in_place"})
    request = asked(engine_url, answers)
    weight_sync = WeightSync(rank=0)
    with pytest.raises(EngineError, match="which the model has not"):
        weight_sync.run(Lossy(), replace(spec, bucket_bytes=5000))  # type: ignore[arg-type]
    weight_sync.close()
    request.join()
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert not httpx.get(f"{engine_url}/get_server_info").json()["paused"]
