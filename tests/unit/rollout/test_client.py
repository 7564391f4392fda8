"""The client: what it refuses to send, how it reads replies, what its errors say."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import Request, Response

from rlcore.errors import EngineError
from rlcore.rollout.client import (
    EngineClient,
    EngineUnavailable,
    GenerateRequest,
    speculation,
)
from rlcore.rollout.limits import Limits

PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 4}


@pytest.fixture
async def client(server: Any) -> AsyncIterator[EngineClient]:
    async with EngineClient(server.url, Limits(100, 32), timeout_s=2) as made:
        yield made


def fake_reply(tokens: list[int], reason: str = "length", **meta: Any) -> dict[str, Any]:
    return {
        "text": "t",
        "output_ids": tokens,
        "meta_info": {
            "finish_reason": {"type": reason},
            "output_token_logprobs": [[-1.5, t, None] for t in tokens],
            "weight_version": "3",
            "cached_tokens": 1,
        }
        | meta,
    }


async def test_a_batch_is_one_call_with_parameters_each(server: Any, client: EngineClient) -> None:
    server.says([fake_reply([1, 2]), fake_reply([3], "stop")])
    requests = [
        GenerateRequest([5], PARAMS | {"sampling_seed": 1}),
        GenerateRequest([6, 7], PARAMS | {"sampling_seed": 2}),
    ]
    first, second = await client.generate(requests)
    assert (first.tokens, first.log_probs, first.finish_reason) == ([1, 2], [-1.5, -1.5], "length")
    assert (second.tokens, second.finish_reason, second.weight_version) == ([3], "stop", "3")
    assert second.cached_tokens == 1
    [(path, body)] = server.seen
    assert path == "/generate"
    assert body["input_ids"] == [[5], [6, 7]]
    assert [p["sampling_seed"] for p in body["sampling_params"]] == [1, 2]
    assert body["return_logprob"] is True


async def test_images_travel_with_one_placeholder_each(server: Any) -> None:
    image = 9
    requests = [
        GenerateRequest([1, image, image, 2, image, 3, image], PARAMS, images=["data:a", "data:b"]),
        GenerateRequest([1, image, image], PARAMS),
    ]
    replies = [fake_reply([1], prompt_tokens=7), fake_reply([2])]
    async with EngineClient(server.url, Limits(100, 32, image), timeout_s=2) as client:
        server.says(replies)
        assert [r.tokens for r in await client.generate(requests)] == [[1], [2]]
        [(_, body)] = server.seen
        # What the model has said itself is sent as it is.
        assert body["input_ids"] == [[1, image, 2, image, 3, image], [1, image, image]]
        assert body["image_data"] == [["data:a", "data:b"], []]
        server.says([fake_reply([1], prompt_tokens=8), fake_reply([2])])
        with pytest.raises(EngineError, match="2 images as 8 tokens, not 7: its image processor"):
            await client.generate(requests)
    async with EngineClient(server.url, Limits(100, 32), timeout_s=2) as client:
        with pytest.raises(EngineError, match="the model takes none"):
            await client.generate(requests)


@pytest.mark.parametrize(
    ("ids", "params", "said"),
    [
        ([], {}, "no input ids"),
        ([1, 100], {}, "token id 100 is outside the model's vocabulary of 100"),
        ([-1], {}, "token id -1 is outside"),
        ([1] * 30, {"max_new_tokens": 3}, "exceed the context of 32"),
        ([1], {"temperature": -0.1}, "temperature = -0.1"),
        ([1], {"temperature": float("nan")}, "temperature = nan"),
        ([1], {"temperature": True}, "temperature = True"),
        ([1], {"top_p": 0}, "top_p = 0"),
        ([1], {"top_k": 0}, "top_k = 0"),
        ([1], {"min_p": 2.0}, "min_p = 2.0"),
        ([1], {"max_new_tokens": -1}, "max_new_tokens = -1"),
        ([1], {"max_new_tokens": 1.5}, "max_new_tokens = 1.5"),
        ([1], {"n": 2}, "n = 2"),
        ([1], {"nonsense": 1}, "no sampling parameter 'nonsense'"),
    ],
)
async def test_what_would_hurt_a_server_is_never_sent(
    server: Any, client: EngineClient, ids: list[int], params: dict[str, Any], said: str
) -> None:
    with pytest.raises(EngineError) as caught:
        await client.generate([GenerateRequest([1], PARAMS), GenerateRequest(ids, PARAMS | params)])
    assert said in str(caught.value)
    assert not isinstance(caught.value, EngineUnavailable)
    assert server.seen == []


@pytest.mark.parametrize(
    ("status", "content", "kind", "said"),
    [
        (400, {"error": {"message": "too long"}}, EngineError, "answered 400: too long"),
        (400, {"object": "error", "message": "bad"}, EngineError, "answered 400: bad"),
        (404, {"detail": "Not Found"}, EngineError, "answered 404: Not Found"),
        (500, "Internal Server Error", EngineUnavailable, "answered 500: Internal Server Error"),
        (503, "", EngineUnavailable, "answered 503"),
        (200, "{nope", EngineUnavailable, "answered no JSON"),
        (200, [], EngineError, "answered 0 for 1 requests"),
        (200, [{"output_ids": []}], EngineError, "something else than SGLang does"),
        (200, [fake_reply([1], output_token_logprobs=[])], EngineError, "log-probs of other 0"),
        (
            200,
            [fake_reply([1], output_token_logprobs=[[-1.0, 2, None]])],
            EngineError,
            "log-probs of other",
        ),
        (
            200,
            [fake_reply([1], output_token_logprobs=[[None, 1, None]])],
            EngineError,
            "no finite numbers",
        ),
    ],
)
async def test_errors_name_address_status_and_message(
    server: Any, client: EngineClient, status: int, content: Any, kind: type, said: str
) -> None:
    server.says(content, status)
    with pytest.raises(EngineError) as caught:
        await client.generate([GenerateRequest([1], PARAMS)])
    assert type(caught.value) is kind
    assert said in str(caught.value)
    assert f"{server.url}/generate" in str(caught.value)


async def test_a_dead_or_slow_server_is_unavailable(server: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with EngineClient(f"http://127.0.0.1:{port}") as nobody:
        with pytest.raises(EngineUnavailable, match="did not answer: ConnectError"):
            await nobody.generate([GenerateRequest([1], PARAMS)])
        assert await nobody.health() is False

    async def slow(request: Request) -> Any:
        await asyncio.sleep(5)

    server.answer = slow
    async with EngineClient(server.url, timeout_s=0.2) as hasty:
        with pytest.raises(EngineUnavailable, match="ReadTimeout"):
            await hasty.generate([GenerateRequest([1], PARAMS)])
        assert await hasty.health(timeout_s=0.2) is False


async def test_a_flush_waits_until_requests_have_ended(server: Any, client: EngineClient) -> None:
    async def third_time(request: Request) -> Any:
        return Response("x", status_code=200 if len(server.seen) == 3 else 400)

    server.answer = third_time
    await client.flush_cache()
    assert len(server.seen) == 3
    server.says("running", 400)
    with pytest.raises(EngineError, match="answered 400: running"):
        await client.flush_cache(timeout_s=0.1)


async def test_an_update_that_failed_with_status_200_is_an_error(
    server: Any, client: EngineClient
) -> None:
    server.says({"success": False, "message": "no such file"})
    with pytest.raises(EngineError, match="no such file"):
        await client.update_weights_from_disk("/x", "4")
    server.says({"success": True, "message": ""})
    await client.update_weights_from_tensor([b"\x00\x01"], "5")
    assert server.seen[-1][1]["serialized_named_tensors"] == ["AAE="]
    assert server.seen[-1][1]["disable_draft_model"] is True


async def test_prompt_log_probs_are_those_of_all_tokens_but_the_first(
    server: Any, client: EngineClient
) -> None:
    entries = [[None, 5, None], [-0.5, 6, None], [-0.25, 7, None]]
    server.says([fake_reply([], input_token_logprobs=entries)])
    assert await client.prompt_log_probs([[5, 6, 7]]) == [[-0.5, -0.25]]
    with pytest.raises(EngineError, match="not the 2 asked for"):
        await client.prompt_log_probs([[5, 6]])


def test_what_an_answer_says_of_speculation() -> None:
    meta = {"spec_num_correct_drafts": 5, "spec_num_proposed_drafts": 8, "spec_verify_ct": 3}
    assert speculation(meta | {"completion_tokens": 9}) == {
        "accept_token_num": 5,
        "draft_token_num": 8,
        "verify_ct": 3,
        "completion_token_num": 9,
    }
    assert speculation({"completion_tokens": 9, "spec_verify_ct": None}) == {}
