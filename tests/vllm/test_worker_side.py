"""The worker side without an engine: whatever happens in a step, the scheduler gets back what it waits for."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ucm_ray.blend.chunk import Chunk, ChunkType, Run
from ucm_ray.blend.plan import Plan
from ucm_ray.config import BlendSettings, EsaSettings, RetrievalSettings, StoreSettings
from ucm_ray.integration.vllm.catalogue import ChunkCatalogue
from ucm_ray.integration.vllm.meta import BlendConnectorMeta, BlendRequestMeta, IngestJob, SaveJob
from ucm_ray.integration.vllm.saver import Saver
from ucm_ray.integration.vllm.scheduler_side import SchedulerSide
from ucm_ray.integration.vllm.settings import ConnectorSettings
from ucm_ray.integration.vllm.worker_side import WorkerSide
from ucm_ray.keys import chunk_key
from ucm_ray.store import ChunkMeta, PosixStage

NAMESPACE = "a0" * 16
BLOCK = 32
LAYERS, HEADS, HEAD_DIM = 2, 1, 8
NAMES = ("plan", "save", "ingest")


def chunk_meta(number: int, position: int = 0, source: str = "5e") -> ChunkMeta:
    token_ids = np.arange(64, dtype=np.int32) + number
    return ChunkMeta(chunk_key(NAMESPACE, token_ids), NAMESPACE, token_ids, source, position, LAYERS, HEADS, HEAD_DIM,
                     "float32", context_key="c0" * 16)


def plan_of(meta: ChunkMeta, request_id: str = "plan", blocks=(7, 8, 9)) -> BlendRequestMeta:
    """A request whose tokens [32, 96) are those of a stored chunk."""
    chunk = Chunk(32, 96, ChunkType.FULL_MATCH, meta.key, meta.source_position, 0, meta.source_id, (), meta.context_key)
    plan = Plan(32, 96, (chunk,), (Run(32, 96, meta.source_id, 32 - meta.source_position),), (), None, "none", 0.0, 64)
    token_ids = np.concatenate([np.zeros(32, np.int32), meta.token_ids])
    return BlendRequestMeta(request_id, [chunk], [], [], {}, [], plan, token_ids, np.array(blocks), NAMESPACE)


def save_of(*metas: ChunkMeta, request_id: str = "save") -> SaveJob:
    return SaveJob(request_id, np.arange(20), [(64 * number, meta) for number, meta in enumerate(metas)])


def everything(**more) -> BlendConnectorMeta:
    """A step with a plan, a save and an ingest of three different chunks."""
    ingest = IngestJob("ingest", np.arange(100, dtype=np.int32), 36, np.arange(4), [(36, chunk_meta(3))])
    return BlendConnectorMeta({"plan": plan_of(chunk_meta(1))}, saves=[save_of(chunk_meta(2))], ingests=[ingest],
                              **more)


def scheduler_side_of(catalogue: ChunkCatalogue) -> SchedulerSide:
    """As much of one as takes in reports, of two ranks; no requests."""
    side = object.__new__(SchedulerSide)
    side._states, side._reading, side._world_size, side._disabled, side.esa = {}, {}, 2, "", None
    side._catalogue, side._saver = catalogue, SimpleNamespace(released=lambda request_ids: None)
    return side


def saver_of(free_blocks: int) -> Saver:
    """On a pool of 100 blocks."""
    saver = object.__new__(Saver)
    saver._settings, saver._catalogue, saver._source_prefix = BlendSettings(), ChunkCatalogue(None, 1.0), "5e" * 4
    saver._shape = {"num_layers": LAYERS, "num_kv_heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float32"}
    saver._esa, saver._block_size, saver._held, saver._ingests, saver._count = None, BLOCK, set(), {}, lambda *_: None
    saver.bind_block_pool(SimpleNamespace(num_gpu_blocks=100, get_num_free_blocks=lambda: free_blocks))
    return saver


def wait_for(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture()
def worker(tmp_path):
    """As after a good start-up, on a cache that only knows its own shape."""
    config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=1),
                             cache_config=SimpleNamespace(block_size=BLOCK))
    settings = ConnectorSettings(StoreSettings(storage_backends=[str(tmp_path)]), BlendSettings(), EsaSettings(),
                                 RetrievalSettings(), {})
    worker = WorkerSide(config, settings)
    worker._ready = True
    worker._paged = SimpleNamespace(names=["layer"] * LAYERS, num_kv_heads=HEADS, head_dim=HEAD_DIM, block_size=BLOCK)
    worker._virtual = SimpleNamespace(max_tokens=512, max_rows=16, run=lambda rows, *_: 1)
    worker._placer = SimpleNamespace(place=lambda *_: None, copy_out=lambda blocks, start, kv: kv.fill_(start))
    yield worker
    worker.shutdown()


def assert_all_given_back(worker: WorkerSide, why: str) -> None:
    report = worker.take_report()
    assert why in report.reports["plan"].error
    assert worker.take_invalid_blocks() == {8, 9}
    assert worker.get_finished(set()) == ({"save", "ingest"}, {"plan"})
    assert (NAMESPACE, chunk_meta(2).key) in report.lost and not report.saved
    assert not (worker._tasks or worker._saves or worker._ingests)


# ---- a failed start-up check


@pytest.mark.parametrize("ratio", [None, 1, 2])
def test_an_engine_that_failed_its_check_gives_everything_back_at_once(worker, ratio):
    """`ratio` None: the check did not come as far as knowing the cache, whose blocks may be smaller than the engine's.
    The scheduler sends plans until it has the first step's report."""
    worker._ready = False
    if ratio is None:
        worker._paged = None
        del worker._virtual, worker._placer
    else:
        worker._block_ratio = ratio
        worker._paged.block_size = BLOCK // ratio
    worker.after_forward(everything())
    assert_all_given_back(worker, "self-check")


