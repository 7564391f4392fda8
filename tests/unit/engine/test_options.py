"""Arguments of SGLang's server against a source of the same make, and the installed one's."""

from pathlib import Path
from typing import Any

import pytest

from rlcore.engine.options import check_options, installed_source, read_options
from rlcore.errors import ConfigError

SOURCE = """
import heavy_library_that_is_not_there

BACKENDS = ["alpha", "beta"]


@dataclasses.dataclass
class ServerArgs:
    plain = 3
    page_size: A[Optional[int], Arg(help="h", aliases=["--page-sz"])] = None
    mem_fraction_static: A[Optional[float], "h"] = None
    disable_radix_cache: A[bool, "h"] = False
    attention_backend: A[Optional[str], Arg(help="h", choices=BACKENDS)] = None
    policy: A[Literal["lpm", "fcfs"], "h"] = "fcfs"
    graph_bs: A[Optional[List[int]], "h"] = None
    layout: A[Optional[int], Arg(help="h", type_parser=own)] = None
    renamed: A[int, Arg(help="h", cli_name="--new-name")] = 1
    hidden: A[bool, Arg(no_cli=True)] = False
    inner: int = 3

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--old-name", action=Deprecated)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "server_args.py"
    path.write_text(SOURCE)
    return path


def test_arguments_are_read_without_importing_anything(source: Path) -> None:
    assert set(read_options(source)) == {
        "page_size",
        "page_sz",
        "mem_fraction_static",
        "disable_radix_cache",
        "attention_backend",
        "policy",
        "graph_bs",
        "layout",
        "new_name",
        "old_name",
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("page_size", 16),
        ("page-sz", 16),
        ("mem_fraction_static", 1),
        ("disable_radix_cache", False),
        ("attention_backend", "beta"),
        ("policy", "lpm"),
        ("graph_bs", [1, 2]),
        ("graph_bs", 4),
        ("layout", "any text"),
        ("old_name", True),
    ],
)
def test_values_of_the_right_kind_pass(source: Path, name: str, value: Any) -> None:
    check_options({name: value}, source)


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("page_sise", 16, r"no such argument; did you mean sglang\.page_size\?"),
        ("renamed", 1, r"no such argument; did you mean sglang\.new_name\?"),
        ("hidden", True, "no such argument"),
        ("inner", 3, "no such argument"),
        ("page_size", 1.5, "takes whole numbers"),
        ("page_size", True, "takes a value"),
        ("page_size", [1], "takes one value"),
        ("mem_fraction_static", "half", "takes numbers"),
        ("disable_radix_cache", 1, "takes true or false"),
        ("attention_backend", "gamma", "takes one of alpha, beta"),
        ("policy", "random", "takes one of lpm, fcfs"),
        ("graph_bs", ["a"], "takes whole numbers"),
    ],
)
def test_what_the_server_would_refuse_is_refused_by_name(
    source: Path, name: str, value: Any, fault: str
) -> None:
    with pytest.raises(ConfigError, match=rf"sglang\.{name}.*{fault}"):
        check_options({name: value}, source)


@pytest.mark.skipif(installed_source() is not None, reason="SGLang is installed")
def test_nothing_is_known_where_sglang_is_not_installed() -> None:
    check_options({"whatever": 1})


@pytest.mark.skipif(installed_source() is None, reason="SGLang is not installed")
def test_the_installed_server_has_the_arguments_that_runs_use() -> None:
    path = installed_source()
    assert path is not None
    used = {"tp_size", "model_path", "host", "port", "dtype", "context_length", "weight_version"}
    assert used | {"random_seed", "max_running_requests"} <= set(read_options(path))
    with pytest.raises(ConfigError, match="mem_fraction_static"):
        check_options({"mem_fraction_statik": 0.2})
