"""Sparse attention over paged KV: what a decoding request reads, layer by layer. Imports neither vLLM nor Ray."""

from ucm_ray.sparse.base import UcmSparseBase, UcmSparseRole
from ucm_ray.sparse.config import Budget, EsaConfig
from ucm_ray.sparse.factory import UcmSparseFactory
from ucm_ray.sparse.request import ReqMeta

__all__ = ["Budget", "EsaConfig", "ReqMeta", "UcmSparseBase", "UcmSparseFactory", "UcmSparseRole"]
