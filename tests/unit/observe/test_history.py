"""A run's history, read from its records."""

from rlcore.observe.history import iterations_asked
from rlcore.store.objects import Objects
from rlcore.store.run_store import RunStore


def test_a_record_that_does_not_say_how_long_the_run_is_leaves_it_to_the_config() -> None:
    store = RunStore(Objects.open("memory://history"), "r")
    store.create_run({"config_digest": "d", "config": {"train": {"num_iterations": 3}}})
    assert iterations_asked(store, None) == 3
    assert iterations_asked(store, {"iteration": 2}) == 3
    assert iterations_asked(store, {"iteration": 2, "num_iterations": 5}) == 5
