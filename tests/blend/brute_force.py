"""A slow matcher that follows the definition of a match literally, and helpers to store texts."""

from __future__ import annotations

import numpy as np

from ucm_ray.blend.chunk import ChunkRecord
from ucm_ray.keys import chunk_key, context_key

NAMESPACE = "0" * 32


def records_of(token_ids, source_id: str, chunk_size: int = 64, position: int = 0) -> list[ChunkRecord]:
    """A sequence as the store would cut it: chunks of `chunk_size`, the last one shorter."""
    token_ids = np.asarray(token_ids, np.int32)
    return [
        ChunkRecord(
            chunk_key(NAMESPACE, token_ids[start : start + chunk_size]), token_ids[start : start + chunk_size],
            source_id, position + start, context_key(NAMESPACE, token_ids[:start]) if position == 0 else "",
        )
        for start in range(0, len(token_ids), chunk_size)
    ]


def stretches(prompt, records, anchor_tokens: int, min_match_ratio: float) -> list[tuple[int, int, bool, frozenset]]:
    """Every candidate (start, end, moved, agreeing positions): maximal taken stretches on each line."""
    lines: dict[tuple[str, int], dict[int, tuple[bool, bool]]] = {}
    anchors: dict[tuple[str, int], list[int]] = {}
    for record in records:
        for start in range(1 - len(record.token_ids), len(prompt)):
            line = record.source_id, start - record.source_position
            agree = {start + i: prompt[start + i] == token for i, token in enumerate(record.token_ids)
                     if 0 <= start + i < len(prompt)}
            whole = sum(agree.values()) >= min_match_ratio * len(agree) - 1e-9
            lines.setdefault(line, {}).update({p: (bool(same), bool(same or whole)) for p, same in agree.items()})
            for i in range(0, len(record.token_ids) - anchor_tokens + 1, anchor_tokens):
                if all(agree.get(start + j) for j in range(i, i + anchor_tokens)):
                    anchors.setdefault(line, []).append(start + i)
    found = []
    for line, first_positions in anchors.items():
        cells, position = lines[line], 0
        while position < len(prompt):
            if not cells.get(position, (False, False))[1]:
                position += 1
                continue
            start = position
            while cells.get(position, (False, False))[1]:
                position += 1
            agreeing = [p for p in range(start, position) if cells[p][0]]
            if agreeing and any(agreeing[0] <= a and a + anchor_tokens <= agreeing[-1] + 1 for a in first_positions):
                found.append((agreeing[0], agreeing[-1] + 1, line[1] != 0, frozenset(agreeing)))
    return found


def longest_first(candidates, min_tokens: int) -> list[tuple[int, int]]:
    """Disjoint spans: the longest free piece of any candidate, again and again."""
    picks: list[tuple[int, int]] = []
    taken: set[int] = set()
    while True:
        pieces = []
        for start, end, moved, _ in candidates:
            left = start
            for position in range(start, end + 1):
                if position == end or position in taken:
                    if position - left >= min_tokens:
                        pieces.append((left - position, moved, left, position))
                    left = position + 1
        if not pieces:
            return sorted(picks)
        _, _, left, right = min(pieces)
        picks.append((left, right))
        taken.update(range(left, right))
