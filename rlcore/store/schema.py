"""The Arrow schemas of what stages write: samples, scores, selections.

Invariants:
- Each schema carries its name and version, each field its unit. A reader refuses a version that it
  does not know.
- Columns are plain types that pyarrow, pandas and duckdb read without this package. What has no
  fixed type (labels, metadata, message lists) is JSON text, marked `encoding: json`.
- One row a sample, the samples of a group adjacent. `row` is the position in the rollout batch,
  from 0, over its parts in order; scores and selections refer to samples by it.

To change a schema: raise its version, and keep reading the old one where runs of it exist.
"""

import pyarrow as pa

from rlcore.errors import StoreError

NAME_KEY, VERSION_KEY = b"sluice.schema", b"sluice.version"


def _field(name: str, kind: pa.DataType, unit: str, nullable: bool = True, **more: str) -> pa.Field:
    return pa.field(name, kind, nullable=nullable, metadata={"unit": unit, **more})


def _json(name: str, unit: str) -> pa.Field:
    return _field(name, pa.string(), unit, encoding="json")


def _many(kind: pa.DataType) -> pa.ListType:
    return pa.list_(pa.field("element", kind, nullable=False))


def _schema(name: str, version: int, fields: list[pa.Field]) -> pa.Schema:
    return pa.schema(fields, metadata={NAME_KEY: name.encode(), VERSION_KEY: str(version).encode()})


SAMPLES = _schema(
    "samples",
    2,
    [
        _field("prompt_id", pa.string(), "digest of file, row and content of the prompt", False),
        _field("group_index", pa.int64(), "position of the prompt in the rollout batch"),
        _field("index", pa.int64(), "position of the sample in the rollout batch"),
        _field("rollout_id", pa.int64(), "execution; samples cut from one share it"),
        _field("prompt", pa.string(), "text; null where prompt_messages is set"),
        _json("prompt_messages", "chat messages; null where prompt is set"),
        _json("label", "what the verifier compares with"),
        _field("response", pa.string(), "text", False),
        _field("response_length", pa.int32(), "tokens", False),
        _field("tokens", _many(pa.int32()), "token id; prompt, then response", False),
        _field("loss_mask", _many(pa.int8()), "1: trained on; per response token"),
        _field("rollout_log_probs", _many(pa.float32()), "nat; per response token, of the engine"),
        _field("weight_versions", _many(pa.string()), "policy version of each engine call", False),
        _field("status", pa.string(), "pending|completed|truncated|aborted|failed", False),
        _field("reward", pa.float64(), "reward; null where none or a dict"),
        _json("reward_dict", "reward with several components; null where none or a number"),
        _field("remove_sample", pa.bool_(), "true: not trained on", False),
        _field("seed", pa.int64(), "sampling seed"),
        _json("metadata", "of the prompt"),
        _json("train_metadata", "for the trainer"),
        _field("session_id", pa.string(), "routing key"),
        _field("generate_function_path", pa.string(), "function that generated"),
        _field("custom_rm_path", pa.string(), "function that scores"),
        _json("apply_chat_template_kwargs", "arguments of the chat template"),
        _json("multimodal_inputs", "images (the bytes of their files) and the like"),
        _json(
            "multimodal_train_inputs", "what a function of one's own made of them for the trainer"
        ),
        _json("multimodal_train_input_id", "which of them it has"),
        _field("routed_experts", _many(pa.int32()), "expert id; row-major in its shape"),
        _field("routed_experts_shape", _many(pa.int32()), "tokens - 1, layers, top-k"),
        _field("rollout_top_p_token_ids", _many(pa.int32()), "token id; kept by top-p, joined"),
        _field("rollout_top_p_token_offsets", _many(pa.int32()), "start of each token's ids"),
        _field("teacher_log_probs", _many(pa.float32()), "nat; per response token, of the teacher"),
        _json("spec_info", "speculative decoding, in tokens"),
        _json("prefix_cache_info", "prefix cache, in tokens"),
        _field("non_generation_time", pa.float64(), "s; outside the engine", False),
    ],
)

SCORES = _schema(
    "scores",
    1,
    [
        _field("row", pa.int64(), "row in the rollout batch", False),
        _field("prompt_id", pa.string(), "digest of file, row and content of the prompt", False),
        _field("group_index", pa.int64(), "position of the prompt in the rollout batch"),
        _field("index", pa.int64(), "position of the sample in the rollout batch"),
        _field("reward", pa.float64(), "reward; null where scoring failed"),
        _field("status", pa.string(), "completed|truncated|aborted|failed, after scoring", False),
        _json("details", "what else the scorer said"),
        _field("error", pa.string(), "why there is no reward"),
    ],
)

SELECTION = _schema(
    "selection",
    1,
    [
        _field("row", pa.int64(), "row in the rollout batch", False),
        _field("group_index", pa.int64(), "position of the prompt in the rollout batch"),
        _field("index", pa.int64(), "position of the sample in the rollout batch"),
        _field("reward", pa.float64(), "reward that training uses"),
        _field("keep", pa.bool_(), "true: trained on", False),
        _field("reason", pa.string(), "why it is not kept"),
    ],
)

KNOWN = {"samples": SAMPLES, "scores": SCORES, "selection": SELECTION}
OLDER = {"samples": (b"1",)}
"""Older versions that are read: columns that they lack are null."""
LATER = frozenset({"multimodal_train_input_id"})
"""Columns that older versions lack."""


def check_schema(schema: pa.Schema, where: str) -> None:
    """Refuse a table that is none of ours, or of a version that is not known.

    Raises:
        StoreError: naming what was expected and what was found.
    """
    metadata = schema.metadata or {}
    name = metadata.get(NAME_KEY, b"").decode()
    if name not in KNOWN:
        raise StoreError(
            f"{where} holds schema {name or 'none'!r}, expected one of {', '.join(KNOWN)}; build "
            "the table with rlcore.store.batch"
        )
    found, expected = metadata.get(VERSION_KEY), KNOWN[name].metadata[VERSION_KEY]
    if found != expected and found not in OLDER.get(name, ()):
        raise StoreError(
            f"{where} holds schema {name} version {(found or b'none').decode()}, expected "
            f"{expected.decode()}; read it with the version of Sluice that wrote it"
        )
