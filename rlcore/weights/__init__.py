"""From the trainer's weights to the engines, and to Hugging Face folders.

`export` writes a folder that `from_pretrained` and the engines load and cuts weights into buckets;
`transport` (disk, HTTP), `distributed` (broadcast, in the process group of `group`) and `handles`
(memory of a shared GPU) carry them; `canary` proves that engine and trainer hold the same, and
`sync` puts all in order.
"""
