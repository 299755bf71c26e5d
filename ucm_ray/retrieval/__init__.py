"""Which KV blocks does a query need: representations, selection, the local worker and the client of the Ray pool."""

from ucm_ray.retrieval.representations import BlockRepresentation, get_representation, representation_names
from ucm_ray.retrieval.selection import (
    compute_block_representation,
    compute_similarity,
    select_top_k_blocks,
    top_k_indices,
)

__all__ = [
    "BlockRepresentation",
    "compute_block_representation",
    "compute_similarity",
    "get_representation",
    "representation_names",
    "select_top_k_blocks",
    "top_k_indices",
]
