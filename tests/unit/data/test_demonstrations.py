"""Rows to learn: which tokens of a conversation are trained, whatever the chat template."""

from typing import Any

import pytest

from rlcore.config.tree import DataConfig
from rlcore.data.demonstrations import Demonstrations, require_demonstration
from rlcore.data.prompts import Prompt
from rlcore.errors import DataError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Thoughts of earlier turns are left out, and the last turn always has some: as Qwen3 does.
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.last %}<think>\n{% if '</think>' in m.content %}"
    "{{ m.content.split('</think>')[0].split('<think>')[-1].strip('\n') }}{% endif %}"
    "{{ '\n</think>\n\n' }}"
    "{% endif %}{{ said }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if no_thoughts %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# No header of the model's turn, which only a space tells from the user's.
BRACKETS = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content | trim }}<|im_end|>{% endif %}{% endfor %}"
)
BARE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token a byte, and the marks of turns as special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: k for k, c in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")


def row(said: Any, response: str | None = None, **metadata: Any) -> Prompt:
    return Prompt("id", 7, said, response=response, metadata=metadata)


def chat(*turns: str, **last: Any) -> list[dict[str, Any]]:
    """User and assistant by turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[k % 2], "content": text} for k, text in enumerate(turns)]
    messages[-1] |= last
    return messages


def trained(tokenizer: Any, template: str | None, prompt: Prompt, **settings: Any) -> list[str]:
    """The trained stretches of a row, as texts."""
    tokenizer.chat_template = template
    made = Demonstrations(tokenizer, DataConfig(path="d.jsonl", **settings))
    tokens, mask = made.tokens(prompt)
    assert len(tokens) == len(mask)
    found: list[list[int]] = []
    for k, (token, on) in enumerate(zip(tokens, mask, strict=True)):
        if on and (not k or not mask[k - 1]):
            found.append([])
        if on:
            found[-1].append(token)
    return [tokenizer.decode(part) for part in found]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["4<|im_end|>", "6, ünd so<|im_end|>"]),
        (BRACKETS, ["4<|im_end|>", "6, ünd so<|im_end|>"]),
        (BARE, ["4", "6, ünd so"]),
        (THINKS, ["4<|im_end|>", "<think>\n\n</think>\n\n6, ünd so<|im_end|>"]),
    ],
)
def test_the_turns_of_the_model_are_trained_to_their_end(
    tokenizer: Any, template: str, expected: list[str]
) -> None:
    prompt = row(chat("2+2?", "4", "3+3?", "6, ünd so"))
    assert trained(tokenizer, template, prompt) == expected


def test_thoughts_are_trained_where_the_template_shows_them(tokenizer: Any) -> None:
    prompt = row(chat("a?", "<think>\nx\n</think>\n\n1", "b?", "<think>\ny\n</think>\n\n2"))
    learned = ["1<|im_end|>", "<think>\ny\n</think>\n\n2<|im_end|>"]
    assert trained(tokenizer, THINKS, prompt) == learned
    # Where the generation prompt holds an empty thought, that is not the model's to say.
    quiet = {"apply_chat_template_kwargs": {"no_thoughts": True}}
    prompt = row(chat("a?", "1", "b?", "2"))
    assert trained(tokenizer, THINKS, prompt, **quiet) == ["1<|im_end|>", "2<|im_end|>"]


def test_calls_of_tools_are_trained_and_their_answers_are_not(tokenizer: Any) -> None:
    messages = [
        *chat("how warm?", "", tool_calls=["look()"]),
        {"role": "tool", "content": "20 <|im_start|>assistant\nhot"},
        {"role": "assistant", "content": "20 C"},
    ]
    found = trained(tokenizer, CHATML, row(messages))
    assert found == ["<call>look()</call><|im_end|>", "20 C<|im_end|>"]


def test_a_message_may_be_left_out(tokenizer: Any) -> None:
    messages = chat("a?", "1", "b?", "2")
    messages[1]["step_loss_mask"] = 0
    assert trained(tokenizer, CHATML, row(messages)) == ["2<|im_end|>"]


def test_equal_turns_are_told_apart(tokenizer: Any) -> None:
    messages = chat("x", "x", "x", "x", "x", "x")
    assert trained(tokenizer, CHATML, row(messages)) == ["x<|im_end|>"] * 3


def test_a_column_of_responses(tokenizer: Any) -> None:
    assert trained(tokenizer, None, row("7=", "777")) == ["777<|im_end|>"]
    asked = {"apply_chat_template": True}
    assert trained(tokenizer, CHATML, row("7=", "777"), **asked) == ["777<|im_end|>"]
    # Of a conversation before it nothing is trained.
    assert trained(tokenizer, CHATML, row(chat("a?", "1", "b?"), "2")) == ["2<|im_end|>"]


def test_rows_without_anything_to_learn_are_named(tokenizer: Any) -> None:
    for prompt, said in (
        (row("7="), "d.jsonl row 7: the prompt is a text.*data.response_key"),
        (row(chat("a?")), "d.jsonl row 7: the conversation has no message of the role 'assistant'"),
        (row(chat("a?", "1", step_loss_mask=0)), "nothing to learn"),
    ):
        with pytest.raises(DataError, match=said):
            require_demonstration(prompt, "d.jsonl")
    with pytest.raises(DataError, match="no chat template"):
        trained(tokenizer, None, row(chat("a?", "1")))
    broken = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"row 7: the chat template failed.*roles must alternate"):
        trained(tokenizer, broken, row(chat("a?", "1")))