# ---- steps that break down


def test_a_store_that_cannot_be_cleared_stops_nothing(worker, monkeypatch):
    def stale(*_):
        raise OSError("Stale file handle")

    monkeypatch.setattr(worker._store.posix, "clear", stale)
    worker.after_forward(everything(clear_store=True))
    assert_all_given_back(worker, "cleared")


def test_a_step_that_breaks_down_early_gives_the_new_plan_back(worker, monkeypatch):
    def broken(*_):
        raise RuntimeError("cannot schedule new futures")

    with monkeypatch.context() as patch:
        patch.setattr(worker._readers, "submit", broken)
        with pytest.raises(RuntimeError):
            worker.after_forward(everything())
    worker.abandon(RuntimeError("out of luck"))
    assert_all_given_back(worker, "out of luck")


# ---- clearing the store


def test_a_cleared_store_gets_nothing_of_before(worker, monkeypatch, tmp_path):
    """Not what is being written, not what waits in blocks, not the passage; new text is stored as ever."""
    gate, begun, write = threading.Event(), threading.Event(), worker._store.posix.save

    def slow_write(meta, kv):
        begun.set()
        return gate.wait(30) and write(meta, kv)

    monkeypatch.setattr(worker._store.posix, "save", slow_write)
    metas = [chunk_meta(number) for number in range(40)]
    worker.after_forward(BlendConnectorMeta(saves=[save_of(*metas)], num_scheduled_tokens=1))
    assert worker.take_report().saved == metas[:2] and begun.wait(30)
    worker._sink = (np.arange(4), torch.zeros(1))
    worker.after_forward(everything(clear_store=True))
    report = worker.take_report()
    assert not report.saved and set(report.reports) == {"plan"}
    assert worker.get_finished(set()) == ({"save", "ingest"}, {"plan"})
    assert worker._sink is None and not worker._unwritten
    # the same text, computed by the new weights
    worker.after_forward(BlendConnectorMeta(saves=[save_of(metas[1], request_id="new")]))
    assert worker.get_finished(set()) == ({"new"}, None) and worker._unwritten
    gate.set()
    assert worker._store.flush(30)
    assert [path.name.split(".")[0] for path in tmp_path.rglob("*.kv")] == [metas[1].key]
    assert (NAMESPACE, metas[1].key) not in worker.take_report().lost and not worker._unwritten
    assert worker._load(NAMESPACE, [metas[0].key, metas[1].key])[0] is None


# ---- what the index believes and what the store holds


def test_a_plan_made_from_another_copy_than_the_stored_one_tells_which_that_is(worker):
    """The store keeps the first copy of a text; what is missing is another matter."""
    stored, believed, missing = chunk_meta(1, 640, "a1"), chunk_meta(1, 320, "b2"), chunk_meta(9)
    assert worker._store.save(stored, torch.zeros(stored.shape))
    worker.after_forward(BlendConnectorMeta({"one": plan_of(believed, "one"), "two": plan_of(missing, "two")}))
    report = worker.take_report()
    assert report.stored == [stored] and report.lost == [(NAMESPACE, missing.key)]
    side = scheduler_side_of(ChunkCatalogue(None, 1.0))
    index = side._catalogue.index(NAMESPACE)
    side._catalogue.add([believed, missing])
    side.update(SimpleNamespace(finished_sending=None, kv_connector_worker_meta=report))
    assert index.get(stored.key).source_position == 640 and missing.key not in index
    # of what was computed a second time the first copy stays known
    side._catalogue.add([believed])
    assert index.get(stored.key).source_position == 640


def test_a_chunk_that_could_not_be_read_once_is_found_again(tmp_path):
    stage = PosixStage([tmp_path], 2**30)
    assert all(stage.save(meta, torch.zeros(meta.shape)) for meta in map(chunk_meta, range(2)))
    catalogue = ChunkCatalogue(stage, 0.05)
    index = catalogue.index(NAMESPACE)
    keys = [chunk_meta(number).key for number in range(2)]
    wait_for(lambda: len(index) == 2)
    stage.folder_of(keys[1]).remove(NAMESPACE, keys[1])
    catalogue.remove(NAMESPACE, keys)
    wait_for(lambda: keys[0] in index)
    assert keys[1] not in index
    catalogue.close()


