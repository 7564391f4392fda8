"""A data set of prompts: one file or several, read once to see that every row can be used.

Invariants:
- A row that cannot be used is an error naming file and line; with `data.skip_bad_rows` it is
  skipped and counted. Rows over `data.max_prompt_len` are counted too. Nothing else is left out.
- The prompts keep the order of their file; those of several files follow each other.
- A JSONL file over `IN_MEMORY` bytes is not held in memory: where its rows begin is, and a row is
  read when it is used. What comes out is the same.
"""

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from rlcore.config.tree import DataConfig
from rlcore.data.index import LinePrompts
from rlcore.data.order import Order
from rlcore.data.prompts import (
    GetImages,
    Prompt,
    apply_template,
    encode_prompts,
    no_images,
    prompt_of,
    require_text,
)
from rlcore.data.rows import LINES, Row, read_rows, split_slice
from rlcore.errors import DataError
from rlcore.sample import Sample

IN_MEMORY = 64 * 2**20
"""Bytes up to which the prompts of a JSONL file are kept in memory."""
AT_A_TIME = 512
"""Prompts that are given to the tokenizer together."""
OPTIONAL = (
    "metadata_key",
    "multimodal_keys",
    "sampling_params_key",
    "generate_function_key",
    "custom_rm_key",
)
"""Settings of columns that a row may lack."""
GetTokenizer = Callable[[], Any]
"""Returns a Hugging Face tokenizer; called only where one is needed, since loading takes
seconds."""


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
    """The prompts of a file, or of several that are mixed.

    Attributes:
        path: as it was given, with its slice; of several, the first.
        prompts: in file order.
        skipped: rows left out because they cannot be read.
        too_long: prompts left out because they exceed `max_prompt_len`.
        columns: names, in the order they first appear.
        sizes: prompts of each file.
        weights: of each file.
        get_images: gives the model's image processor.
    """

    path: str
    prompts: Sequence[Prompt]
    skipped: int = 0
    too_long: int = 0
    columns: list[str] = field(default_factory=list)
    sizes: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    get_images: GetImages = no_images

    def __len__(self) -> int:
        return len(self.prompts)

    def order(self, seed: int, shuffle: bool) -> Order:
        """In which order its prompts are used."""
        return Order(self.sizes or (len(self),), self.weights or (1.0,), seed, shuffle)

    def tokenized(self, positions: Sequence[int], tokenizer: Any) -> list[Prompt]:
        """The prompts at these positions, each with its token ids and the bytes of its images.

        Raises:
            DataError: a prompt is a list of messages, has no tokens, or an image is broken.
        """
        picked = [self.prompts[position] for position in positions]
        untold = [p for p in picked if p.tokens is None]
        encode_prompts(untold, tokenizer, self.path, self.get_images)
        return [prompt.loaded() for prompt in picked]


def check_dataset(
    config: DataConfig,
    *,
    needs_text: bool = False,
    evaluation: bool = False,
    look: Callable[[Prompt, str], None] | None = None,
) -> DatasetInfo:
    """Read all rows without a tokenizer, to find what is wrong before anything starts.

    Args:
        config: the data section.
        needs_text: also refuse chat messages that no template turns into text.
        evaluation: as of `load_dataset`.
        look: is given each prompt and its file, to raise where it is of no use.

    Raises:
        DataError: as `load_dataset`.
    """
    infos = []
    for one in config.files():
        reader, first, count = _Reader(one, evaluation), None, 0
        for _, prompt in reader.prompts():
            if needs_text and not one.apply_chat_template:
                require_text([prompt], one.path)
            if look is not None:
                look(prompt, one.path)
            first = first or prompt
            count += 1
        reader.require(count)
        assert first is not None
        infos.append(DatasetInfo(count, reader.skipped, list(reader.columns), first.sample()))
    return DatasetInfo(
        sum(info.rows for info in infos),
        sum(info.skipped for info in infos),
        list(dict.fromkeys(name for info in infos for name in info.columns)),
        infos[0].first,
    )


