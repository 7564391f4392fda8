"""Bit for bit: a request's tokens and log-probs depend on its prompt, seed, parameters and weights
alone.
"""

import random
import runpy
import threading
from pathlib import Path
from typing import Any

Request = tuple[list[int], dict[str, Any]]
Result = tuple[list[int], list[float]]


def requests(count: int, seed: int) -> list[Request]:
    """Prompts and answers of many lengths, with every kind of sampling."""
    draw = random.Random(seed)
    out: list[Request] = []
    for i in range(count):
        prompt = [
            draw.randrange(3, 2000) for _ in range(draw.choice((1, 2, 7, 15, 16, 17, 40, 90)))
        ]
        params: dict[str, Any] = {"max_new_tokens": draw.choice((1, 5, 20, 45)), "sampling_seed": i}
        params |= draw.choice(
            (
                {},
                {"temperature": 0.0},
                {"temperature": 0.7, "top_p": 0.8},
                {"top_k": 20, "min_p": 0.01},
                {"frequency_penalty": 0.5, "repetition_penalty": 1.2},
            )
        )
        out.append((prompt, params))
    return out


def run(engine: Any, batch: list[Request]) -> list[Result]:
    body = {
        "input_ids": [prompt for prompt, _ in batch],
        "sampling_params": [params for _, params in batch],
        "return_logprob": True,
    }
    return [result(answer) for answer in engine.generate(body)]


def result(answer: dict[str, Any]) -> Result:
    entries = answer["meta_info"]["output_token_logprobs"]
    return answer["output_ids"], [entry[0] for entry in entries]


def test_alone_or_among_others_in_any_order(engine: Any) -> None:
    batch = requests(150, seed=0)
    together = run(engine, batch)
    engine.ask(engine.scheduler.flush)
    backwards = run(engine, batch[::-1])[::-1]
    assert backwards == together
    engine.ask(engine.scheduler.flush)
    for i in range(0, 150, 13):
        assert run(engine, [batch[i]]) == [together[i]]


def test_whatever_arrives_meanwhile(engine: Any) -> None:
    """Calls that come while others run land in other slots and batches."""
    batch = requests(60, seed=1)
    expected = run(engine, batch)
    got: dict[int, list[Result]] = {}

    def call(begin: int) -> None:
        got[begin] = run(engine, batch[begin : begin + 7])

    threads = [threading.Thread(target=call, args=(begin,)) for begin in range(0, 60, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one for begin in sorted(got) for one in got[begin]] == expected


def test_every_slot_gives_the_same_bits(engine: Any) -> None:
    """More copies than one decode batch holds, so that every slot of every batch size is used."""
    params = {"max_new_tokens": 12, "sampling_seed": 5, "temperature": 0.9}
    count = engine.scheduler.runner.largest_batch + 150
    results = run(engine, [([5, 6, 7], params)] * count)
    assert all(one == results[0] for one in results)
    assert len(results[0][0]) == 12


def test_many_more_requests_than_rows(model_folder: Any, start_engine: Any, engine: Any) -> None:
    batch = requests(50, seed=2)
    narrow = start_engine(model_folder, max_running_requests=4)
    assert run(narrow, batch) == run(engine, batch)


def test_a_cached_prompt_changes_nothing(engine: Any) -> None:
    batch = requests(10, seed=3)
    engine.ask(engine.scheduler.flush)
    fresh = run(engine, batch)
    body = {"input_ids": batch[0][0], "sampling_params": {"max_new_tokens": 1}}
    cached = engine.generate(body)["meta_info"]["cached_tokens"]
    assert cached == len(batch[0][0]) - 1
    assert run(engine, batch) == fresh


def test_frozen_in_place_and_gone_on(engine: Any) -> None:
    batch = requests(20, seed=4)
    expected = run(engine, batch)
    body = {
        "input_ids": [prompt for prompt, _ in batch],
        "sampling_params": [params for _, params in batch],
        "return_logprob": True,
    }
    wait = engine.submit(body)
    for _ in range(10):
        engine.ask(lambda: engine.scheduler.pause("in_place"))
        engine.ask(engine.scheduler.resume)
    assert [result(answer) for answer in wait()] == expected


def test_samples_of_one_prompt_differ_and_repeat(engine: Any) -> None:
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"n": 8, "max_new_tokens": 10, "sampling_seed": 1},
        "return_logprob": True,
    }
    first = [result(answer) for answer in engine.generate(body)]
    assert len({tuple(tokens) for tokens, _ in first}) == 8
    assert [result(answer) for answer in engine.generate(body)] == first
    # The first sample is what the same seed gives without n.
    alone = run(engine, [([5, 6, 7], {"max_new_tokens": 10, "sampling_seed": 1})])
    assert alone == first[:1]


def test_without_a_seed_the_servers_seed_and_the_order_decide(
    model_folder: Any, start_engine: Any
) -> None:
    batch: list[Request] = [([5, 6, 7], {"max_new_tokens": 10})] * 3
    one, same, other = (start_engine(model_folder, random_seed=seed) for seed in (1, 1, 2))
    first = run(one, batch)
    assert len({tuple(tokens) for tokens, _ in first}) == 3
    assert run(same, batch) == first
    assert run(other, batch) != first
    assert run(one, batch) != first


def test_a_vocabulary_that_fills_no_vector(tmp_path: Path, start_engine: Any) -> None:
    """The quickstart's model: 45 logits a row, so that rows begin at every alignment."""
    example = Path(__file__).parents[3] / "examples" / "quickstart" / "model.py"
    runpy.run_path(str(example))["build"](tmp_path, 0)
    engine = start_engine(tmp_path)
    batch: list[Request] = [
        ([3 + i % 10, 14], {"max_new_tokens": 1 + i % 40, "sampling_seed": i, "ignore_eos": True})
        for i in range(300)
    ]
    together = run(engine, batch)
    for i in range(0, 300, 29):
        assert run(engine, [batch[i]]) == [together[i]]
        neighbours = run(engine, batch[i : i + 3])
        assert neighbours == together[i : i + 3]
