"""From a row of a file to a prompt: its columns checked, its template applied, its ids computed.

Invariant: `prompt_id` is a digest of the file's name, the row's number and its content: rows of
equal content are still two prompts, and a prompt keeps its id on every machine.
"""

import difflib
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlcore.config.tree import DataConfig
from rlcore.data.rows import Row, split_slice
from rlcore.errors import DataError
from rlcore.images.files import KIND as IMAGE
from rlcore.images.files import check_image, images_of, read_image
from rlcore.images.layout import places
from rlcore.images.processor import ImageProcessor
from rlcore.rollout.limits import ROW_PARAMS_KEY, check_row_params
from rlcore.sample import Sample

Messages = list[dict[str, Any]]
GetImages = Callable[[], ImageProcessor]
"""Gives the model's image processor; called only where a prompt has images."""
# json.dumps would make one for each row.
_ENCODER = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)


@dataclass(slots=True)
class Prompt:
    """One prompt of the data set.

    Attributes:
        prompt_id: 16 hex digits.
        row: number of the row in its file.
        prompt: text, or chat messages where no chat template is applied.
        label: the right answer, as the file has it.
        response: what is to be learned as the answer, where the rows have a column of it.
        metadata: more for the reward function; "tools" holds the tool descriptions.
        tokens: ids of the prompt, once they were needed.
        media: kind -> items, as the file has them; images as `loaded` makes them.
        folder: that paths of images begin at.
        generate_function_path, custom_rm_path: functions that the row names for itself.
    """

    prompt_id: str
    row: int
    prompt: str | Messages
    label: Any = None
    response: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    tokens: list[int] | None = None
    media: dict[str, list[Any]] | None = None
    folder: Path | None = None
    generate_function_path: str | None = None
    custom_rm_path: str | None = None

    @property
    def has_images(self) -> bool:
        """Whether it is to be given with images."""
        return bool((self.media or {}).get(IMAGE))

    def loaded(self) -> "Prompt":
        """The prompt with the bytes of its images; itself, where it has none.

        Raises:
            DataError: there is no such image, or it is broken.
        """
        if self.media is None or not self.has_images:
            return self
        items = [read_image(item, self.folder) for item in self.media[IMAGE]]
        return replace(self, media=self.media | {IMAGE: items})

    def sample(self) -> Sample:
        """A new sample of this prompt, nothing generated yet."""
        prompt = self.prompt if isinstance(self.prompt, str) else [dict(m) for m in self.prompt]
        return Sample(
            prompt_id=self.prompt_id,
            prompt=prompt,
            label=self.label,
            metadata=dict(self.metadata),
            tokens=list(self.tokens or ()),
            multimodal_inputs=None if self.media is None else dict(self.media),
            generate_function_path=self.generate_function_path,
            custom_rm_path=self.custom_rm_path,
        )


def prompt_of(row: Row, name: str, config: DataConfig, *, evaluation: bool = False) -> Prompt:
    """A row as a prompt, no chat template applied.

    Args:
        row: of the file.
        name: of the file.
        config: the data section.
        evaluation: the prompt is for an evaluation, where more sampling parameters are a row's own.

    Raises:
        DataError: the row cannot be used; names file and row.
    """
    if row.error is not None:
        raise DataError(f"{row.place} {row.error}")
    metadata = _metadata(row, config.metadata_key)
    if config.tool_key is not None:
        metadata["tools"] = _tools(row, config.tool_key)
    if config.sampling_params_key is not None:
        key = config.sampling_params_key
        own = _decoded(row, key, row.values.get(key))
        if own is not None:
            # Parquet gives every row all keys that any has.
            own = {k: v for k, v in own.items() if v is not None} if isinstance(own, dict) else own
            check_row_params(own, f"{row.place}: {key!r}", evaluation=evaluation)
            metadata[ROW_PARAMS_KEY] = own
    media = _media(row, config.multimodal_keys)
    prompt = _prompt_value(row, config)
    folder = _folder(config.path) if media else None
    _check_images(row, media, folder)
    return Prompt(
        prompt_id=_identity(name, row),
        row=row.number,
        prompt=with_media(prompt, media or {}, tuple(config.multimodal_keys), row.place),
        label=None
        if config.label_key is None
        else _column(row, config.label_key, "data.label_key"),
        response=None if config.response_key is None else _response(row, config.response_key),
        metadata=metadata,
        media=media,
        folder=folder,
        generate_function_path=_name(row, config.generate_function_key),
        custom_rm_path=_name(row, config.custom_rm_key),
    )


