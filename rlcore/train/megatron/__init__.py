"""Models of megatron-core, from the same Hugging Face folders as FSDP2's."""
