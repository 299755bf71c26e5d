"""Adapters to serving engines."""
