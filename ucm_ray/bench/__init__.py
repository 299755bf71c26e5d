"""Benchmarks: `ucm-ray bench NAME`; every module here is one."""
