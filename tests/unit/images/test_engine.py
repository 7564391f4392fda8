"""The embedded engine with images, against transformers' own generate and forward."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vision_models import picture, write_model

from rlcore.errors import EngineError

SEEN = "<|vision_start|><|image_pad|><|vision_end|>"
FIRST = f"<|im_start|>a\n{SEEN}is it{SEEN}?"
SECOND = f"{SEEN}what colour is this? ab"


def uri(colour: str, width: int = 24, height: int = 16) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture(colour, width, height)).decode()}"


IMAGES = {FIRST: [uri("red"), uri("blue", 16, 32)], SECOND: [uri("green")]}


class Engine:
    """The real scheduler and model, without HTTP."""

    def __init__(self, folder: Path) -> None:
        from rlcore.engine.embedded.__main__ import parse_arguments
        from rlcore.engine.embedded.start import build_service

        self.service = build_service(parse_arguments(["--model-path", str(folder), "--port", "0"]))
        self.service.scheduler.start()

    def generate(self, body: dict[str, Any]) -> Any:
        import threading

        from rlcore.engine.embedded.output import answer

        call, done = self.service.parse(body), threading.Event()
        call.done = done.set
        self.service.scheduler.submit(call)
        assert done.wait(120), "the engine did not finish"
        found = [answer(one, self.service.tokenizer, 0.0) for one in call.requests]
        return found if call.batched else found[0]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("vision") / request.param, request.param)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    engine = Engine(folder)
    yield engine
    engine.service.scheduler.stop()


def inputs(folder: Path, text: str) -> dict[str, Any]:
    """What transformers' model is given."""
    import torch
    from transformers import AutoTokenizer

    from rlcore.images.files import read_image
    from rlcore.images.processor import ImageProcessor

    processor = ImageProcessor(folder)
    images = [read_image(image, None) for image in IMAGES[text]]
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    tokens, pixels = processor.expand(ids, images), processor.pixels(images)
    return {
        "input_ids": torch.tensor([tokens]),
        "attention_mask": torch.ones(1, len(tokens), dtype=torch.long),
        "pixel_values": torch.from_numpy(pixels.values),
        "image_grid_thw": torch.from_numpy(pixels.grids),
        "mm_token_type_ids": torch.tensor([[int(t == processor.token) for t in tokens]]),
    }


def test_greedy_answers_are_those_of_transformers(folder: Path, engine: Engine) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    body = {
        "text": [FIRST, SECOND],
        "image_data": [IMAGES[FIRST], IMAGES[SECOND]],
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    for text, answer in zip((FIRST, SECOND), engine.generate(body), strict=True):
        given = inputs(folder, text)
        length = given["input_ids"].shape[1]
        made = model.generate(
            **given, do_sample=False, max_new_tokens=12, min_new_tokens=12, eos_token_id=None
        )[0, length:].tolist()
        assert answer["output_ids"] == made
        assert answer["meta_info"]["prompt_tokens"] == length
        # And the log-probs, of the prompt too. To the model's own forward every placeholder is an
        # image, those that it said too.
        token = model.config.image_token_id
        made = made[: made.index(token)] if token in made else made
        assert len(made) > 2
        whole = torch.cat([given["input_ids"], torch.tensor([made])], dim=1)
        said = torch.zeros(1, len(made), dtype=torch.long)
        kinds = torch.cat([given["mm_token_type_ids"], said], dim=1)
        more = {"input_ids": whole, "attention_mask": torch.ones_like(whole)}
        with torch.no_grad():
            logits = model(**given | more | {"mm_token_type_ids": kinds}).logits[0, :-1]
        wanted = logits.log_softmax(-1).gather(1, whole[0, 1:, None])[:, 0]
        meta = answer["meta_info"]
        entries = meta["input_token_logprobs"][1:] + meta["output_token_logprobs"][: len(made)]
        got = torch.tensor([entry[0] for entry in entries])
        assert (got - wanted).abs().max() < 2e-5


def test_an_image_changes_what_is_said(engine: Engine) -> None:
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    said = {
        tuple(
            engine.generate({"text": SECOND, "image_data": uri(colour), "sampling_params": params})[
                "output_ids"
            ]
        )
        for colour in ("red", "green", "blue", "black")
    }
    assert len(said) > 1


def test_company_does_not_change_a_bit(engine: Engine) -> None:
    params = {"temperature": 1.0, "max_new_tokens": 10, "sampling_seed": 5}
    alone = {"text": FIRST, "image_data": IMAGES[FIRST], "sampling_params": params}
    alone |= {"return_logprob": True}
    engine.service.scheduler.ask(engine.service.scheduler.flush).result()
    single = engine.generate(alone)
    engine.service.scheduler.ask(engine.service.scheduler.flush).result()
    body = {
        "text": [SECOND, FIRST, "a?", FIRST],
        "image_data": [IMAGES[SECOND], IMAGES[FIRST], None, IMAGES[FIRST][::-1]],
        "sampling_params": params,
        "return_logprob": True,
    }
    together = engine.generate(body)
    assert together[1]["output_ids"] == single["output_ids"]
    logprobs = [one["meta_info"]["output_token_logprobs"] for one in (together[1], single)]
    assert logprobs[0] == logprobs[1]
    # The same words with other images are another prompt.
    assert together[3]["meta_info"]["output_token_logprobs"] != logprobs[0]


def test_ids_are_taken_with_places_once_or_repeated(engine: Engine) -> None:
    ids = engine.service.tokenizer.encode([FIRST])[0]
    body = {"input_ids": ids, "image_data": IMAGES[FIRST], "sampling_params": {"max_new_tokens": 1}}
    [request] = engine.service.parse(body).requests
    body |= {"input_ids": [request.tokens], "image_data": [IMAGES[FIRST]]}
    again = engine.service.parse(body)
    assert again.requests[0].tokens == request.tokens and len(request.tokens) > len(ids)
    assert again.requests[0].key == request.key


def test_what_is_no_image_is_refused(engine: Engine) -> None:
    for images, fault in (
        (["/etc/hostname"], "image_data cannot be used: .*is not base64"),
        ([uri("red"), uri("red")], "the prompt has 1 places for 2 images"),
        (3, "image_data must hold images"),
    ):
        with pytest.raises(EngineError, match=fault):
            engine.service.parse({"text": SECOND, "image_data": images})
    with pytest.raises(EngineError, match="equal to the batch size"):
        engine.service.parse({"text": ["a", "b"], "image_data": [uri("red")]})


def test_weights_go_by_the_names_of_the_folder(folder: Path, engine: Engine) -> None:
    from rlcore.weights.names import stored_names

    assert set(engine.service.scheduler.runner.state) - {"lm_head.weight"} == stored_names(folder)
    other = write_model(folder.with_name(f"{folder.name}-other"), folder.name, seed=1)
    runner = engine.service.scheduler.runner
    before = {name: tensor.clone() for name, tensor in runner.state.items()}
    assert runner.update_from_folder(other) == len(stored_names(folder))
    drawn = {name: tensor for name, tensor in runner.state.items() if tensor.dim() > 1}
    assert len(drawn) > 20 and not any(t.equal(before[name]) for name, t in drawn.items())
    runner.update_from_folder(folder)
    assert all(tensor.equal(before[name]) for name, tensor in runner.state.items())
