"""What Python's garbage collector looks through."""

import gc


def keep_loaded() -> None:
    """Have it leave alone what is loaded now, for good.

    To look through all that torch, Ray or Prefect are made of stops a process for 0.1 to 0.5 s,
    again and again.
    """
    gc.collect()
    gc.freeze()
