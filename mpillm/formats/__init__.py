"""Byte layouts of files: safetensors, GGUF, tokenizers, JSONL, HDF5."""
