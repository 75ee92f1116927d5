"""The shipped verifier: Kimi-K2.5 in miniature, and the prompts of the smoke job.

A rehearsal on random weights proves nothing about acceptance, and a Llama-shaped stand-in proves
nothing about Kimi's loading path. So the checkpoint here has the real architecture (MLA,
sigmoid-routed experts, MoonViT tower), the real weight names and a tokenizer of the real kind, and
it was trained until held-out text is predictable. `README.md` in this folder says how, on what and
how well; `make.py` makes everything here again.
"""

from pathlib import Path

_HERE = Path(__file__).resolve().parent

CHECKPOINT: Path = _HERE / "checkpoint"
"""Folder that vLLM and transformers load as a Kimi-K2.5 checkpoint (bf16 safetensors)."""

PROMPTS: Path = _HERE / "prompts.jsonl"
"""JSONL of `id`, `messages`, `source`, `split`: prompts from files the verifier never saw."""

HELD_OUT: Path = _HERE / "held_out.jsonl"
"""JSONL of whole conversations from never-seen files, on which the accuracy is measured."""
