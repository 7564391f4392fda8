"""From the trainer's weights to the engines, and to Hugging Face folders.

`export` writes a folder that `from_pretrained` and the engines load, `transport` carries the
weights, `canary` proves that engine and trainer hold the same, and `sync` puts them in order.
"""
