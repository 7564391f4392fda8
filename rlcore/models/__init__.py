"""What language models are made of: their architecture, by preset or config.json, and its tensors.

Nothing here imports torch: an architecture is numbers, and sizes are arithmetic.
"""
