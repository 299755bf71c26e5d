"""Which shard holds a block: rendezvous hashing, so a changed pool moves only the blocks it must."""

import hashlib
from collections.abc import Sequence

import numpy as np


def hash_names(names: Sequence[str]) -> np.ndarray:
    """A 64-bit hash of each name, uint64 `[len(names)]`; the same in every process."""
    digests = b"".join(hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
    return np.frombuffer(digests, "<u8")


def place(key_hashes: np.ndarray, shard_hashes: np.ndarray) -> np.ndarray:
    """Index of the shard with the highest weight for each key (highest random weight, Thaler and Ravishankar 1998).

    Adding a shard moves to it the keys it now wins, about 1/n of all, and no others; removing one moves only its keys.

    Args:
        key_hashes: uint64 `[num_keys]`; shard_hashes: uint64 `[num_shards]`, at least one.
    Returns:
        int32 `[num_keys]`.
    """
    if not len(shard_hashes):
        raise ValueError("there are 0 shards, expected at least 1 to place blocks on")
    weights = _mix(key_hashes[:, None] ^ _mix(shard_hashes)[None, :])
    return weights.argmax(axis=1).astype(np.int32)


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
