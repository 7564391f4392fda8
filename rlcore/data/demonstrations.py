"""Rows to learn as they are: conversations, or prompts with responses, as tokens with a mask.

A conversation is turned into text once, as a whole, by the tokenizer's chat template, and the text
into tokens once. Trained is what the model itself would have to say: of each message of the role
`assistant` all that follows the template's generation prompt, thoughts and calls of tools included,
up to and with the end of the turn. What other roles say is not, nor is a message with
`"step_loss_mask": 0`.

Where a message's text lies is found by rendering the conversation again with that message's content
replaced: what both renderings begin and end with is not its content. So no template has to be
known, and one that shows a message in another way when others follow it (thoughts that are left out
of earlier turns) is taken as it is.

Invariants:
- A token is trained if its text begins within a trained stretch.
- A text with a response in a column of its own, no chat template applied, is the two, each
  tokenised for itself as in a rollout, and the end-of-sequence token; the prompt is not trained.
"""

from collections.abc import Callable, Sequence
from typing import Any

from rlcore.config.tree import DataConfig
from rlcore.data.prompts import Messages, Prompt, rendered
from rlcore.errors import DataError

MARK = "\ue000"
"""A character that nobody's text begins or ends with."""
ASSISTANT = "assistant"
STEP_MASK = "step_loss_mask"
Render = Callable[..., str]
Stretch = tuple[int, int]
Masked = tuple[list[int], list[int]]
"""Token ids, and a mask of as many: 1 where the token is trained."""


def require_demonstration(prompt: Prompt, path: str) -> None:
    """A row has something to learn.

    Raises:
        DataError: it has not; names file and row.
    """
    place = f"{path} row {prompt.row}"
    if prompt.has_images:
        raise DataError(f"{place}: run.mode = 'sft' learns from text alone, but the row has images")
    if prompt.response is not None:
        return
    if isinstance(prompt.prompt, str):
        raise DataError(
            f"{place}: the prompt is a text, and run.mode = 'sft' has no response to learn; name "
            "its column in data.response_key, or give a list of chat messages"
        )
    if not any(_is_learned(message) for message in prompt.prompt):
        raise DataError(
            f"{place}: the conversation has no message of the role {ASSISTANT!r} that is trained "
            "on, so there is nothing to learn from it"
        )


class Demonstrations:
    """Makes tokens and masks of rows.

    Args:
        tokenizer: of the model.
        config: the data section.
    """

    def __init__(self, tokenizer: Any, config: DataConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._marks: tuple[str, str] | None = None

    def tokens(self, prompt: Prompt) -> Masked:
        """A row's tokens and which of them are trained.

        Raises:
            DataError: the row has nothing to learn, or the template failed; names file and row.
        """
        require_demonstration(prompt, self._config.path)
        messages = self._messages(prompt)
        if messages is None:
            return self._plain(str(prompt.prompt), prompt.response or "")
        render = self._renderer(prompt)
        text = render(messages)
        header, end = self._turn_marks(render)
        learned = [k for k, message in enumerate(messages) if _is_learned(message)]
        stretches = [stretch(messages, k, text, render, header, end) for k in learned]
        return self._encoded(text, stretches)

    def _messages(self, prompt: Prompt) -> Messages | None:
        """The conversation; None where the row is plain text."""
        said, response = prompt.prompt, prompt.response
        if isinstance(said, str):
            if not self._config.apply_chat_template:
                return None
            said = [{"role": "user", "content": said}]
        if response is None:
            return said
        # The column's response is what is learned, and no earlier turn.
        before = [message | {STEP_MASK: 0} for message in said]
        return [*before, {"role": ASSISTANT, "content": response}]

    def _plain(self, prompt: str, response: str) -> Masked:
        both = self._tokenizer([prompt, response], add_special_tokens=False)["input_ids"]
        asked, said = (list(ids) for ids in both)
        end = self._tokenizer.eos_token_id
        said += [] if end is None else [end]
        return asked + said, [0] * len(asked) + [1] * len(said)

    def _encoded(self, text: str, stretches: Sequence[Stretch]) -> Masked:
        if not getattr(self._tokenizer, "is_fast", False):
            raise DataError(
                "run.mode = 'sft' finds the trained tokens of a conversation by their places in "
                "its text, which this tokenizer does not tell; use one with a tokenizer.json"
            )
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        begins = [begin for begin, _ in found["offset_mapping"]]
        mask = [int(any(a <= begin < b for a, b in stretches)) for begin in begins]
        return list(found["input_ids"]), mask

    def _renderer(self, prompt: Prompt) -> Render:
        if not getattr(self._tokenizer, "chat_template", None):
            raise DataError(
                "the rows are conversations, but the tokenizer has no chat template; put one into "
                "its folder (chat_template.jinja), or give texts with data.response_key"
            )

        def render(messages: Messages, *, prompted: bool = False) -> str:
            said = [{k: v for k, v in m.items() if k != STEP_MASK} for m in messages]
            tokenizer, config, path = self._tokenizer, self._config, self._config.path
            return rendered(said, prompt, tokenizer, config, path, prompted=prompted)

        return render

    def _turn_marks(self, render: Render) -> tuple[str, str]:
        """What the template puts before a turn of the model, and what it ends one with."""
        if self._marks is None:
            asked = [{"role": "user", "content": "?"}]
            plain, prompted = render(asked), render(asked, prompted=True)
            header = prompted[len(plain) :] if prompted.startswith(plain) else ""
            answered = render([*asked, {"role": ASSISTANT, "content": MARK}])
            self._marks = header, answered.rpartition(MARK)[2].strip()
        return self._marks


def stretch(
    messages: Messages, k: int, text: str, render: Render, header: str, end: str
) -> Stretch:
    """Where message k stands in the conversation's text, for whoever learns to say it.

    Args:
        messages: the conversation.
        k: the message.
        text: of the conversation.
        render: makes texts of conversations.
        header: what the template puts before a turn of the model.
        end: what it ends one with.
    """
    other = render([*messages[:k], messages[k] | {"content": MARK}, *messages[k + 1 :]])
    begin = _alike(text, other)
    behind = _alike(text[begin:][::-1], other[begin:][::-1])
    stop = len(text) - behind
    # The model also says what the template shows between its generation prompt and the content.
    at = text.rfind(header, 0, begin) if header else -1
    if at >= 0 and not (end and end in text[at:begin]):
        begin = at + len(header)
    closing = text.find(end, stop) if end else -1
    return begin, stop if closing < 0 else closing + len(end)


def _alike(a: str, b: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (one, other) in pairs if one != other), min(len(a), len(b)))


def _is_learned(message: dict[str, Any]) -> bool:
    return message["role"] == ASSISTANT and message.get(STEP_MASK, 1) != 0