def test_a_text_that_stands_twice_in_a_request_is_saved_once(worker):
    saver = saver_of(free_blocks=100)
    tokens = np.concatenate([np.arange(64), np.arange(64), np.arange(64) + 9]).astype(np.int32)
    chunks = saver._new_chunks(tokens, 0, len(tokens), NAMESPACE, "request", keep_tail=False)
    assert [start for start, _ in chunks] == [meta.source_position for _, meta in chunks] == [0, 128]


# ---- blocks of finished requests


@pytest.mark.parametrize("scheduled, prefilled, chunks", [(0, 0, 16), (300, 0, 2), (300, 64, 2), (600, 512, 8)])
def test_a_step_copies_out_as_much_as_it_prefills(worker, scheduled, prefilled, chunks):
    """And beside pure decode two chunks, however many requests decode."""
    job = save_of(*map(chunk_meta, range(40)))
    worker.after_forward(BlendConnectorMeta(saves=[job], num_scheduled_tokens=scheduled, num_prefill_tokens=prefilled))
    assert len(worker.take_report().saved) == chunks and worker.get_finished(set()) == (None, None)


def test_a_large_step_fills_the_queue_of_the_store_and_no_more(worker, monkeypatch):
    gate, write = threading.Event(), worker._store.posix.save
    monkeypatch.setattr(worker._store.posix, "save", lambda meta, kv: gate.wait(30) and write(meta, kv))
    worker._store.save_queue_bytes = 5 * chunk_meta(0).payload_bytes
    job = save_of(*map(chunk_meta, range(40)))
    worker.after_forward(BlendConnectorMeta(saves=[job], num_scheduled_tokens=9000, num_prefill_tokens=9000))
    gate.set()
    report = worker.take_report()
    assert len(report.saved) == 4 and not report.lost and len(job.chunks) == 36


def test_scarce_blocks_are_released_unsaved_but_for_what_a_plan_or_a_request_wants(worker):
    kept = save_of(*map(chunk_meta, range(50, 60)), request_id="kept")
    kept.droppable = False
    job = save_of(*map(chunk_meta, range(10)))
    plan = plan_of(chunk_meta(2))
    worker.after_forward(BlendConnectorMeta({"plan": plan}, saves=[job, kept], drop_saves=True, num_scheduled_tokens=9))
    wait_for(lambda: not worker._tasks or worker.after_forward(BlendConnectorMeta(num_scheduled_tokens=9)))
    report = worker.take_report()
    assert report.reports["plan"].failed_chunks == 0 and "save" in worker.get_finished(set())[0]
    assert sorted(report.lost) == sorted((NAMESPACE, chunk_meta(number).key) for number in range(3, 10))
    while worker._saves:
        worker.after_forward(BlendConnectorMeta(num_scheduled_tokens=9, drop_saves=True))
    assert not worker.take_report().lost and worker.get_finished(set())[0] == {"kept"}


def test_nothing_is_held_while_blocks_are_scarce_but_what_a_request_asks_for():
    ids = list(range(200))
    request = SimpleNamespace(
        request_id="one", all_token_ids=ids, num_tokens=200, num_prompt_tokens=190, prompt_token_ids=ids[:190],
        sampling_params=SimpleNamespace(prompt_logprobs=None), mm_features=[], prompt_embeds=None,
        skip_reading_prefix_cache=False, lora_request=None, resumable=False)

    def held(free_blocks: int, ingest_from: int | None = None) -> list[SaveJob]:
        state = SimpleNamespace(controls=SimpleNamespace(save=None, ingest_from=ingest_from),
                                namespace=SimpleNamespace(hex=NAMESPACE), receipt=SimpleNamespace(reused_tokens=0))
        saver, meta = saver_of(free_blocks), BlendConnectorMeta()
        assert saver.hold(request, state, np.arange(7), meta) == saver.has_held_requests == bool(meta.saves)
        return meta.saves

    assert not held(9) and [job.droppable for job in held(10)] == [True]
    assert [job.droppable for job in held(9, ingest_from=64)] == [False]


@pytest.mark.parametrize("free_blocks, held, dropped", [(9, {"one"}, True), (10, {"one"}, False), (9, set(), False)])
def test_held_blocks_are_asked_back_when_they_become_scarce(free_blocks, held, dropped):
    side = scheduler_side_of(ChunkCatalogue(None, 1.0))
    side._saver, side._meta = saver_of(free_blocks), BlendConnectorMeta()
    side._saver._held = held
    step = SimpleNamespace(total_num_scheduled_tokens=515, num_scheduled_tokens={"a": 1, "b": 512, "c": 1, "d": 1})
    meta = side.build_meta(step)
    assert (meta.drop_saves, meta.num_prefill_tokens) == (dropped, 511)


# ---- reports that come too late


def test_a_report_of_an_aborted_request_leaves_nothing_behind():
    side = scheduler_side_of(ChunkCatalogue(None, 1.0))
    side._agree("aborted", np.ones(1, bool), 1)
    assert not side._reading
