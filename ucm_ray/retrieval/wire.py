"""How packed queries and answers travel between a client and a shard.

Ray sends an argument or result below 100 KB inside the call itself; anything larger takes two or three more trips
through the object store, which cost more than scoring. So arrays travel as bytes in pieces below that size.
"""

import math
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np

from ucm_ray.retrieval import lane
from ucm_ray.retrieval.kernels import merge_rows
from ucm_ray.retrieval.packed import PackedAnswer, PackedQuery, Source

PIECE_BYTES = 96 * 1024
MAX_PIECES = 64
_MERGED_ALONE = 2 ** 14  # candidates that are merged sooner than a second thread wakes up


class QueryHeader(NamedTuple):
    """Everything of a `PackedQuery` but its features. `request_ids` are the shard's names for the requests."""

    request_ids: tuple[str, ...]
    k: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    per_head: bool
    features_shape: tuple[int, ...]
    num_pieces: int
    sent_at_s: float
    lane_id: str = ""        # the lane the query lies in; empty: in the pieces
    query_offset: int = 0
    answer_offset: int = 0


class AnswerHeader(NamedTuple):
    """What a shard says beside blocks and scores. `shape` is that of `PackedAnswer.blocks`."""

    epoch: str
    candidates: np.ndarray
    shape: tuple[int, ...]
    block_dtype: str         # "lane": both arrays lie in the lane, scores first, blocks as int32


def cut(data: bytes, num_pieces: int) -> list[bytes]:
    """`data` in exactly `num_pieces` pieces of equal size (the last ones may be short or empty)."""
    size = max(1, math.ceil(len(data) / num_pieces))
    return [data[at * size:(at + 1) * size] for at in range(num_pieces)]


def pieces_for(num_bytes: int) -> int:
    """In how many pieces this many bytes travel; what is too large for that goes in one, through the object store."""
    pieces = max(1, math.ceil(num_bytes / PIECE_BYTES))
    return pieces if pieces <= MAX_PIECES else 1


def answer_pieces(query: PackedQuery, longest: int) -> int:
    """Pieces an answer may need when no request has more than `longest` candidates."""
    rows = query.features.shape[0] * query.features.shape[1] * query.groups
    return pieces_for(rows * min(query.max_k, longest) * (4 + (2 if longest < 2 ** 16 else 4)))


def lane_answer_bytes(query: PackedQuery, longest: int) -> int:
    """Room in a lane for a shard's answer when no request has more than `longest` candidates."""
    rows = query.features.shape[0] * query.features.shape[1] * query.groups
    return lane.aligned(rows * min(query.max_k, longest) * 8)


def answer_into_lane(answer: PackedAnswer, epoch: str, memory: np.ndarray, offset: int) -> list:
    """`[AnswerHeader]`, with scores and blocks written to the lane; columns no request fills are left out."""
    blocks, scores = _filled(answer)
    lane.array_at(memory, offset, scores.shape, np.float32)[:] = scores
    lane.array_at(memory, offset + 4 * scores.size, blocks.shape, np.int32)[:] = blocks
    return [AnswerHeader(epoch, answer.candidates, blocks.shape, "lane")]


def _filled(answer: PackedAnswer) -> tuple[np.ndarray, np.ndarray]:
    """Blocks and scores without the columns that no request fills: a request fills as many as it has candidates."""
    used = min(answer.blocks.shape[-1], int(answer.candidates.max(initial=0)))
    return answer.blocks[..., :used], answer.scores[..., :used]


def encode_answer(answer: PackedAnswer, epoch: str, num_pieces: int) -> list:
    """`[AnswerHeader, piece, ...]`; columns no request fills are left out."""
    blocks, scores = _filled(answer)
    dtype = "uint16" if not blocks.size or blocks.max() < 2 ** 16 - 1 else "int32"
    # -1 becomes 65535 in uint16, and comes back as -1.
    data = np.ascontiguousarray(scores).tobytes() + blocks.astype(dtype).tobytes()
    return [AnswerHeader(epoch, answer.candidates, blocks.shape, dtype), *cut(data, num_pieces)]


def decode_answer(header: AnswerHeader, pieces: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Blocks (int32) and scores (float32) of `encode_answer`, both in the header's shape."""
    data = b"".join(pieces)
    count = math.prod(header.shape)
    scores = np.frombuffer(data, np.float32, count).reshape(header.shape)
    blocks = np.frombuffer(data, header.block_dtype, count, 4 * count).reshape(header.shape)
    wide = blocks.astype(np.int32)
    wide[wide == 2 ** 16 - 1] = -1
    return wide if header.block_dtype == "uint16" else blocks, scores


def encode_query(query: PackedQuery, request_ids: tuple[str, ...], stop: np.ndarray, num_pieces: int,
                 now_s: float) -> list:
    """`[QueryHeader, piece, ...]`; `num_pieces` is how many the answer may use."""
    header = QueryHeader(request_ids, query.k, query.start, stop, query.per_head, query.features.shape, num_pieces,
                         now_s)
    data = query.features.tobytes()
    return [header, *cut(data, pieces_for(len(data)))]


def decode_query(header: QueryHeader, pieces: Sequence[bytes]) -> PackedQuery:
    """The query of `encode_query`."""
    features = np.frombuffer(bytearray().join(pieces), np.float32).reshape(header.features_shape)
    return PackedQuery(header.request_ids, features, header.k, header.start, header.stop, header.per_head)


def merge(query: PackedQuery, parts: Sequence[tuple[np.ndarray, np.ndarray]], candidates: np.ndarray,
          helper: Executor | None = None) -> PackedAnswer:
    """The answer over all shards' blocks out of each shard's own best: exactly what one shard with all would say.

    A `helper` with a thread to spare does half of it: the shards have just finished, so processors are idle.
    """
    answer = PackedAnswer.empty(query, Source.EXACT)
    answer.candidates[:] = candidates
    num_requests, num_layers, groups, max_k = answer.blocks.shape
    rows = num_requests * num_layers * groups
    widest = max((blocks.shape[-1] for blocks, _ in parts), default=0)
    if not rows or not max_k or not widest:
        return answer
    part_blocks = np.full((len(parts), rows, widest), -1, np.int32)
    part_scores = np.empty((len(parts), rows, widest), np.float32)
    for index, (blocks, scores) in enumerate(parts):
        part_blocks[index, :, :blocks.shape[-1]] = blocks.reshape(rows, -1)
        part_scores[index, :, :blocks.shape[-1]] = scores.reshape(rows, -1)
    k, num_positions = np.repeat(query.k, num_layers * groups), int(part_blocks.max()) + 1
    out_blocks, out_scores = answer.blocks.reshape(rows, max_k), answer.scores.reshape(rows, max_k)

    def work(begin: int, end: int) -> None:
        merge_rows(part_blocks, part_scores, k, num_positions, begin, end, out_blocks, out_scores)

    if helper is None or part_blocks.size < _MERGED_ALONE:
        work(0, rows)
        return answer
    try:
        helped = helper.submit(work, rows // 2, rows)
    except RuntimeError:  # it has been shut down; an answer on its way is merged all the same
        work(0, rows)
        return answer
    work(0, rows // 2)
    if helped.cancel():  # it had not begun: no thread was to spare
        work(rows // 2, rows)
    else:
        helped.result()
    return answer
