"""The private Prefect server lives wherever a run's root may be."""

from pathlib import Path

import pytest

from flows.operation.server import PrefectServer


@pytest.mark.parametrize("name", ["100% sure", "why? #1 & it's", "säge"])
def test_a_server_starts_below_a_folder_of_any_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    home = tmp_path / name / "prefect"
    server = PrefectServer(home)
    try:
        server.wait()
    finally:
        server.end()
        server.gone()
    assert (home / "prefect.db").stat().st_size > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]
