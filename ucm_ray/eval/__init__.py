"""Evaluations: `ucm-ray eval NAME`; every module here is one."""
