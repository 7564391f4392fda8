"""What the fields of the configuration are: paths, sections, lists of sections."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlcore.config.tree import Section


def path_kind(field: FieldInfo) -> str | None:
    """`file` or `function` where a field holds a path; else None."""
    for info in (
        field,
        *(m for arg in get_args(field.annotation) for m in getattr(arg, "__metadata__", ())),
    ):
        extra = getattr(info, "json_schema_extra", None)
        if isinstance(extra, dict) and "sluice_path" in extra:
            return str(extra["sluice_path"])
    return None


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a field holds, or a list of which it holds."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


class PathValue(NamedTuple):
    """A path in a configuration."""

    name: str
    """Dotted, as in `eval.datasets.0.path`."""
    kind: str
    """`file` or `function`."""
    value: str


def path_values(
    tree: Mapping[str, Any], section: type[BaseModel], prefix: str = ""
) -> Iterator[PathValue]:
    """All paths that a tree of plain values holds, those that are empty left out."""
    for name, field in section.model_fields.items():
        value, inner, where = tree.get(name), section_of(field), f"{prefix}{name}"
        if (kind := path_kind(field)) and isinstance(value, str) and value:
            yield PathValue(where, kind, value)
        elif kind and isinstance(value, list):
            yield from (PathValue(f"{where}.{k}", kind, item) for k, item in enumerate(value))
        elif inner and isinstance(value, Mapping):
            yield from path_values(value, inner, f"{where}.")
        elif inner and isinstance(value, list):
            for k, item in enumerate(value):
                yield from path_values(item, inner, f"{where}.{k}.")
