"""What all sections of the configuration are made of.

Invariant: a section is frozen, and strict about unknown keys and types.
"""

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

FilePath = Annotated[str, Field(json_schema_extra={"sluice_path": "file"})]
"""A path; may carry a row slice such as `train.jsonl@[0:100]`."""
FunctionPath = Annotated[str, Field(json_schema_extra={"sluice_path": "function"})]
"""`module:function`, `module.function` or `file.py:function`."""
PositiveInt = Annotated[int, Field(ge=1)]
StopText = Annotated[str, Field(min_length=1)]
"""A string that ends a response; an empty one would end each at once."""
Scalar = bool | int | float | str
MegatronTable = dict[str, Scalar | list[Scalar]]
"""Settings of megatron-core by name; a list where one takes several values."""
Url = Annotated[str, Field(json_schema_extra={"sluice_path": "url"})]
"""Address of a server. As of a path, its last name alone is part of a digest: a server may move."""


class Section(BaseModel):
    """Base of all sections: frozen, and strict about unknown keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        # Forms show the names that files, `--set` and error texts use.
        model_title_generator=lambda kind: kind.__name__.removesuffix("Config").lower(),
        field_title_generator=lambda name, _: name,
    )
    OPERATIONAL: ClassVar[frozenset[str]] = frozenset()
