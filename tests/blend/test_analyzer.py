import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.blend.brute_force import NAMESPACE, longest_first, records_of, stretches
from ucm_ray.blend.analyzer import ChunkAnalyzer
from ucm_ray.blend.chunk import ChunkRecord, ChunkType
from ucm_ray.blend.index import ChunkIndex
from ucm_ray.blend.plan import _group_runs
from ucm_ray.keys import chunk_key


def words(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(10, 49_000, count).astype(np.int32)


def index_of(*documents, chunk_size: int = 64, anchor_tokens: int = 16) -> ChunkIndex:
    index = ChunkIndex(anchor_tokens)
    for number, document in enumerate(documents):
        index.add(records_of(document, f"{number:032x}", chunk_size))
    return index


def check_sound(chunks, prompt, records, min_match_ratio):
    """Sorted, disjoint, covering; what is said to agree agrees, what is said to differ differs."""
    by_key = {record.key: record for record in records}
    assert [chunk.start_idx for chunk in chunks] == [0, *(chunk.end_idx for chunk in chunks[:-1])][: len(chunks)]
    assert (chunks[-1].end_idx if chunks else 0) == len(prompt)
    for chunk in chunks:
        assert chunk.num_tokens > 0
        if chunk.chunk_type is ChunkType.NO_MATCH:
            assert chunk.source_block_id is None and not chunk.mismatched
            continue
        record = by_key[chunk.source_block_id]
        stored = record.token_ids[chunk.source_offset : chunk.source_offset + chunk.num_tokens]
        assert len(stored) == chunk.num_tokens
        assert chunk.source_id == record.source_id
        assert chunk.source_position == record.source_position + chunk.source_offset
        differing = chunk.start_idx + np.flatnonzero(stored != prompt[chunk.start_idx : chunk.end_idx])
        assert tuple(differing.tolist()) == chunk.mismatched
        assert (chunk.chunk_type is ChunkType.FULL_MATCH) == (not chunk.mismatched)
        assert len(chunk.mismatched) <= (1 - min_match_ratio) * chunk.num_tokens + 1e-6


def reused(chunks) -> set[int]:
    return {position for chunk in chunks if chunk.matched for position in range(chunk.start_idx, chunk.end_idx)
            if position not in chunk.mismatched}


texts = st.lists(st.integers(1, 4), min_size=0, max_size=40)


@st.composite
def stores_and_prompts(draw):
    """Some documents over a tiny alphabet, and a prompt made of pieces of them, edits and other text."""
    documents = draw(st.lists(texts, min_size=1, max_size=4))
    prompt: list[int] = []
    for _ in range(draw(st.integers(0, 5))):
        document = draw(st.sampled_from(documents))
        low, high = sorted((draw(st.integers(0, len(document))), draw(st.integers(0, len(document)))))
        piece = document[low:high]
        if piece and draw(st.booleans()):
            piece[draw(st.integers(0, len(piece) - 1))] = draw(st.integers(1, 6))
        prompt += piece + draw(st.lists(st.integers(1, 6), max_size=3))
    positions = draw(st.lists(st.integers(0, 9), min_size=len(documents), max_size=len(documents)))
    records = {}
    for number, (document, position) in enumerate(zip(documents, positions, strict=False)):
        for record in records_of(document, f"{number:032x}", draw(st.sampled_from([5, 8])), position):
            records.setdefault(record.key, record)
    return np.array(prompt, np.int32), list(records.values())


@settings(max_examples=300, deadline=None)
@given(stores_and_prompts(), st.sampled_from([2, 3, 4]))
def test_finds_what_a_brute_force_matcher_finds(store_and_prompt, anchor_tokens):
    prompt, records = store_and_prompt
    analyzer = ChunkAnalyzer(8, 1.0, anchor_tokens, same_anchor_limit=10_000)
    chunks = analyzer.analyze(prompt, records)
    check_sound(chunks, prompt, records, 1.0)
    spans = longest_first(stretches(prompt, records, anchor_tokens, 1.0), anchor_tokens)
    groups = _group_runs([chunk for chunk in chunks if chunk.matched])
    assert [(group[0].start_idx, group[-1].end_idx) for group in groups] == spans


@settings(max_examples=200, deadline=None)
@given(stores_and_prompts(), st.sampled_from([2, 3]), st.sampled_from([0.6, 0.8]))
def test_partial_matches_are_sound_and_cover_what_brute_force_covers(store_and_prompt, anchor_tokens, ratio):
    prompt, records = store_and_prompt
    chunks = ChunkAnalyzer(8, ratio, anchor_tokens, same_anchor_limit=10_000).analyze(prompt, records)
    check_sound(chunks, prompt, records, ratio)
    candidates = stretches(prompt, records, anchor_tokens, ratio)
    assert reused(chunks) <= {position for candidate in candidates for position in candidate[3]}
    # The longest candidate is reused whole, unless its agreeing share is lost where another one cuts it.
    if len(candidates) == 1:
        start, end, _, agreeing = candidates[0]
        assert reused(chunks) == agreeing or len(agreeing) < ratio * (end - start)


@settings(max_examples=50, deadline=None)
@given(stores_and_prompts())
def test_colliding_hashes_change_nothing(store_and_prompt):
    prompt, records = store_and_prompt
    analyzer = ChunkAnalyzer(8, 1.0, 3, same_anchor_limit=10_000)
    expected = analyzer.analyze(prompt, records)
    with pytest.MonkeyPatch.context() as patch:
        for module in ("analyzer", "index"):
            patch.setattr(f"ucm_ray.blend.{module}.tags_of", lambda hashes: (hashes % np.uint64(3)).astype(np.uint32))
        found = analyzer.analyze(prompt, records)
    assert reused(found) == reused(expected)


def test_finds_text_at_any_offset_and_in_any_order():
    documents = [words(seed, 200 + 37 * seed) for seed in range(5)]
    index = index_of(*documents)
    pieces, position, expected = [words(90, 7)], 7, []
    for number in (3, 0, 4, 1, 2):
        expected.append((position, position + len(documents[number]), f"{number:032x}"))
        pieces += [documents[number], words(91 + number, 5)]
        position += len(documents[number]) + 5
    chunks = ChunkAnalyzer().analyze(np.concatenate(pieces), index)
    groups = _group_runs([chunk for chunk in chunks if chunk.matched])
    assert [(group[0].start_idx, group[-1].end_idx, group[0].source_id) for group in groups] == expected


def test_extends_past_chunk_borders_into_parts_without_an_anchor():
    document = words(1, 64 * 4 + 9)
    part = document[60 : 64 * 4 + 5]
    chunks = ChunkAnalyzer().analyze(part, index_of(document))
    assert [chunk.chunk_type for chunk in chunks] == [ChunkType.FULL_MATCH] * 5
    assert (chunks[0].start_idx, chunks[0].num_tokens, chunks[0].source_offset) == (0, 4, 60)
    assert (chunks[-1].num_tokens, chunks[-1].source_offset, chunks[-1].source_position) == (5, 0, 256)


def test_chunks_shorter_than_an_anchor_are_found_through_their_neighbours():
    document = words(2, 60)
    index = ChunkIndex(16)
    index.add(records_of(document[:32], "a" * 32))
    for start in range(32, 60, 7):
        index.add(records_of(document[start : start + 7], "a" * 32, position=start))
    assert len(reused(ChunkAnalyzer().analyze(document, index))) == 60


def test_prompts_and_documents_shorter_than_a_chunk():
    document = words(3, 20)
    analyzer, index = ChunkAnalyzer(), index_of(document)
    assert reused(analyzer.analyze(np.concatenate((words(4, 3), document)), index)) == set(range(3, 23))
    assert reused(analyzer.analyze(document[:18], index)) == set(range(18))
    assert [chunk.chunk_type for chunk in analyzer.analyze(document[:9], index)] == [ChunkType.NO_MATCH]
    assert analyzer.analyze([], index) == []


def test_the_same_document_twice_and_overlapping_documents():
    document = words(5, 300)
    first, second = document[:220], document[100:]
    chunks = ChunkAnalyzer().analyze(np.concatenate((document, words(6, 11), document)), index_of(first, second))
    assert reused(chunks) == set(range(300)) | set(range(311, 611))
    assert len(_group_runs([chunk for chunk in chunks if chunk.matched])) == 4


def test_the_source_with_the_longest_run_wins():
    shared = words(7, 128)
    longer = np.concatenate((words(8, 50), shared, words(9, 40)))
    chunks = ChunkAnalyzer().analyze(longer, index_of(shared, longer))
    assert {chunk.source_id for chunk in chunks} == {f"{1:032x}"}


def test_a_substituted_token_makes_a_partial_match():
    document = words(10, 256)
    edited = document.copy()
    edited[100] += 1
    chunks = ChunkAnalyzer().analyze(edited, index_of(document))
    kinds = [chunk.chunk_type for chunk in chunks]
    assert kinds == [ChunkType.FULL_MATCH, ChunkType.PARTIAL_MATCH, ChunkType.FULL_MATCH, ChunkType.FULL_MATCH]
    assert chunks[1].mismatched == (100,)


def test_inserted_and_deleted_tokens_leave_only_themselves_out():
    document = words(11, 256)
    longer = np.insert(document, 100, 3)
    shorter = np.delete(document, 100)
    index = index_of(document)
    assert reused(ChunkAnalyzer().analyze(longer, index)) == set(range(257)) - {100}
    assert reused(ChunkAnalyzer().analyze(shorter, index)) == set(range(255))


def test_below_the_ratio_only_agreeing_stretches_count():
    document = words(12, 64)
    edited = document.copy()
    edited[32:48] = words(13, 16)
    chunks = ChunkAnalyzer(min_match_ratio=0.8).analyze(edited, index_of(document))
    assert [chunk.chunk_type for chunk in chunks] == [ChunkType.FULL_MATCH, ChunkType.NO_MATCH, ChunkType.FULL_MATCH]
    chunks = ChunkAnalyzer(min_match_ratio=0.7).analyze(edited, index_of(document))
    assert [chunk.chunk_type for chunk in chunks] == [ChunkType.PARTIAL_MATCH]


def test_cached_blocks_may_be_any_iterable_with_any_keys():
    document = words(14, 64)
    blocks = [ChunkRecord("block-0", document, "conversation", 12)]
    (chunk,) = ChunkAnalyzer(chunk_size=64, min_match_ratio=0.8).analyze(document.tolist(), iter(blocks))
    assert (chunk.source_block_id, chunk.source_id, chunk.source_position) == ("block-0", "conversation", 12)


def cpu_s(call) -> float:
    call()
    started = time.thread_time()
    call()
    return time.thread_time() - started


@pytest.mark.parametrize("tokens", [1024, 4096, 32_768])
@pytest.mark.parametrize("period", [1, 3, 16])
def test_repetitive_text_does_not_explode(period, tokens):
    prompt = np.tile(words(15, period), tokens // period + 1)[:tokens]
    index = index_of(prompt, np.concatenate((words(16, 30), prompt[:5000], words(17, 30))))
    analyzer = ChunkAnalyzer()
    assert cpu_s(lambda: analyzer.analyze(prompt, index)) < 0.15
    assert len(reused(analyzer.analyze(prompt, index))) > 0.95 * len(prompt)
    # And in many chunks that end in something else, of which only some are tried.
    for number in range(1, 48):
        index.add(records_of(np.concatenate((prompt[: 64 - number], words(number, number))), f"{number:032x}"))
    assert cpu_s(lambda: analyzer.analyze(prompt, index)) < 0.15
    assert len(reused(analyzer.analyze(prompt, index))) > 0.9 * len(prompt)


def test_repetitive_text_between_documents_does_not_explode_and_hides_nothing():
    documents = [words(50 + seed, 1024) for seed in range(8)]
    filler = np.full(500, 7, np.int32)
    index = index_of(*documents, filler, np.concatenate((filler, words(60, 100))))
    prompt = np.concatenate([piece for document in documents for piece in (filler, document)])
    analyzer = ChunkAnalyzer()
    assert cpu_s(lambda: analyzer.analyze(prompt, index)) < 0.15
    found = reused(analyzer.analyze(prompt, index))
    for number in range(8):
        begin = 500 + number * 1524
        assert set(range(begin, begin + 1024)) <= found


def test_a_document_stored_many_times_at_different_offsets_does_not_explode():
    document, index = words(70, 4096), ChunkIndex()
    for number in range(60):
        index.add(records_of(np.concatenate((words(100 + number, number), document)), f"{number:032x}"))
    analyzer = ChunkAnalyzer()
    assert cpu_s(lambda: analyzer.analyze(document, index)) < 0.3
    assert len(reused(analyzer.analyze(document, index))) == 4096


def test_analysis_time_is_linear_in_the_prompt():
    documents = [words(100 + seed, 1024) for seed in range(64)]
    index, prompt, analyzer = index_of(*documents), np.concatenate(documents[::-1]), ChunkAnalyzer()

    def best_of(tokens):
        times = []
        for _ in range(7):
            started = time.thread_time()
            analyzer.analyze(tokens, index)
            times.append(time.thread_time() - started)
        return min(times)

    assert best_of(prompt) < 8 * best_of(prompt[: len(prompt) // 4])


def test_index_forgets_removed_chunks_and_takes_them_back():
    documents = [words(20 + seed, 256) for seed in range(3)]
    index = index_of(*documents)
    gone = [record.key for record in records_of(documents[1], "")]
    assert index.remove([*gone, "f" * 32]) == 4
    assert len(index) == 8 and gone[0] not in index and index.get(gone[0]) is None
    assert reused(ChunkAnalyzer().analyze(documents[1], index)) == set()
    index.add(records_of(documents[1], "e" * 32, position=77))
    (first, *_) = ChunkAnalyzer().analyze(documents[1], index)
    assert (first.source_id, first.source_position) == ("e" * 32, 77)
    assert index.get(gone[0]).source_position == 77


def test_index_replaces_the_source_of_a_known_key():
    document = words(30, 64)
    index = ChunkIndex()
    assert index.add(records_of(document, "a" * 32)) == 1
    assert index.add(records_of(document, "a" * 32)) == 0
    assert index.add(records_of(document, "b" * 32, position=5)) == 1
    assert len(index) == 1
    assert index.get(chunk_key(NAMESPACE, document)).source_id == "b" * 32


def test_index_returns_the_memory_of_removed_chunks():
    index, previous = ChunkIndex(), []
    for round_number in range(12):
        records = records_of(words(round_number, 64 * 1024), f"{round_number:032x}")
        index.add(records)
        index.remove(previous)
        previous = [record.key for record in records]
    assert len(index) == 1024
    assert index.num_anchors <= 3 * 4096
    kept = words(11, 64 * 1024)[5000:6000]
    assert reused(ChunkAnalyzer().analyze(kept, index)) == set(range(1000))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=60))
def test_index_holds_what_a_dictionary_holds(operations):
    index, expected = ChunkIndex(4), {}
    for adds, number in operations:
        record = records_of(words(number, 5 + number % 7), f"{number % 5:032x}", position=number)[0]
        if adds:
            index.add([record])
            expected[record.key] = record
        else:
            index.remove([record.key])
            expected.pop(record.key, None)
    assert len(index) == len(expected)
    assert {record.key for record in index.records()} == set(expected)
    for key, record in expected.items():
        found = index.get(key)
        assert found.token_ids.tolist() == record.token_ids.tolist() and found.source_position == record.source_position


def test_readers_work_while_a_writer_adds_and_removes():
    import threading

    document = words(40, 640)
    index, analyzer, failures, stop = index_of(document), ChunkAnalyzer(), [], threading.Event()

    def read():
        while not stop.is_set():
            try:
                if len(reused(analyzer.analyze(document, index))) != 640:
                    failures.append("lost a match")
            except Exception as error:
                failures.append(repr(error))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for seed in range(60):
        records = records_of(words(1000 + seed, 64 * 50), f"{seed:032x}")
        index.add(records)
        if seed % 3:
            index.remove(record.key for record in records)
    stop.set()
    for reader in readers:
        reader.join()
    assert not failures


def test_wrong_settings_are_named():
    with pytest.raises(ValueError, match="min_match_ratio"):
        ChunkAnalyzer(min_match_ratio=0)
    with pytest.raises(ValueError, match="one dimension"):
        ChunkAnalyzer().analyze([[1]], ChunkIndex())


def test_the_index_says_how_long_anchors_are():
    document = words(80, 12)
    assert reused(ChunkAnalyzer().analyze(document, index_of(document, anchor_tokens=8))) == set(range(12))
    assert reused(ChunkAnalyzer().analyze(document, index_of(document))) == set()
