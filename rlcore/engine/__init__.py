"""Inference engines: the processes that answer SGLang's HTTP API.

`embedded` is the server in this repository, `sglang` builds the command of a real SGLang server,
`launch` starts, watches and ends either. The rollout code speaks HTTP and cannot tell them apart.
"""
