"""Training on images: against plain transformers, on one rank and two, and against the engine."""

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stored_batches import Stored
from vision_models import picture, write_model

from rlcore.algorithms.aggregate import Totals, token_weight
from rlcore.algorithms.packing import TrainSequence, pack
from rlcore.errors import DataError
from rlcore.images.files import data_uris, read_image
from rlcore.images.processor import ImageProcessor
from rlcore.sample import Sample, Status
from rlcore.weights.names import stored_names

TOLERANCE = 1e-5
COLOURS = ("red", "green", "blue", "black")
SEEN = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("vision") / request.param, request.param)


def ids_of(folder: Path, text: str) -> list[int]:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


def sequences(folder: Path, count: int) -> list[TrainSequence]:
    """Samples with two images, one or none."""
    processor, draw = ImageProcessor(folder), random.Random(0)
    out = []
    for k in range(count):
        given = [
            read_image(picture(COLOURS[(k + i) % 4], 16 + 8 * (k % 2), 16), None)
            for i in range(2 - k % 3)
        ]
        prompt = processor.expand(ids_of(folder, f"a{SEEN * len(given)}b?"), given)
        said = [draw.randrange(9, 40) for _ in range(draw.randint(2, 8))]
        images = None
        if given:
            images = processor.lay_out([*prompt, *said], processor.pixels(given), len(prompt))
        out.append(
            TrainSequence(
                [*prompt, *said],
                len(said),
                advantages=draw.gauss(0, 1),
                rollout_log_probs=[-3.8] * len(said),
                images=images,
            )
        )
    return out


