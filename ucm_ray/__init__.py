"""Retrieval and blend service for vLLM on Ray."""

__version__ = "0.1.0"
