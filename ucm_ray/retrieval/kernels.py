"""CPU kernels: score blocks and select the best, for all layers and requests of a step in one call.

torch has no kernel that reads bfloat16 at memory speed on a CPU without AMX or AVX512-BF16 (matmul over the same bytes
is 5 to 8 times slower), so the two loops that touch every block are compiled with numba. They release the GIL; the
caller splits the rows over threads.

Layout of the arena: `[slots, num_layers, num_kv_heads, num_stats, head_dim]`, one contiguous record per block, so
writing a block is one copy, a request's blocks may lie anywhere, and reading one is a long sequential stream.
"""

import functools

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
_LINEAR_BINS = 512
_FEW = 24
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


@intrinsic
def _trailing_zeros(typing_context, bits):
    def codegen(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), codegen


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
def _radix_threshold(keys, n, k, histogram):
    """Which of `keys[:n]` are the `k` largest, as (prefix, shift, ties): those with key >> shift above the prefix, and
    `ties` of those equal to it. Three passes of a radix select at most; requires 1 <= k <= n.
    """
    needed = k
    prefix = np.uint32(0)
    shift = np.uint32(32)
    for step in range(3):
        next_shift = np.uint32(_RADIX_SHIFTS[step])
        mask = np.uint32((1 << (shift - next_shift)) - 1)
        histogram[:] = 0
        top = np.uint32(0)
        for i in range(n):
            # Shifting a uint32 by 32 is undefined, so the first step takes all keys without a look at a prefix.
            if step == 0 or keys[i] >> shift == prefix:
                digit = (keys[i] >> next_shift) & mask
                histogram[digit] += 1
                top = max(top, digit)
        chosen = np.int64(top)
        while histogram[chosen] < needed:
            needed -= histogram[chosen]
            chosen -= 1
        prefix = np.uint32(chosen) | (prefix << (shift - next_shift) if step else np.uint32(0))
        shift = next_shift
        if histogram[chosen] == needed:
            break
    return prefix, shift, needed


@njit(**_EXACT)
def _linear_bin(score, low, scale):
    """Bin of a score in [low, low + (_LINEAR_BINS - 1) / scale]; anything else, not-a-number too, goes to the nearest
    end rather than beside the histogram."""
    position = (score - low) * scale
    if not position > np.float32(0):
        return np.int32(0)
    if position >= np.float32(_LINEAR_BINS - 1):
        return np.int32(_LINEAR_BINS - 1)
    return np.int32(position)


@njit(**_EXACT)
def find_threshold(scores, n, k, keys, histogram):
    """What separates the `k` best of `scores[:n]`, as (prefix, shift, ties): see `_radix_threshold`.

    One histogram over the range of the scores leaves only the few of one bin to be looked at closely. Requires
    0 <= k < n; `keys` is scratch.
    """
    low = scores[0]
    high = scores[0]
    for i in range(n):
        low = min(low, scores[i])
        high = max(high, scores[i])
    if k == 0:
        return np.uint32(0xFFFFFFFF), np.uint32(0), 0
    if not np.float32(1e-30) < high - low < np.float32(1e30):  # equal scores, or a range float32 cannot scale
        for i in range(n):
            keys[i] = ordered_bits(scores[i])
        return _radix_threshold(keys, n, k, histogram)
    scale = np.float32(_LINEAR_BINS - 1) / (high - low)
    histogram[:_LINEAR_BINS] = 0
    for i in range(n):
        histogram[_linear_bin(scores[i], low, scale)] += 1
    needed = k
    chosen = _LINEAR_BINS - 1
    while histogram[chosen] < needed:
        needed -= histogram[chosen]
        chosen -= 1
    m = 0
    for i in range(n):
        keys[m] = ordered_bits(scores[i])
        m += _linear_bin(scores[i], low, scale) == chosen
    if m > _FEW:
        return _radix_threshold(keys, m, needed, histogram)
    for i in range(1, m):
        key = keys[i]
        j = i - 1
        while j >= 0 and keys[j] < key:
            keys[j + 1] = keys[j]
            j -= 1
        keys[j + 1] = key
    threshold = keys[needed - 1]
    ties = 1
    while ties < needed and keys[needed - 1 - ties] == threshold:
        ties += 1
    return threshold, np.uint32(0), ties


@njit(**_EXACT)
def select_row(scores, n, k, keys, histogram, picked):
    """Writes the indices of the `k` best of `scores[:n]` to `picked[:k]`, ascending; the lower index wins ties.

    Scratch: `keys` uint32 `[> n]`, `histogram` int32 `[2048]`; `picked` has room for n. Requires 0 <= k <= n.
    """
    if k == n:
        for i in range(n):
            picked[i] = i
        return
    prefix, shift, ties = find_threshold(scores, n, k, keys, histogram)
    found = 0
    for i in range(n):
        key = ordered_bits(scores[i]) >> shift
        tie = (key == prefix) & (ties > 0)
        picked[found] = i  # overwritten by the next one unless taken; no branch to mispredict
        found += (key > prefix) | tie
        ties -= tie


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
    keys = scratch[used:used + 4 * max_blocks + 4].view(np.uint32)
    used += 4 * max_blocks + 4
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
    return 4 * (4 * max_blocks + 1 + _RADIX_BINS + num_layers * groups * (width + max_blocks + _ROW_PADDING))


