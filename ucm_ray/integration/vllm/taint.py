"""Keep approximate KV out of vLLM's exact prefix cache.

vLLM hashes the blocks of a request at admission, before their KV exists, and finds them again by hash. A blended
block, and every block computed after it, is not what its token ids promise. So the request's chain of block hashes
is cut where its KV stops being exact and continued from a secret of this request: no other prompt, and no later
request with the same prompt, can reach these blocks. The request itself, preempted and resumed, still can.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

_SALT = "_ucm_taint_salt"
_FROM = "_ucm_tainted_from_block"


def taint_from(request: Request, num_exact_tokens: int, block_size: int) -> None:
    """Make every block hash of `request` at or after token `num_exact_tokens` unique to this request.

    The block that holds token `num_exact_tokens` is tainted too. Repeated calls extend the taint to the left only.
    """
    if request._block_hasher is None:
        return
    keep = num_exact_tokens // block_size
    tainted_from = getattr(request, _FROM, None)
    if tainted_from is not None and tainted_from <= keep:
        return
    if tainted_from is None:
        salt, exact_hasher = os.urandom(16), request._block_hasher
        setattr(request, _SALT, salt)
        request._block_hasher = lambda r: [type(h)(hashlib.sha256(salt + h).digest()) for h in exact_hasher(r)]
    setattr(request, _FROM, keep)
    del request.block_hashes[keep:]
    request.update_block_hashes()


def tainted_from_block(request: Request) -> int | None:
    """Index of the first block of `request` that may hold approximate KV; None if all is exact."""
    return getattr(request, _FROM, None)


def is_tainted(request: Request) -> bool:
    """Whether any block of `request` holds approximate KV."""
    return getattr(request, _FROM, None) is not None


def tainted_blocks_from(request: Request) -> int:
    """Index of the first block of `request` that only this request can see. Raises AttributeError if none is."""
    return getattr(request, _FROM)
