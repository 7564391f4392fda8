"""A data set of prompts: rows checked, turned into prompts, each with an id of its own.

Invariants:
- `prompt_id` is a digest of the file's name, the row's number and its content: rows of equal
  content are still two prompts, and a prompt keeps its id on every machine.
- A row that cannot be used is an error naming file and line; with `data.skip_bad_rows` it is
  skipped and counted. Rows over `data.max_prompt_len` are counted too. Nothing else is left out.
- The prompts keep the order of the file.
"""

import difflib
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlcore.config.tree import DataConfig
from rlcore.data.rows import Row, read_rows, split_slice
from rlcore.errors import DataError
from rlcore.sample import Sample

Messages = list[dict[str, Any]]
GetTokenizer = Callable[[], Any]
"""Returns a Hugging Face tokenizer; called only where one is needed, since loading takes
seconds."""


@dataclass(slots=True)
class Prompt:
    """One prompt of the data set.

    Attributes:
        prompt_id: 16 hex digits.
        row: number of the row in its file.
        prompt: text, or chat messages where no chat template is applied.
        label: the right answer, as the file has it.
        metadata: more for the reward function; "tools" holds the tool descriptions.
        tokens: ids of the prompt, once they were needed.
    """

    prompt_id: str
    row: int
    prompt: str | Messages
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    tokens: list[int] | None = None

    def sample(self) -> Sample:
        """A new sample of this prompt, nothing generated yet."""
        prompt = self.prompt if isinstance(self.prompt, str) else [dict(m) for m in self.prompt]
        return Sample(
            prompt_id=self.prompt_id,
            prompt=prompt,
            label=self.label,
            metadata=dict(self.metadata),
            tokens=list(self.tokens or ()),
        )


@dataclass(frozen=True)
class DatasetInfo:
    """What a check of a data set found.

    Attributes:
        rows: that can be used, before prompts over `max_prompt_len` are left out.
        skipped: rows that cannot be read.
        columns: names, in the order they first appear.
        first: a sample of the first prompt, nothing generated.
    """

    rows: int
    skipped: int
    columns: list[str]
    first: Sample


@dataclass(frozen=True)
class Dataset:
    """The prompts of a file.

    Attributes:
        path: as it was given, with its slice.
        prompts: in file order.
        skipped: rows left out because they cannot be read.
        too_long: prompts left out because they exceed `max_prompt_len`.
        columns: names, in the order they first appear.
    """

    path: str
    prompts: list[Prompt]
    skipped: int = 0
    too_long: int = 0
    columns: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.prompts)

    def tokenized(self, positions: Sequence[int], tokenizer: Any) -> list[Prompt]:
        """The prompts at these positions, each with its token ids.

        Raises:
            DataError: a prompt is a list of messages, or has no tokens.
        """
        picked = [self.prompts[position] for position in positions]
        encode_prompts([p for p in picked if p.tokens is None], tokenizer, self.path)
        return picked


def check_dataset(config: DataConfig, *, needs_text: bool = False) -> DatasetInfo:
    """Read all rows without a tokenizer, to find what is wrong before anything starts.

    Args:
        config: the data section.
        needs_text: also refuse chat messages that no template turns into text.

    Raises:
        DataError: as `load_dataset`.
    """
    dataset = _read(config)
    if needs_text and not config.apply_chat_template:
        _require_text(dataset.prompts, dataset.path)
    first = dataset.prompts[0].sample()
    return DatasetInfo(len(dataset), dataset.skipped, dataset.columns, first)


def first_rows(config: DataConfig, n: int) -> list[Prompt]:
    """The first `n` usable prompts, no chat template applied, for trials before a run."""
    name = split_slice(config.path)[0].name
    found: list[Prompt] = []
    for row in read_rows(config.path):
        try:
            found.append(_prompt(row, name, config))
        except DataError:
            if not config.skip_bad_rows:
                raise
        if len(found) == n:
            break
    return found


def load_dataset(config: DataConfig, get_tokenizer: GetTokenizer) -> Dataset:
    """Read a data set, apply the chat template and leave out prompts that are too long.

    Raises:
        DataError: the file is missing, a row is broken or lacks a column, or no prompt is left.
    """
    dataset = _read(config)
    if config.apply_chat_template:
        _apply_template(dataset, config, get_tokenizer())
    if config.max_prompt_len is None:
        return dataset
    encode_prompts(dataset.prompts, get_tokenizer(), dataset.path)
    kept = [p for p in dataset.prompts if len(p.tokens or ()) <= config.max_prompt_len]
    if not kept:
        shortest = min(len(p.tokens or ()) for p in dataset.prompts)
        raise DataError(
            f"{dataset.path}: all {len(dataset)} prompts have more than data.max_prompt_len = "
            f"{config.max_prompt_len} tokens (the shortest has {shortest})"
        )
    return Dataset(dataset.path, kept, dataset.skipped, len(dataset) - len(kept), dataset.columns)


