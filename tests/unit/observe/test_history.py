"""A run's history, read from its records."""

from rlcore.observe.history import iterations_asked
from rlcore.store.manifest import SCHEMA_VERSION, canonical_json
from rlcore.store.objects import Objects
from rlcore.store.paths import outcome_key
from rlcore.store.run_store import RunStore


def test_the_newest_driver_says_how_long_a_run_is_and_without_its_word_the_config() -> None:
    store = RunStore(Objects.open("memory://history"), "r")
    store.create_run({"config_digest": "d", "config": {"train": {"num_iterations": 3}}})
    assert iterations_asked(store) == 3
    asked = {"schema_version": SCHEMA_VERSION, "epoch": 1, "num_iterations": 5}
    store.objects.put(outcome_key("r"), canonical_json(asked))
    assert iterations_asked(store) == 5
    store.objects.put(outcome_key("r"), b"torn")
    assert iterations_asked(store) == 3
