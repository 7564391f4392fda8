"""SGLang servers as the tests on GPUs start them: small, and soon."""

SERVER: dict[str, bool | int | float | str] = {
    "attention_backend": "fa3",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.2,
}
