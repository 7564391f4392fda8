"""What the engine generates is what transformers computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

PROMPTS = [
    [5],
    [6, 7],
    list(range(20, 35)),
    list(range(40, 56)),
    list(range(3, 20)),
    [9] * 70,
    [11, 12, 13, 9, 8, 7, 100, 1999],
]
"""Lengths on both sides of what a prompt is padded to and of the lanes' lengths."""


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()


@torch.no_grad()
def forward_log_probs(model: Any, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[len(tokens), vocabulary]; row i is of what follows token i."""
    return torch.log_softmax(model(torch.tensor([tokens])).logits[0].float() / temperature, dim=-1)


def test_greedy_equals_transformers_generate(engine: Any, reference: Any) -> None:
    params = {"temperature": 0.0, "max_new_tokens": 40}
    answers = engine.generate({"input_ids": PROMPTS, "sampling_params": params})
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=0
        )[0, len(prompt) :]
        assert answer["output_ids"] == expected.tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_log_probs_are_those_of_a_forward_pass(
    engine: Any, reference: Any, temperature: float
) -> None:
    """Of softmax(logits / temperature) before top-p; of the plain logits where the temperature is
    0.
    """
    params = {"temperature": temperature, "top_p": 0.9, "max_new_tokens": 30, "sampling_seed": 3}
    answers = engine.generate(
        {"input_ids": PROMPTS, "sampling_params": params, "return_logprob": True}
    )
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = prompt + answer["output_ids"]
        expected = forward_log_probs(reference, tokens, temperature or 1.0)
        for i, (value, token, _) in enumerate(answer["meta_info"]["output_token_logprobs"]):
            assert value == pytest.approx(float(expected[len(prompt) + i - 1, token]), abs=1e-4)


def test_prompt_log_probs_are_those_of_a_forward_pass(engine: Any, reference: Any) -> None:
    """From `logprob_start_len` on; the first has none. They are not scaled by the temperature."""
    starts = [0, 1, 5, 0, 16, 69, 0]
    answers = engine.generate(
        {
            "input_ids": PROMPTS,
            "sampling_params": {"temperature": 0.5, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": starts,
            "top_logprobs_num": 2,
        }
    )
    for prompt, start, answer in zip(PROMPTS, starts, answers, strict=True):
        entries = answer["meta_info"]["input_token_logprobs"]
        assert [entry[1] for entry in entries] == prompt[start:]
        expected = forward_log_probs(reference, prompt)
        for i, (value, token, _) in enumerate(entries):
            if i == 0:
                assert value is None
                continue
            assert value == pytest.approx(float(expected[start + i - 1, token]), abs=1e-4)
            best = answer["meta_info"]["input_top_logprobs"][i][0]
            assert best[0] == pytest.approx(float(expected[start + i - 1].max()), abs=1e-4)


def test_top_log_probs_are_the_largest(engine: Any, reference: Any) -> None:
    answer = engine.generate(
        {
            "input_ids": [5, 6, 7, 8],
            "sampling_params": {"max_new_tokens": 5, "sampling_seed": 1},
            "return_logprob": True,
            "top_logprobs_num": 3,
        }
    )
    expected = forward_log_probs(reference, [5, 6, 7, 8, *answer["output_ids"]])
    for i, top in enumerate(answer["meta_info"]["output_top_logprobs"]):
        values, ids = expected[3 + i].topk(3)
        assert [entry[1] for entry in top] == ids.tolist()
        assert [entry[0] for entry in top] == pytest.approx(values.tolist(), abs=1e-4)


def test_text_and_ids_are_the_same_prompt(engine: Any) -> None:
    params = {"temperature": 0.0, "max_new_tokens": 8, "skip_special_tokens": False}
    by_text = engine.generate({"text": "7=", "sampling_params": params})
    by_ids = engine.generate({"input_ids": [10, 14], "sampling_params": params})
    assert by_text["output_ids"] == by_ids["output_ids"]
    assert by_text["meta_info"]["prompt_tokens"] == 2


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_other_architectures(
    architecture: str, tmp_path: Path, model_folder: Path, start_engine: Any
) -> None:
    """Any decoder that calls transformers' attention interface; here with an untied head and
    biases.
    """
    sizes: dict[str, Any] = dict(  # noqa: C408
        vocab_size=2000,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(3)
    model: Any = (
        LlamaForCausalLM(LlamaConfig(**sizes))
        if architecture == "llama"
        else Qwen2ForCausalLM(Qwen2Config(**sizes))
    )
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model_folder / name).read_bytes())
    engine = start_engine(tmp_path)
    answer = engine.generate(
        {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0.0, "max_new_tokens": 20}}
    )
    expected = model.eval().generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=20, do_sample=False, pad_token_id=0
    )
    assert answer["output_ids"] == expected[0, 3:].tolist()