def _identity(name: str, row: Row) -> str:
    content = _ENCODER.encode(row.values)
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


def _response(row: Row, key: str) -> str:
    value = _column(row, key, "data.response_key")
    if isinstance(value, str) and value:
        return value
    raise DataError(f"{row.place}: {key!r} must be a text and not empty; it is {value!r:.80}")


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


def _name(row: Row, key: str | None) -> str | None:
    value = None if key is None else row.values.get(key)
    if value is not None and not (isinstance(value, str) and value):
        raise DataError(f"{row.place}: {key!r} must name a function; it is {value!r:.80}")
    return value


def _media(row: Row, keys: dict[str, str]) -> dict[str, list[Any]] | None:
    """The media of a row: kind -> items, in their order; None where it has none."""
    found: dict[str, list[Any]] = {}
    for kind, key in keys.items():
        value = row.values.get(key)
        if value is not None:
            found[kind] = list(value) if isinstance(value, list | tuple) else [value]
    return found or None


def _folder(path: str) -> Path:
    """Where relative paths of a data file's rows begin."""
    file = split_slice(path)[0]
    return file if file.is_dir() else file.parent


def _check_images(row: Row, media: dict[str, list[Any]] | None, folder: Path | None) -> None:
    for k, item in enumerate((media or {}).get(IMAGE, []), 1):
        try:
            check_image(read_image(item, folder))
        except DataError as error:
            raise DataError(f"{row.place}, image {k}: {error}") from None


def with_media(
    prompt: str | Messages, media: dict[str, list[Any]], kinds: Sequence[str], place: str
) -> str | Messages:
    """Chat messages in which every `<image>`, `<video>` or `<audio>` is the next item of its kind;
    the prompt as it is where it has none and no place for one.

    Args:
        prompt: of the row.
        media: items of the row by kind.
        kinds: that the data set has columns for.
        place: of the row, for errors.

    Raises:
        DataError: there are more or fewer items than places for them.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    left = {kind: list(media.get(kind, [])) for kind in kinds}
    pattern = re.compile("|".join(f"<{re.escape(kind)}>" for kind in kinds))
    texts = (message.get("content") for message in messages)
    placed = bool(kinds) and any(isinstance(t, str) and pattern.search(t) for t in texts)
    if not placed and not any(left.values()):
        return prompt
    out: Messages = []
    for message in messages:
        text = message.get("content")
        if not isinstance(text, str) or not pattern.search(text):
            out.append(message)
            continue
        parts: list[dict[str, Any]] = []
        end = 0
        for found in pattern.finditer(text):
            if text[end : found.start()]:
                parts.append({"type": "text", "text": text[end : found.start()]})
            kind, end = found[0][1:-1], found.end()
            if not left[kind]:
                raise DataError(f"{place} has more {found[0]} than items of that kind")
            item = left[kind].pop(0)
            part = isinstance(item, dict) and "bytes" not in item
            parts.append(item if part else {"type": kind, kind: item})
        if text[end:]:
            parts.append({"type": "text", "text": text[end:]})
        out.append(message | {"content": parts})
    for kind, items in left.items():
        if items:
            raise DataError(f"{place} has {len(items)} items of kind {kind!r} without a <{kind}>")
    return out


def apply_template(
    prompts: Sequence[Prompt], path: str, config: DataConfig, tokenizer: Any
) -> None:
    """Turn prompts into text by the tokenizer's chat template.

    Raises:
        DataError: there is no template, or it failed; names file and row.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            "data.apply_chat_template is set, but the tokenizer has no chat template; put one into "
            "its folder (chat_template.jinja) or leave data.apply_chat_template out"
        )
    for prompt in prompts:
        raw = prompt.prompt
        messages = [{"role": "user", "content": raw}] if isinstance(raw, str) else raw
        prompt.prompt = rendered(messages, prompt, tokenizer, config, path, prompted=True)