def require_columns(config: DataConfig, found: Sequence[str], names: Sequence[str]) -> None:
    """Columns that rows may lack are in one of them at least, or the setting is a slip.

    Args:
        config: the data section.
        found: the columns of all rows of all files.
        names: of the settings to look at, of `OPTIONAL`.

    Raises:
        DataError: names the setting, and the nearest column that there is.
    """
    for one, name in product(config.files(), names):
        value = getattr(one, name)
        if value is None or value == DataConfig.model_fields[name].default:
            continue
        for part, key in value.items() if isinstance(value, dict) else [("", value)]:
            if key in found:
                continue
            near = difflib.get_close_matches(key, found, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            setting = f"data.{name}.{part}" if part else f"data.{name}"
            raise DataError(
                f"no row of {one.path} has a column {key!r} ({setting}); there are "
                f"{', '.join(map(repr, found))}{hint}"
            )


def first_rows(config: DataConfig, n: int) -> list[Prompt]:
    """The first `n` usable prompts, no chat template applied, for trials before a run."""
    found: list[Prompt] = []
    for _, prompt in _Reader(config, False).prompts():
        found.append(prompt)
        if len(found) == n:
            break
    return found


def load_dataset(
    config: DataConfig,
    get_tokenizer: GetTokenizer,
    *,
    evaluation: bool = False,
    get_images: GetImages = no_images,
) -> Dataset:
    """Read a data set, apply the chat template and leave out prompts that are too long.

    Args:
        config: the data section.
        get_tokenizer: gives the model's.
        evaluation: the prompts are for an evaluation.
        get_images: gives the model's image processor.

    Raises:
        DataError: a file is missing, a row is broken or lacks a column, or no prompt is left.
    """
    readers = [_Reader(one, evaluation, get_images) for one in config.files()]
    files = [_load(reader, get_tokenizer) for reader in readers]
    if len(files) == 1:
        return files[0]
    return Dataset(
        files[0].path,
        Joined([one.prompts for one in files]),
        sum(one.skipped for one in files),
        sum(one.too_long for one in files),
        list(dict.fromkeys(name for one in files for name in one.columns)),
        tuple(len(one) for one in files),
        (config.weight, *(one.weight for one in config.mix)),
        get_images,
    )


class Joined(Sequence[Prompt]):
    """Prompts of several files, one file after another."""

    def __init__(self, parts: Sequence[Sequence[Prompt]]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __getitem__(self, position: Any) -> Any:
        for part in self._parts:
            if position < len(part):
                return part[position]
            position -= len(part)
        raise IndexError(position)


def _load(reader: "_Reader", get_tokenizer: GetTokenizer) -> Dataset:
    config = reader.config
    path = split_slice(config.path)[0]
    is_large = path.suffix in LINES and path.is_file() and path.stat().st_size > IN_MEMORY
    if is_large:
        lines = LinePrompts(path, reader.at_use(get_tokenizer))
        for row, _ in reader.short(get_tokenizer, template=config.max_prompt_len is not None):
            lines.add(row)
        if len(lines) and config.apply_chat_template:
            lines[0]
        prompts: Sequence[Prompt] = lines
    else:
        prompts = [prompt for _, prompt in reader.short(get_tokenizer, template=True)]
    reader.require(len(prompts))
    return Dataset(
        config.path,
        prompts,
        reader.skipped,
        reader.too_long,
        list(reader.columns),
        get_images=reader.get_images,
    )


class _Reader:
    """Reads one file once and counts what it leaves out."""

    def __init__(
        self, config: DataConfig, evaluation: bool, get_images: GetImages = no_images
    ) -> None:
        self.columns: dict[str, None] = {}
        self.skipped = self.too_long = 0
        self.config = config
        self.get_images = get_images
        self._name = split_slice(config.path)[0].name
        self._evaluation = evaluation
        self._first_error = ""
        self._shortest: int | None = None

    def prompts(self) -> Iterator[tuple[Row, Prompt]]:
        """All rows that can be used, no chat template applied."""
        for row in read_rows(self.config.path):
            self.columns.update(dict.fromkeys(row.values))
            try:
                yield row, self._prompt(row)
            except DataError as error:
                if not self.config.skip_bad_rows:
                    raise
                self.skipped += 1
                self._first_error = self._first_error or str(error)

    def short(self, get_tokenizer: GetTokenizer, *, template: bool) -> Iterator[tuple[Row, Prompt]]:
        """`prompts`, with the chat template applied if asked, less those that are too long."""
        waiting: list[tuple[Row, Prompt]] = []
        for pair in self.prompts():
            waiting.append(pair)
            if len(waiting) == AT_A_TIME:
                yield from self._fit(waiting, get_tokenizer, template)
                waiting = []
        yield from self._fit(waiting, get_tokenizer, template)

    def at_use(self, get_tokenizer: GetTokenizer) -> Callable[[Row], Prompt]:
        """What makes a prompt of a row that was read before."""

        def make(row: Row) -> Prompt:
            prompt = self._prompt(row)
            if self.config.apply_chat_template:
                apply_template([prompt], self.config.path, self.config, get_tokenizer())
            return prompt

        return make

    def require(self, count: int) -> None:
        """See that something is left.

        Raises:
            DataError: nothing is; says why.
        """
        path, skipped = self.config.path, self.skipped
        if count:
            return
        if self.too_long:
            raise DataError(
                f"{path}: all {self.too_long} prompts have more than data.max_prompt_len = "
                f"{self.config.max_prompt_len} tokens (the shortest has {self._shortest})"
            )
        why = f": all {skipped} are bad, the first because {self._first_error}" if skipped else ""
        raise DataError(f"data set {path} has no rows that can be used{why}")

    def _prompt(self, row: Row) -> Prompt:
        return prompt_of(row, self._name, self.config, evaluation=self._evaluation)

    def _fit(
        self, pairs: list[tuple[Row, Prompt]], get_tokenizer: GetTokenizer, template: bool
    ) -> Iterator[tuple[Row, Prompt]]:
        config, longest = self.config, self.config.max_prompt_len
        prompts = [prompt for _, prompt in pairs]
        if prompts and template and config.apply_chat_template:
            apply_template(prompts, config.path, config, get_tokenizer())
        if longest is None:
            yield from pairs
            return
        if prompts:
            encode_prompts(prompts, get_tokenizer(), config.path, self.get_images)
        for row, prompt in pairs:
            length = len(prompt.tokens or ())
            if length <= longest:
                yield row, prompt
                continue
            self.too_long += 1
            self._shortest = min(length, self._shortest or length)
