"""The only place that imports vLLM."""
