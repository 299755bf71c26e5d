"""Cache in front of files: what is read once, what runs in the background, the seed's calls."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.store.conftest import NAMESPACE, OTHER_NAMESPACE, chunk_path, key, make_chunk, reopened
from ucm_ray.config import ConfigError
from ucm_ray.store import STAGES, CacheStage, StoreError, UcmConnectorFactory, register_stage
from ucm_ray.store.buffers import BufferPool


def fill(pipeline, count: int) -> None:
    for number in range(count):
        assert pipeline.save(*make_chunk(number))


def kv_of(number: int) -> torch.Tensor:
    return make_chunk(number)[1]


def test_a_chunk_is_read_from_disk_once(pipeline):
    fill(pipeline, 1)
    again = reopened(pipeline)
    assert torch.equal(again.load(NAMESPACE, key(0))[1], kv_of(0))
    chunk_path(pipeline.posix, 0).unlink()
    assert torch.equal(again.load(NAMESPACE, key(0))[1], kv_of(0))
    assert again.posix.counters["hits"] == 1 and again.cache.counters["hits"] == 1
    again.close()


def test_threads_that_want_the_same_chunk_share_one_read(pipeline):
    fill(pipeline, 1)
    again = reopened(pipeline)
    barrier = threading.Barrier(8)
    results = []

    def want() -> None:
        barrier.wait()
        results.append(again.load(NAMESPACE, key(0)))

    threads = [threading.Thread(target=want) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and all(torch.equal(kv, kv_of(0)) for _, kv in results)
    assert again.posix.counters["hits"] == 1
    again.close()


def test_the_cache_keeps_its_own_copy_of_what_is_saved(pipeline):
    meta, kv = make_chunk(0)
    pipeline.save(meta, kv)
    kv.zero_()
    assert torch.equal(pipeline.load(NAMESPACE, key(0))[1], kv_of(0))


def test_stages_never_differ_in_the_source_of_a_chunk(pipeline):
    pipeline.save(*make_chunk(0, source_id="aa"))
    again = reopened(pipeline)
    assert again.save(*make_chunk(0, source_id="bb"))
    assert again.load(NAMESPACE, key(0))[0].source_id == "aa"
    again.close()


def test_load_many_keeps_the_order_and_has_gaps_where_chunks_are_missing(pipeline):
    fill(pipeline, 6)
    again = reopened(pipeline)
    again.load(NAMESPACE, key(3))
    os.truncate(chunk_path(pipeline.posix, 1), 5000)
    chunks = again.load_many(NAMESPACE, [key(number) for number in (5, 1, 77, 3, 0, 0)])
    assert [chunk and chunk[0].key for chunk in chunks] == [key(5), None, None, key(3), key(0), key(0)]
    assert torch.equal(chunks[0][1], kv_of(5))
    assert again.load_many(NAMESPACE, []) == []
    again.close()


def test_prefetch_brings_chunks_into_host_memory(pipeline):
    fill(pipeline, 3)
    again = reopened(pipeline)
    done = again.prefetch(NAMESPACE, [key(number) for number in (0, 2, 9, 2)]).result(30)
    assert done == {key(0): True, key(2): True, key(9): False}
    assert again.cache.lookup(NAMESPACE, [key(0), key(1), key(2)]).tolist() == [True, False, True]
    assert again.prefetch(NAMESPACE, []).result(1) == {}
    again.close()


def test_saving_in_the_background_is_bounded_and_refuses_at_once(tmp_path, monkeypatch):
    pipeline = UcmConnectorFactory.create_connector({"storage_backends": str(tmp_path)}, 0)
    pipeline.save_queue_bytes = 3 * make_chunk(0)[0].payload_bytes
    gate = threading.Event()
    save = pipeline.posix.save
    monkeypatch.setattr(pipeline.posix, "save", lambda meta, kv: gate.wait(30) and save(meta, kv))
    start = time.monotonic()
    futures = [pipeline.save_async(*make_chunk(number)) for number in range(5)]
    assert time.monotonic() - start < 5 and [future.done() for future in futures] == [False] * 3 + [True] * 2
    assert not pipeline.flush(0.05) and pipeline.stats()["save_queue"] == 3
    gate.set()
    assert pipeline.flush(30)
    assert [future.result() for future in futures] == [True] * 3 + [False] * 2
    assert pipeline.lookup(NAMESPACE, [key(number) for number in range(5)]).tolist() == [True] * 3 + [False] * 2
    pipeline.close()


def test_what_is_given_to_the_background_is_kept_in_host_memory_without_a_copy(pipeline):
    meta, kv = make_chunk(3)
    given = pipeline.buffer(meta)
    given.copy_(kv)
    assert pipeline.save_async(meta, given).result(30)
    assert pipeline.cache.load(NAMESPACE, meta.key)[1].data_ptr() == given.data_ptr()
    again = reopened(pipeline)
    assert torch.equal(again.load(NAMESPACE, meta.key)[1], kv)
    again.close()


def test_what_was_given_to_the_background_before_a_clear_does_not_come_back(pipeline, monkeypatch):
    """Neither the chunk that is being written nor the ones behind it; those of other namespaces do not notice."""
    gate, begun, save = threading.Event(), threading.Event(), pipeline.posix.save

    def slow_save(meta, kv):
        begun.set()
        return gate.wait(30) and save(meta, kv)

    monkeypatch.setattr(pipeline.posix, "save", slow_save)
    before = [pipeline.save_async(*make_chunk(number)) for number in range(2)]
    other = pipeline.save_async(*make_chunk(5, namespace=OTHER_NAMESPACE))
    assert begun.wait(30)
    pipeline.clear(NAMESPACE)
    after = pipeline.save_async(*make_chunk(2))
    gate.set()
    assert [future.result(30) for future in (*before, other, after)] == [False, False, True, True]
    assert pipeline.lookup(NAMESPACE, [key(number) for number in range(3)]).tolist() == [False, False, True]
    assert [chunk_path(pipeline.posix, number).exists() for number in range(3)] == [False, False, True]
    gate.clear()
    begun.clear()
    last = pipeline.save_async(*make_chunk(3))
    assert begun.wait(30)
    pipeline.clear()
    gate.set()
    assert not last.result(30) and not pipeline.lookup(NAMESPACE, [key(number) for number in range(4)]).any()


def test_kv_of_another_shape_than_its_meta_is_kept_nowhere(pipeline):
    meta, kv = make_chunk(3)
    assert not pipeline.save_async(meta, kv[:, :, 1:].contiguous()).result(30)
    assert pipeline.load(NAMESPACE, meta.key) is None


def test_memory_is_ready_before_the_next_chunk_asks_for_it(pipeline):
    meta, kv = make_chunk(3)
    pool = pipeline.cache.pool
    assert not pool.free_bytes
    assert pipeline.save_async(meta, kv).result(30)
    ready = pool.free_bytes
    assert ready >= 2 * meta.payload_bytes
    buffer = pipeline.buffer(meta)
    assert pool.free_bytes < ready
    del buffer
    assert pool.free_bytes == ready


def test_background_writing_runs_at_the_lowest_priority(pipeline):
    assert pipeline._writer.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result(10) == 19
    assert os.getpriority(os.PRIO_PROCESS, 0) < 19


def test_the_threads_do_not_inherit_the_processor_the_engine_is_bound_to(tmp_path):
    code = ("import os, sys; import ucm_ray.store.threads; from ucm_ray.store import UcmConnectorFactory\n"
            "given = os.sched_getaffinity(0); os.sched_setaffinity(0, {min(given)})\n"
            "store = UcmConnectorFactory.create_connector({'storage_backends': sys.argv[1]}, 0)\n"
            "assert store._readers.submit(os.sched_getaffinity, 0).result() == given\n"
            "assert store._writer.submit(os.sched_getaffinity, 0).result() == given\n"
            "assert os.sched_getaffinity(0) == {min(given)}\n")
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120,
                   env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])})


def test_closing_finishes_what_was_accepted(pipeline):
    futures = [pipeline.save_async(*make_chunk(number)) for number in range(10)]
    pipeline.close()
    assert all(future.result(0) for future in futures)


def test_evicted_files_leave_the_cache_too_and_listeners_hear_of_it(tmp_path):
    pipeline = UcmConnectorFactory.create_connector(
        {"storage_backends": str(tmp_path), "posix_capacity_bytes": 30_000}, 0)
    gone = []
    pipeline.on_evict.append(lambda namespace, keys: gone.extend(keys))
    fill(pipeline, 10)
    left = pipeline.lookup(NAMESPACE, [key(number) for number in range(10)])
    assert 0 < left.sum() < 10
    assert sorted(gone) == sorted(key(number) for number in range(10) if not left[number])
    pipeline.close()


def test_what_is_deleted_is_gone_everywhere(pipeline):
    fill(pipeline, 3)
    assert pipeline.delete(NAMESPACE, [key(0), key(9)]) == 1
    assert pipeline.load(NAMESPACE, key(0)) is None
    assert pipeline.clear(OTHER_NAMESPACE) == 0 and pipeline.clear() == 2
    assert not pipeline.lookup(NAMESPACE, [key(number) for number in range(3)]).any()


def test_a_chunk_deleted_while_it_is_read_does_not_come_back(pipeline, monkeypatch):
    fill(pipeline, 1)
    again = reopened(pipeline)
    load = again.posix.load

    def load_and_delete(namespace, name):
        chunk = load(namespace, name)
        again.delete(namespace, [name])
        return chunk

    monkeypatch.setattr(again.posix, "load", load_and_delete)
    assert again.load(NAMESPACE, key(0)) is not None
    assert not again.lookup(NAMESPACE, [key(0)]).any()
    again.close()


def test_cache_hits_count_as_use_of_the_file(pipeline):
    fill(pipeline, 1)
    path = chunk_path(pipeline.posix, 0)
    os.utime(path, (1000, 1000))
    pipeline.load(NAMESPACE, key(0))
    assert path.stat().st_mtime > time.time() - 60


def test_layers_are_read_in_order_and_verified(pipeline):
    fill(pipeline, 4)
    again = reopened(pipeline)
    again.load(NAMESPACE, key(2))
    reader = again.layers(NAMESPACE, [key(number) for number in (0, 9, 2)])
    assert [meta and meta.key for meta in reader.metas] == [key(0), None, key(2)]
    layers = list(reader)
    assert len(layers) == 3
    for layer, (first, missing, cached) in enumerate(layers):
        assert torch.equal(first, kv_of(0)[layer]) and missing is None and torch.equal(cached, kv_of(2)[layer])
    assert reader.failed == {key(9)}
    again.close()


def test_a_bad_layer_stops_its_chunk_and_no_other(pipeline):
    fill(pipeline, 2)
    again = reopened(pipeline)
    path = chunk_path(pipeline.posix, 0)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    reader = again.layers(NAMESPACE, [key(0), key(1)], read_ahead=1)
    layers = list(reader)
    assert layers[1][0] is not None and layers[2][0] is None
    assert torch.equal(layers[2][1], kv_of(1)[2])
    assert reader.failed == {key(0)} and not path.exists()
    again.close()


def test_a_bad_layer_of_a_file_that_cannot_be_removed_is_none_all_the_same(pipeline, monkeypatch):
    def read_only(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    fill(pipeline, 1)
    path = chunk_path(pipeline.posix, 0)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    chunk = pipeline.posix.open_chunk(NAMESPACE, key(0))
    monkeypatch.setattr(pipeline.posix.folder_of(key(0)), "remove", read_only)
    assert chunk.read_layer(0) is not None and chunk.read_layer(2) is None
    assert pipeline.posix.counters["corrupt"] == pipeline.posix.counters["read_errors"] == 1
    chunk.close()


def test_load_sync_is_the_seeds_call(pipeline):
    for number, position in ((0, 40), (1, 56)):
        pipeline.save(*make_chunk(number, source_position=position))
    kv = pipeline.load_sync(block_ids=[key(0)], offset=40)
    assert torch.equal(kv, kv_of(0))
    assert torch.equal(pipeline.load_sync([key(0), key(1)]), torch.cat([kv_of(0), kv_of(1)], dim=2))
    assert torch.equal(pipeline.load_sync([key(0), key(1)], offset=45),
                       torch.cat([kv_of(0)[:, :, 5:], kv_of(1)], dim=2))
    assert pipeline.load_sync([key(0), key(5)]) is None and pipeline.load_sync([]) is None
    pipeline.save(*make_chunk(7, namespace=OTHER_NAMESPACE))
    assert torch.equal(pipeline.load_sync([key(7)], namespace=OTHER_NAMESPACE), kv_of(7))
    with pytest.raises(ValueError, match="2 namespaces"):
        pipeline.load_sync([key(0)])


def test_a_buffer_is_not_reused_while_any_view_of_it_lives():
    pool = BufferPool(2**24)
    tensor, view = pool.tensor((1000,))
    tensor.fill_(7)
    address, last = tensor.data_ptr(), tensor.view(10, 100)[3, 5:]
    del tensor, view
    other, _ = pool.tensor((1000,))
    other.fill_(9)
    assert other.data_ptr() != address and last.eq(7).all()
    del last
    gc.collect()
    assert pool.tensor((1000,))[0].data_ptr() == address and pool.free_bytes == 0


def test_free_buffers_are_bounded():
    pool = BufferPool(200_000)
    held = [pool.tensor((60_000,)) for _ in range(10)]
    assert pool.free_bytes == 0
    held.clear()
    assert 0 < pool.free_bytes <= 200_000


def test_unknown_stages_and_wrong_numbers_are_one_clear_sentence(tmp_path):
    backends = {"storage_backends": str(tmp_path)}
    with pytest.raises(StoreError, match="unknown stage 'Tape', known are Cache, (Peers, )?Posix"):
        UcmConnectorFactory.create_connector(backends | {"store_pipeline": "Cache|Tape"}, 0)
    with pytest.raises(StoreError, match="cache_capacity_bytes is 'lots', expected a number of bytes"):
        UcmConnectorFactory.create_connector(backends | {"cache_capacity_bytes": "lots"}, 0)
    with pytest.raises(StoreError, match="io_threads is 0, expected"):
        UcmConnectorFactory.create_connector(backends | {"io_threads": 0}, 0)
    with pytest.raises(StoreError, match="storage_backends is empty"):
        UcmConnectorFactory.create_connector({"storage_backends": []}, 0)
    assert issubclass(StoreError, ConfigError)


def test_a_new_stage_takes_part_by_its_name(tmp_path):
    @register_stage("Second")
    def second(context):
        stage = CacheStage(2**24, context.pool)
        stage.name = "Second"
        return stage

    try:
        pipeline = UcmConnectorFactory.create_connector(
            {"storage_backends": [str(tmp_path)], "store_pipeline": "Cache|Second|Posix",
             "cache_capacity_bytes": 4096}, 0)
        fill(pipeline, 2)
        assert pipeline.stages[1].lookup(NAMESPACE, [key(0), key(1)]).all()
        assert torch.equal(pipeline.load(NAMESPACE, key(0))[1], kv_of(0))
        assert set(pipeline.stats()) >= {"Cache", "Second", "Posix"}
        pipeline.close()
    finally:
        del STAGES["Second"]


def test_memory_alone_or_files_alone_make_a_pipeline(tmp_path):
    for names in ("Cache", "Posix"):
        pipeline = UcmConnectorFactory.create_connector(
            {"storage_backends": str(tmp_path / names), "store_pipeline": names}, 0)
        fill(pipeline, 2)
        assert pipeline.lookup(NAMESPACE, [key(0), key(5)]).tolist() == [True, False]
        assert torch.equal(pipeline.load_sync([key(1)]), kv_of(1))
        assert [meta.key for meta in pipeline.scan(NAMESPACE) if meta.key == key(0)] == [key(0)]
        assert pipeline.load_many(NAMESPACE, [key(1), key(5)])[1] is None
        assert len(list(pipeline.layers(NAMESPACE, [key(1)]))) == 3
        pipeline.close()


def test_the_store_imports_neither_vllm_nor_ray():
    import ucm_ray.store

    for source in Path(ucm_ray.store.__file__).parent.glob("*.py"):
        assert "import vllm" not in source.read_text() and "import ray" not in source.read_text(), source