def plain_step(folder: Path, batch: list[TrainSequence]) -> tuple[float, float]:
    """Loss and gradient norm by transformers' own forward, one sample at a time, ratio 1."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    totals, loss = Totals.of(s.trainable_tokens for s in batch), torch.zeros(())
    for one in batch:
        ids, more = torch.tensor([one.tokens]), {}
        if one.images is not None:
            kinds = torch.zeros_like(ids)
            kinds[0, torch.from_numpy(one.images.at)] = 1
            more = {
                "pixel_values": torch.from_numpy(one.images.pixels.values),
                "image_grid_thw": torch.from_numpy(one.images.pixels.grids),
                "mm_token_type_ids": kinds,
            }
        logits = model(input_ids=ids, **more).logits[0, :-1]
        log_probs = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[-one.response_length :, 0]
        weight = token_weight(one.trainable_tokens, totals, "token_mean")
        loss = loss - ((log_probs - log_probs.detach()).exp() * one.advantages * weight).sum()
    loss.backward()
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return loss.item(), torch.stack(norms).norm().item()


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_ranks_and_micro_batches_do_not_change_loss_or_gradient(
    toy: Any,
    make_trainer: Callable[..., Any],
    two_ranks: Any,
    folder: Path,
    micro_batches: int,
    tmp_path: Path,
) -> None:
    # Some micro-batches have no images, and of two ranks one may have them alone.
    batch = sequences(folder, 7)
    loss, norm = plain_step(folder, batch)
    shares = toy.shares(batch, 1, micro_batches=micro_batches)
    one = make_trainer(folder).train("start", "next", shares[0]).metrics
    shares = toy.shares(batch, 2, micro_batches=micro_batches)
    two = two_ranks.run(folder, [shares], export=tmp_path / "hf")
    for metrics in (one, two[0]["reports"][0], two[1]["reports"][0]):
        assert metrics["loss"] == pytest.approx(loss, abs=TOLERANCE)
        assert metrics["grad_norm"] == pytest.approx(norm, abs=2 * TOLERANCE)
    assert stored_names(tmp_path / "hf") == stored_names(folder)


def test_a_placeholder_that_was_said_is_a_token(
    make_trainer: Callable[..., Any], folder: Path
) -> None:
    [one] = sequences(folder, 1)
    processor = ImageProcessor(folder)
    assert one.images is not None
    prompt = len(one.tokens) - one.response_length
    said = [*one.tokens[:prompt], processor.token, processor.token, *one.tokens[prompt:]]
    images = processor.lay_out(said, one.images.pixels, prompt)
    assert images.at.tolist() == one.images.at.tolist()
    longer = TrainSequence(said, one.response_length + 2, images=images)
    packed = pack([longer], Totals.of([longer.trainable_tokens]), "token_mean")
    policy = make_trainer(folder)._policy
    with torch.no_grad():
        values = policy.score(packed, torch.arange(len(said) - 1), 1.0)[0]
    assert values.isfinite().all()


def test_images_are_seen_by_their_own_sequence_alone(
    make_trainer: Callable[..., Any], folder: Path
) -> None:
    policy = make_trainer(folder)._policy
    batch = sequences(folder, 5)

    def scored(given: list[TrainSequence]) -> list[torch.Tensor]:
        totals = Totals.of(s.trainable_tokens for s in given)
        packed = pack(given, totals, "token_mean").inputs()
        rows = torch.arange(len(packed.input_ids))
        with torch.no_grad():
            return list(policy.score(packed, rows, 1.0)[0].split(packed.lengths))

    together = scored(batch)
    for one, values in zip(batch, together, strict=True):
        torch.testing.assert_close(values, scored([one])[0], atol=TOLERANCE, rtol=0)


def generated(folder: Path) -> list[Sample]:
    """Samples of the embedded engine, one of them without an image."""
    from rlcore.engine.embedded.__main__ import parse_arguments
    from rlcore.engine.embedded.output import answer
    from rlcore.engine.embedded.start import build_service

    processor = ImageProcessor(folder)
    service = build_service(parse_arguments(["--model-path", str(folder), "--port", "0"]))
    service.scheduler.start()
    samples = []
    for k, colour in enumerate((*COLOURS, None)):
        given = [] if colour is None else [read_image(picture(colour), None)]
        text = f"{SEEN * len(given)}what?"
        for _ in range(2):
            samples.append(
                Sample(
                    group_index=k,
                    index=len(samples),
                    prompt=text,
                    tokens=processor.expand(ids_of(folder, text), given),
                    multimodal_inputs={"image": given} if given else None,
                    status=Status.COMPLETED,
                )
            )
    body = {
        "input_ids": [s.tokens for s in samples],
        "image_data": [data_uris((s.multimodal_inputs or {}).get("image", [])) for s in samples],
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 10, "ignore_eos": True},
        "return_logprob": True,
    }
    call, done = service.parse(body), threading.Event()
    call.done = done.set
    service.scheduler.submit(call)
    assert done.wait(120), "the engine did not finish"
    for sample, request in zip(samples, call.requests, strict=True):
        made = answer(request, service.tokenizer, 0.0)
        log_probs = [entry[0] for entry in made["meta_info"]["output_token_logprobs"]]
        sample.append_response_tokens(made["output_ids"], log_probs)
    service.scheduler.stop()
    return samples


def test_log_probs_of_a_stored_batch_are_the_engine_s(
    make_trainer: Callable[..., Any], folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForImageTextToText

    samples = generated(folder)
    trainer = make_trainer(folder)
    before = {name: t.clone() for name, t in trainer.named_tensors("float32")}
    assert set(before) == stored_names(folder)
    stored = Stored(tmp_path / "batch", samples)
    batch = stored.load(images=trainer.images)
    report = trainer.train("start", "next", batch)
    assert report.metrics["train_rollout_logprob_abs_diff_max"] < TOLERANCE
    # The tower learns too, and what is exported is what is held.
    after = dict(trainer.named_tensors("float32"))
    assert all(not after[n].equal(t) for n, t in before.items() if ".merger." in n)
    trainer.export_hf(tmp_path / "hf", "float32")
    _, loaded = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not any(loaded[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (tmp_path / "hf" / "preprocessor_config.json").is_file()
    again = make_trainer(tmp_path / "hf")
    assert all(t.equal(after[n]) for n, t in again.named_tensors("float32"))


def test_what_a_function_made_of_the_images_is_used(
    make_trainer: Callable[..., Any], folder: Path, tmp_path: Path
) -> None:
    samples = generated(folder)[:2]
    processor = ImageProcessor(folder)
    pixels = processor.pixels((samples[0].multimodal_inputs or {})["image"])
    for sample in samples:
        sample.multimodal_inputs = {"images": "what slime's plugins keep here"}
        sample.multimodal_train_inputs = {
            "pixel_values": torch.from_numpy(pixels.values),
            "image_grid_thw": torch.from_numpy(pixels.grids),
        }
    batch = Stored(tmp_path / "made", samples).load(images=processor)
    seen = [s.images for step in batch.steps for micro in step.micro_batches for s in micro]
    assert all(one is not None and np.array_equal(one.pixels.values, pixels.values) for one in seen)
    # One array for all samples that share it.
    assert len({id(one.pixels) for one in seen if one is not None}) == 1
    for sample in samples:
        sample.multimodal_train_inputs = {"pixel_values": [[1.0]]}
    with pytest.raises(DataError, match="row 0 of the rollout: multimodal_train_inputs must hold"):
        Stored(tmp_path / "wrong", samples).load(images=processor)


def test_tokens_of_another_processor_are_told(folder: Path, tmp_path: Path) -> None:
    samples = generated(folder)[:2]
    samples[1].multimodal_inputs = {"image": [read_image(picture("red", 16, 8), None)]}
    with pytest.raises(DataError, match="row 1 of the rollout: a prompt has places for"):
        Stored(tmp_path / "other", samples).load(images=ImageProcessor(folder))


def test_samples_of_one_prompt_cost_little_more_than_one(folder: Path, tmp_path: Path) -> None:
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 256, (160, 160, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "n.png")
    image = read_image("n.png", tmp_path)

    def stored(count: int) -> int:
        samples = [
            Sample(
                group_index=0,
                index=k,
                tokens=[1, 2, 3],
                response_length=1,
                multimodal_inputs={"image": [image]},
            )
            for k in range(2 * count)
        ]
        files = Stored(tmp_path / str(count), samples).files.rollout
        return max(ref.bytes for ref in files)

    assert stored(40) < 1.2 * stored(1)
