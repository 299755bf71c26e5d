"""CPU kernels: score blocks and select the best, for all layers and requests of a step in one call.

torch has no kernel that reads bfloat16 at memory speed on a CPU without AMX or AVX512-BF16 (matmul over the same bytes
is 5 to 8 times slower), so the two loops that touch every block are compiled with numba. They release the GIL; the
caller splits the rows over threads.

Layout of the arena: `[slots, num_layers, num_kv_heads, num_stats, head_dim]`, one contiguous record per block, so
writing a block is one copy, a request's blocks may lie anywhere, and reading one is a long sequential stream.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

# The score of a block is computed by the same instructions in the same order wherever the block lies and whatever its
# neighbours are: shards and the unsharded worker agree to the last bit, hence also on ties.
_FAST = {"nogil": True, "cache": True, "fastmath": True, "boundscheck": False, "error_model": "numpy"}
_EXACT = {"nogil": True, "cache": True, "boundscheck": False, "error_model": "numpy"}

_RADIX_SHIFTS = (21, 10, 0)
_RADIX_BINS = 2048
# Rows of scores a power of two apart would all fall into the same few cache sets.
_ROW_PADDING = 16


@intrinsic
def _bits_to_float32(typing_context, bits):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@intrinsic
def _float32_to_bits(typing_context, value):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def _half_to_float32(typing_context, bits):
    def codegen(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


def _dot(record, query):
    """Dot product of a record with a query; the record's dtype chooses the implementation."""
    raise NotImplementedError


@overload(_dot, jit_options=_FAST, inline="never")
def _dot_overload(record, query):
    if record.dtype == types.uint32:
        def bfloat16_pairs(record, query):
            # A uint32 holds two bfloat16; the query comes as all its even elements, then all its odd ones.
            half = record.size
            high = np.uint32(0xFFFF0000)
            total = np.float32(0)
            for d in range(half):
                x = record[d]
                total += (query[d] * _bits_to_float32(x << np.uint32(16))
                          + query[half + d] * _bits_to_float32(x & high))
            return total

        return bfloat16_pairs
    if record.dtype == types.uint16:
        def float16(record, query):
            total = np.float32(0)
            for d in range(record.size):
                total += query[d] * _half_to_float32(record[d])
            return total

        return float16

    def float32(record, query):
        total = np.float32(0)
        for d in range(record.size):
            total += query[d] * record[d]
        return total

    return float32


@njit(**_EXACT)
def ordered_bits(score):
    """A uint32 that sorts as the finite float32 `score` does; -0.0 and 0.0 are equal."""
    bits = _float32_to_bits(score + np.float32(0))
    if bits & np.uint32(0x80000000):
        return ~bits
    return bits | np.uint32(0x80000000)


@njit(**_EXACT)
def select_row(scores, n, k, keys, histogram, picked):
    """Writes the indices of the `k` best of `scores[:n]` to `picked[:k]`, ascending; the lower index wins ties.

    A radix select: three passes over histograms of the ordered bits find the k-th best key exactly.
    Scratch: `keys` uint32 `[>= n]`, `histogram` int32 `[2048]`. Requires 0 <= k <= n.
    """
    if k == n:
        for i in range(n):
            picked[i] = i
        return
    histogram[:] = 0
    top = np.uint32(0)
    for i in range(n):
        key = ordered_bits(scores[i])
        keys[i] = key
        digit = key >> np.uint32(21)
        histogram[digit] += 1
        top = max(top, digit)
    needed = k
    prefix = np.uint32(0)
    shift = np.uint32(32)
    for step in range(3):
        next_shift = np.uint32(_RADIX_SHIFTS[step])
        if step:
            mask = np.uint32((1 << (shift - next_shift)) - 1)
            histogram[:] = 0
            top = np.uint32(0)
            for i in range(n):
                if keys[i] >> shift == prefix:
                    digit = (keys[i] >> next_shift) & mask
                    histogram[digit] += 1
                    top = max(top, digit)
        chosen = np.int64(top)
        while histogram[chosen] < needed:
            needed -= histogram[chosen]
            chosen -= 1
        # Shifting a uint32 by 32 is undefined, so the first step does not shift its empty prefix.
        prefix = np.uint32(chosen) | (prefix << (shift - next_shift) if step else np.uint32(0))
        shift = next_shift
        if histogram[chosen] == needed:
            break
    found = 0
    for i in range(n):
        key = keys[i] >> shift
        tie = (key == prefix) & (needed > 0)
        picked[found] = i  # overwritten by the next one unless taken; no branch to mispredict
        found += (key > prefix) | tie
        needed -= tie


