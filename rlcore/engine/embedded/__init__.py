"""A small inference server that answers SGLang's native HTTP API over a transformers causal model.

Read in this order: `protocol` (what a request is), `server` (the endpoints), `scheduler` (the one
worker thread: admission, prefill, decode, finish), `runner` (the model), `kv` (the cache),
`sampling`.

Invariant: on CPU a request's tokens and log-probabilities are a function of its prompt, seed,
sampling parameters and the weights alone, bit for bit. Never of what else is in the batch or when
it came.
"""