@njit(**_EXACT)
def merge_rows(part_blocks, part_scores, k, num_positions, row_begin, row_end, out_blocks, out_scores):
    """Merges the answers of several shards; rows are (request, layer, group) flattened, `k` is given per row.

    The threshold needs no order; winners are marked in bitmaps over positions, which are then read in order.

    Args:
        part_blocks, part_scores: `[num_parts, rows, max_k]`, int32 below `num_positions` with -1 behind the last found,
            and float32.
        out_blocks, out_scores: `[rows, max_k]`; blocks ascend, of equal scores the lower block wins.
    """
    num_parts, _, max_k = part_blocks.shape
    keys = np.empty(num_parts * max_k + 1, np.uint32)
    scores = np.empty(num_parts * max_k, np.float32)
    blocks = np.empty(num_parts * max_k, np.int32)
    histogram = np.empty(_RADIX_BINS, np.int32)
    score_at = np.empty(num_positions, np.float32)
    winners = np.zeros(num_positions // 64 + 1, np.uint64)
    tied = np.zeros(num_positions // 64 + 1, np.uint64)
    for row in range(row_begin, row_end):
        n = 0
        for part in range(num_parts):
            for i in range(max_k):
                block = part_blocks[part, row, i]
                if block < 0:
                    break
                blocks[n] = block
                scores[n] = part_scores[part, row, i]
                score_at[block] = scores[n]
                n += 1
        prefix, shift, ties = np.uint32(0), np.uint32(31), 0
        if k[row] < n:
            prefix, shift, ties = find_threshold(scores, n, k[row], keys, histogram)
        # Blocks of a part ascend, so a word of the bitmaps is put together in registers and stored once per part.
        word, won, drawn = np.int32(0), np.uint64(0), np.uint64(0)
        for i in range(n):
            if blocks[i] >> 6 != word:
                winners[word] |= won
                tied[word] |= drawn
                word, won, drawn = blocks[i] >> 6, np.uint64(0), np.uint64(0)
            key = ordered_bits(scores[i]) >> shift
            bit = np.uint64(blocks[i] & 63)
            won |= np.uint64((key > prefix) | (k[row] >= n)) << bit
            drawn |= np.uint64((key == prefix) & (k[row] < n)) << bit
        winners[word] |= won
        tied[word] |= drawn
        found = _read_bitmaps(winners, tied, ties, score_at, out_blocks[row], out_scores[row])
        for i in range(found, out_blocks.shape[1]):
            out_blocks[row, i] = -1
            out_scores[row, i] = -np.inf


@njit(**_EXACT)
def _read_bitmaps(winners, tied, ties, score_at, out_blocks, out_scores):
    """Writes all winners and the first `ties` tied positions in order, and clears both bitmaps; returns how many."""
    found = 0
    for word in range(winners.size):
        bits = tied[word]
        tied[word] = 0
        taken = winners[word]
        winners[word] = 0
        while bits and ties > 0:
            lowest = bits & (~bits + np.uint64(1))
            taken |= lowest
            bits ^= lowest
            ties -= 1
        while taken:
            block = word * 64 + _trailing_zeros(taken)
            taken &= taken - np.uint64(1)
            out_blocks[found] = block
            out_scores[found] = score_at[block]
            found += 1
    return found


@functools.cache
def warm_up(dtype: type) -> None:
    """Compiles the kernels for arenas of this numpy dtype, or loads them from the cache on disk; once per process.

    A first query that compiled would miss its deadline, and hold up everything else in the process meanwhile.
    """
    units = 1 if dtype is np.uint32 else 2
    zeros, ones = np.zeros(1, np.int32), np.ones(1, np.int32)
    table = np.zeros((1, 1), np.int32)
    blocks, scores = np.empty((1, 1, 1, 1), np.int32), np.empty((1, 1, 1, 1), np.float32)
    scratch = np.empty(scratch_bytes(1, 1, 1, 2), np.uint8)
    answer_rows(np.zeros((1, 1, units), dtype), zeros, np.zeros(1, np.int64), 0, zeros, table, table, table, ones,
                zeros, ones, ones, np.zeros((1, 1, 1, 2), np.float32), 0, 1, True, scratch, blocks, scores,
                np.zeros(1, np.int32))
    merge_rows(blocks.reshape(1, 1, 1), scores.reshape(1, 1, 1), ones, 1, 0, 1, blocks.reshape(1, 1),
               scores.reshape(1, 1))