def encode_prompts(prompts: list[Prompt], tokenizer: Any, path: str) -> None:
    """Set `tokens` of prompts. No special tokens are added: a template brings its own."""
    _require_text(prompts, path)
    if not prompts:
        return
    encoded = tokenizer([p.prompt for p in prompts], add_special_tokens=False)["input_ids"]
    for prompt, tokens in zip(prompts, encoded, strict=True):
        if not tokens:
            raise DataError(f"{path} row {prompt.row}: the prompt has no tokens: {prompt.prompt!r}")
        prompt.tokens = list(tokens)


def _require_text(prompts: list[Prompt], path: str) -> None:
    for prompt in prompts:
        if not isinstance(prompt.prompt, str):
            raise DataError(
                f"{path} row {prompt.row}: the prompt is a list of chat messages; set "
                "data.apply_chat_template = true to turn it into text"
            )


# --- rows to prompts ------------------------------------------------------------------------------


def _read(config: DataConfig) -> Dataset:
    name = split_slice(config.path)[0].name
    prompts: list[Prompt] = []
    columns: dict[str, None] = {}
    skipped, first_error = 0, ""
    for row in read_rows(config.path):
        columns.update(dict.fromkeys(row.values))
        try:
            prompts.append(_prompt(row, name, config))
        except DataError as error:
            if not config.skip_bad_rows:
                raise
            skipped += 1
            first_error = first_error or str(error)
    if not prompts:
        why = f": all {skipped} are bad, the first because {first_error}" if skipped else ""
        raise DataError(f"data set {config.path} has no rows that can be used{why}")
    return Dataset(config.path, prompts, skipped, 0, list(columns))


def _prompt(row: Row, name: str, config: DataConfig) -> Prompt:
    if row.error is not None:
        raise DataError(f"{row.place} {row.error}")
    metadata = _metadata(row, config.metadata_key)
    if config.tool_key is not None:
        metadata["tools"] = _tools(row, config.tool_key)
    return Prompt(
        prompt_id=_identity(name, row),
        row=row.number,
        prompt=_prompt_value(row, config),
        label=None
        if config.label_key is None
        else _column(row, config.label_key, "data.label_key"),
        metadata=metadata,
    )


def _identity(name: str, row: Row) -> str:
    content = json.dumps(
        row.values, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str
    )
    try:
        text = f"{name}\n{row.number}\n{content}".encode()
    except UnicodeEncodeError:
        raise DataError(f"{row.place} holds half of a surrogate pair, which is no text") from None
    return hashlib.sha256(text).hexdigest()[:16]


def _column(row: Row, key: str, setting: str) -> Any:
    if key in row.values:
        return row.values[key]
    names = list(row.values)
    near = difflib.get_close_matches(key, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise DataError(
        f"{row.place} has no column {key!r} ({setting}); it has {', '.join(map(repr, names))}{hint}"
    )


def _prompt_value(row: Row, config: DataConfig) -> str | Messages:
    value = _column(row, config.input_key, "data.input_key")
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        for message in value:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise DataError(
                    f"{row.place}: {config.input_key!r} is a list, but not of chat messages "
                    f'like {{"role": "user", "content": "..."}}: {message!r:.80}'
                )
        # Parquet gives every message all keys that any has; a template takes a null key for a
        # present one.
        return [{k: v for k, v in m.items() if v is not None or k == "content"} for m in value]
    raise DataError(
        f"{row.place}: {config.input_key!r} must be a text or a list of chat messages, and not "
        f"empty; it is {value!r:.80}"
    )


def _metadata(row: Row, key: str) -> dict[str, Any]:
    value = _decoded(row, key, row.values.get(key))
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DataError(f"{row.place}: {key!r} must be a JSON object; it is {value!r:.80}")
    return dict(value)


def _tools(row: Row, key: str) -> list[Any]:
    value = _decoded(row, key, _column(row, key, "data.tool_key"))
    if value is None:
        return []
    if not isinstance(value, list):
        raise DataError(f"{row.place}: {key!r} must be a list of tools; it is {value!r:.80}")
    return value


def _decoded(row: Row, key: str, value: Any) -> Any:
    """Nested values may come as JSON text, the usual way to keep them in Parquet."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise DataError(f"{row.place}: {key!r} is a text but not valid JSON: {error}") from None


def _apply_template(dataset: Dataset, config: DataConfig, tokenizer: Any) -> None:
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            "data.apply_chat_template is set, but the tokenizer has no chat template; put one into "
            "its folder (chat_template.jinja) or leave data.apply_chat_template out"
        )
    for prompt in dataset.prompts:
        raw = prompt.prompt
        messages = [{"role": "user", "content": raw}] if isinstance(raw, str) else raw
        try:
            prompt.prompt = tokenizer.apply_chat_template(
                messages,
                tools=prompt.metadata.get("tools") or None,
                tokenize=False,
                add_generation_prompt=True,
                **config.apply_chat_template_kwargs,
            )
        except Exception as error:
            # Templates are programs of their own and raise what they like.
            raise DataError(
                f"{dataset.path} row {prompt.row}: the chat template failed: "
                f"{type(error).__name__}: {error}"
            ) from error
