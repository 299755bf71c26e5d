"""Blend: find stored KV of any text in a prompt, plan its reuse, choose what to recompute. No vLLM, no Ray."""
