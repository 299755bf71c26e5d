"""Which KV blocks does a query need: representations, selection, the local worker and the client of the Ray pool."""

from ucm_ray.retrieval.packed import Geometry, PackedAnswer, PackedQuery, Source
from ucm_ray.retrieval.representations import BlockRepresentation, get_representation, representation_names
from ucm_ray.retrieval.retriever import RetrievalFuture, Retriever
from ucm_ray.retrieval.selection import (
    compute_block_representation,
    compute_similarity,
    select_top_k_blocks,
    top_k_indices,
)
from ucm_ray.retrieval.worker import RetrievalWorker

__all__ = [
    "BlockRepresentation",
    "Geometry",
    "PackedAnswer",
    "PackedQuery",
    "RetrievalFuture",
    "RetrievalWorker",
    "Retriever",
    "Source",
    "compute_block_representation",
    "compute_similarity",
    "get_representation",
    "representation_names",
    "select_top_k_blocks",
    "top_k_indices",
]
