"""Images of samples: read from rows, processed, given places among the tokens, seen by a model.

Models are those of Qwen's VL kind: one placeholder id, patches in grids, positions on three axes.
"""
