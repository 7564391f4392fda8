"""Ray: connecting to it, and the actors that hold a run's engines, trainer and rollout worker.

Invariants: every actor is made with `max_restarts=0` and `max_task_retries=0`, since re-running a
call silently would apply a step twice; every call carries the driver's epoch, and an actor that has
seen a higher one raises `Fenced`.
"""