@njit(**_EXACT)
def _lay_out_query(features, bfloat16, out):
    """Copies one feature vector in the order `_dot` reads it."""
    size = features.size
    if bfloat16:
        half = size // 2
        for d in range(half):
            out[d] = features[2 * d]
            out[half + d] = features[2 * d + 1]
    else:
        for d in range(size):
            out[d] = features[d]


@njit(**_FAST)
def _score_blocks(arena, slots, n, query, begin, end, scores):
    """Scores blocks `slots[:n]` for (layer, group) rows [begin, end) into `scores[row, block]`.

    One block at a time: two at a time are a little faster where blocks lie scattered, but the compiler then orders the
    sums of the two differently.
    """
    for i in range(n):
        for row in range(begin, end):
            scores[row, i] = _dot(arena[slots[i], row], query[row])


@njit(**_EXACT)
def answer_rows(arena, generations, last_used, tick, request_rows, table_slots, table_generations, table_positions,
                lengths, start, stop, k, features, row_begin, row_end, select, scratch, out_blocks, out_scores,
                out_candidates):
    """Answers rows [row_begin, row_end) of a packed query; row = request * num_layers + layer.

    Args:
        arena: `[slots, num_layers, record]`, uint32 (bfloat16 pairs), uint16 (float16) or float32.
        generations, last_used: `[slots]`, int32 and int64; a table entry counts only if its generation is the slot's.
        request_rows: `[num_requests]`, row of each request in the tables, -1 for an unknown request.
        table_*: `[max_requests, max_blocks]`; positions ascend within `lengths[row]`.
        start, stop, k: int32 `[num_requests]`; candidates are the blocks at positions [start, stop).
        features: float32 `[num_requests, num_layers, groups, width]`; groups is 1 (heads summed) or num_kv_heads.
        select: False leaves `out_blocks` and `out_scores` alone (to time scoring by itself).
        scratch: uint8 work space of this thread, see `scratch_bytes`.
        out_blocks: int32 `[num_requests, num_layers, groups, max_k]`, filled with -1 beyond what was found.
        out_scores: float32, same shape, filled with -inf.
        out_candidates: int32 `[num_requests]`, how many blocks could be scored.
    """
    num_layers, groups, width = features.shape[1:]
    max_k = out_blocks.shape[3]
    max_blocks = table_slots.shape[1]
    is_bfloat16 = arena.itemsize == 4 and arena.shape[2] * 2 == groups * width
    grouped_arena = arena.reshape(arena.shape[0], num_layers * groups, arena.shape[2] // groups)
    used = 0
    slots = scratch[used:used + 4 * max_blocks].view(np.int32)
    used += 4 * max_blocks
    positions = scratch[used:used + 4 * max_blocks].view(np.int32)
    used += 4 * max_blocks
    keys = scratch[used:used + 4 * max_blocks].view(np.uint32)
    used += 4 * max_blocks
    picked = scratch[used:used + 4 * max_blocks].view(np.int32)
    used += 4 * max_blocks
    histogram = scratch[used:used + 4 * _RADIX_BINS].view(np.int32)
    used += 4 * _RADIX_BINS
    query = scratch[used:used + 4 * num_layers * groups * width].view(np.float32).reshape(
        num_layers * groups, width)
    used += 4 * num_layers * groups * width
    stride = max_blocks + _ROW_PADDING
    scores = scratch[used:used + 4 * num_layers * groups * stride].view(np.float32).reshape(
        num_layers * groups, stride)

    row = row_begin
    while row < row_end:
        request = row // num_layers
        first_layer = row - request * num_layers
        last_layer = min(num_layers, first_layer + row_end - row)
        row += last_layer - first_layer
        table_row = request_rows[request]
        n = 0
        if table_row >= 0:
            for i in range(lengths[table_row]):
                position = table_positions[table_row, i]
                slot = table_slots[table_row, i]
                if start[request] <= position < stop[request] and slot >= 0 and (
                        generations[slot] == table_generations[table_row, i]):
                    slots[n] = slot
                    positions[n] = position
                    last_used[slot] = tick
                    n += 1
        out_candidates[request] = n
        for layer in range(first_layer, last_layer):
            for group in range(groups):
                _lay_out_query(features[request, layer, group], is_bfloat16, query[layer * groups + group])
        _score_blocks(grouped_arena, slots, n, query, first_layer * groups, last_layer * groups, scores)
        if not select:
            continue
        found = min(k[request], n)
        for layer in range(first_layer, last_layer):
            for group in range(groups):
                at = layer * groups + group
                select_row(scores[at], n, found, keys, histogram, picked)
                for i in range(found):
                    out_blocks[request, layer, group, i] = positions[picked[i]]
                    out_scores[request, layer, group, i] = scores[at, picked[i]]
                for i in range(found, max_k):
                    out_blocks[request, layer, group, i] = -1
                    out_scores[request, layer, group, i] = -np.inf


def scratch_bytes(max_blocks: int, num_layers: int, groups: int, width: int) -> int:
    """Bytes of work space `answer_rows` needs per thread."""
    return 4 * (4 * max_blocks + _RADIX_BINS + num_layers * groups * (width + max_blocks + _ROW_PADDING))


@njit(**_EXACT)
def merge_rows(part_blocks, part_scores, k, row_begin, row_end, out_blocks, out_scores):
    """Merges the answers of several shards; rows are (request, layer, group) flattened, `k` is given per row.

    Args:
        part_blocks, part_scores: `[num_parts, rows, max_k]`, int32 with -1 behind the last found, and float32.
        out_blocks, out_scores: `[rows, max_k]`; blocks ascend, of equal scores the lower block wins.
    """
    num_parts, _, max_k = part_blocks.shape
    capacity = num_parts * max_k
    blocks = np.empty(capacity, np.int32)
    scores = np.empty(capacity, np.float32)
    keys = np.empty(capacity, np.uint32)
    picked = np.empty(capacity, np.int32)
    histogram = np.empty(_RADIX_BINS, np.int32)
    cursor = np.empty(num_parts, np.int64)
    for row in range(row_begin, row_end):
        n = _interleave(part_blocks, part_scores, row, cursor, blocks, scores)
        found = min(k[row], n)
        select_row(scores, n, found, keys, histogram, picked)
        for i in range(found):
            out_blocks[row, i] = blocks[picked[i]]
            out_scores[row, i] = scores[picked[i]]
        for i in range(found, out_blocks.shape[1]):
            out_blocks[row, i] = -1
            out_scores[row, i] = -np.inf


@njit(**_EXACT)
def _interleave(part_blocks, part_scores, row, cursor, blocks, scores):
    """One row of all parts, whose blocks each ascend, as one ascending list; returns its length."""
    num_parts, _, max_k = part_blocks.shape
    cursor[:] = 0
    n = 0
    while True:
        best = -1
        lowest = np.int32(2147483647)
        for part in range(num_parts):
            at = cursor[part]
            if at < max_k:
                block = part_blocks[part, row, at]
                if 0 <= block < lowest:
                    lowest = block
                    best = part
        if best < 0:
            return n
        blocks[n] = lowest
        scores[n] = part_scores[best, row, cursor[best]]
        cursor[best] += 1
        n += 1


def warm_up() -> None:
    """Compiles the merge kernel and the scoring kernels of every dtype, or loads them from the cache on disk."""
    from ucm_ray.retrieval.bank import BlockBank
    from ucm_ray.retrieval.packed import DTYPES, Geometry, PackedQuery
    from ucm_ray.retrieval.wire import merge

    for dtype in DTYPES:
        geometry = Geometry(1, 1, 2, "mean", dtype)
        bank = BlockBank(geometry, geometry.record_bytes, num_threads=1)
        query = PackedQuery(("",), np.zeros((1, *geometry.record_shape), np.float32),
                            *(np.full(1, value, np.int32) for value in (1, 0, 1)))
        answer = bank.answer(query)
    merge(query, [(answer.blocks, answer.scores)], answer.candidates)
