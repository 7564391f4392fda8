"""A generate function as slime's users write them: two turns, the second after a tool's answer."""

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout, "Partial rollout is not supported for this function."
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"

    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response, response_ids, loss_mask, log_probs = "", [], [], []
    for turn in range(args.max_turns):
        budget = args.rollout_max_response_len - len(response_ids)
        payload = {
            "input_ids": prompt_ids + response_ids,
            "sampling_params": {**sampling_params, "max_new_tokens": min(budget, 4)},
            "return_logprob": True,
        }
        output = await post(url, payload)
        finish = output["meta_info"]["finish_reason"]["type"]
        if finish == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        pairs = output["meta_info"]["output_token_logprobs"]
        response += output["text"]
        response_ids += [item[1] for item in pairs]
        log_probs += [item[0] for item in pairs]
        loss_mask += [1] * len(pairs)
        if turn + 1 < args.max_turns:
            tool = state.tokenizer("=", add_special_tokens=False)["input_ids"]
            response += "="
            response_ids += tool
            log_probs += [0.0] * len(tool)
            loss_mask += [0] * len(tool)

    sample.tokens = prompt_ids + response_ids
    sample.response_length = len(response_ids)
    sample.response = response
    sample.loss_mask = loss_mask
    sample.rollout_log_probs = log_probs
    match finish:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample


async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    right = sum(sample.response.count(c) for c in str(sample.label)[:1])
    return {"score": right / args.rollout_max_response_len, "turns": args.max_turns}