def rendered(
    messages: Messages,
    prompt: Prompt,
    tokenizer: Any,
    config: DataConfig,
    path: str,
    *,
    prompted: bool,
) -> str:
    """Messages by the tokenizer's chat template.

    Args:
        messages: what is said.
        prompt: the row that they are of, with its tools.
        tokenizer: has the template.
        config: the data section.
        path: of the file, for errors.
        prompted: whether the text ends where the model is to speak.

    Raises:
        DataError: the template fails.
    """
    try:
        text: str = tokenizer.apply_chat_template(
            messages,
            tools=prompt.metadata.get("tools") or None,
            tokenize=False,
            add_generation_prompt=prompted,
            **config.apply_chat_template_kwargs,
        )
    except Exception as error:
        # Templates are programs of their own and raise what they like.
        raise DataError(
            f"{path} row {prompt.row}: the chat template failed: {type(error).__name__}: {error}"
        ) from error
    return text


def no_images() -> ImageProcessor:
    """Stands where no model is known that images could be for."""
    raise DataError("the prompts have images, but there is no model to process them for")


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: Any, path: str, get_images: GetImages = no_images
) -> None:
    """Set `tokens` of prompts. No special tokens are added: a template brings its own.

    The placeholder of an image is repeated as often as the image has features.

    Raises:
        DataError: a prompt has no text or no tokens, or an image is broken or has no place.
    """
    require_text(prompts, path)
    if not prompts:
        return
    encoded = tokenizer([p.prompt for p in prompts], add_special_tokens=False)["input_ids"]
    for prompt, tokens in zip(prompts, encoded, strict=True):
        if not tokens:
            raise DataError(f"{path} row {prompt.row}: the prompt has no tokens: {prompt.prompt!r}")
        prompt.tokens = list(tokens)
        if prompt.has_images:
            prompt.tokens = _with_places(prompt, path, get_images(), tokenizer)


def _with_places(prompt: Prompt, path: str, images: ImageProcessor, tokenizer: Any) -> list[int]:
    ids = prompt.tokens or []
    try:
        items = images_of(prompt.loaded().media)
        made = images.expand(ids, items)
    except DataError as error:
        raise DataError(f"{path} row {prompt.row}: {error}") from None
    if places(ids, images.token) > len(items):
        raise _marked(prompt, path, tokenizer.decode([images.token]))
    return made


def refuse_mark(prompt: Prompt, path: str, mark: str) -> None:
    """Refuse a prompt with images whose own text has the model's mark of an image: the first image
    would go there.

    Raises:
        DataError: naming the row.
    """
    said = prompt.prompt
    texts = [said] if isinstance(said, str) else [m.get("content") for m in said]
    for text in texts if prompt.has_images else ():
        parts = text if isinstance(text, list) else [{"text": text}]
        found = (part.get("text") for part in parts if isinstance(part, dict))
        if any(isinstance(one, str) and mark in one for one in found):
            raise _marked(prompt, path, mark)


def _marked(prompt: Prompt, path: str, mark: str) -> DataError:
    return DataError(
        f"{path} row {prompt.row}: the text of the prompt has {mark!r}, by which the model knows "
        "an image, so that images would be mixed up; take it out of the row (the place of an image "
        "is <image>)"
    )


def require_text(prompts: Sequence[Prompt], path: str) -> None:
    """Refuse chat messages that no template has turned into text.

    Raises:
        DataError: naming the row.
    """
    for prompt in prompts:
        if not isinstance(prompt.prompt, str):
            raise DataError(
                f"{path} row {prompt.row}: the prompt is a list of chat messages; set "
                "data.apply_chat_template = true to turn it into text"
            )
