"""The service: application builder, router, HTTP API, receipts, playground."""
