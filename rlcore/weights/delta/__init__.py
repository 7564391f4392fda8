"""Weights for engines that are far away: what changed since the version that they hold, through the
store.

    codec       a tensor's changes as bytes, and back
    publisher   the trainer's side: writes versions
    mirror      the engine's side: a local folder of a version, from the store
    server      a mirror that is asked over HTTP, beside an engine
    transport   how a sync uses all that

The record of a published version is `rlcore.store.deltas`.
"""
