"""The stage of files: look-up, refusal of what is foreign, restart, disk faults, ranks."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from tests.store.conftest import NAMESPACE, OTHER_NAMESPACE, chunk_path, file_bytes, key, make_chunk
from ucm_ray.store import PosixStage, StoreError, UcmConnectorFactory


def same(chunk, number: int = 0, **kwargs) -> bool:
    meta, kv = make_chunk(number, **kwargs)
    return chunk is not None and chunk[0] == meta and torch.equal(chunk[1], kv)


def test_every_key_of_a_batch_is_answered_on_its_own(stage):
    for number in (1, 4, 5):
        assert stage.save(*make_chunk(number))
    found = stage.lookup(NAMESPACE, [key(number) for number in range(7)] + ["../../etc/passwd", "", "zz"])
    assert found.tolist() == [False, True, False, False, True, True, False, False, False, False]
    assert not stage.lookup(OTHER_NAMESPACE, [key(1)]).any()
    assert len(stage.lookup(NAMESPACE, [])) == 0


def test_saved_chunks_survive_a_restart(stage):
    for number in range(3):
        stage.save(*make_chunk(number))
    stage.close()
    again = PosixStage([stage.folders[0].root], 2**30)
    assert all(same(again.load(NAMESPACE, key(number)), number) for number in range(3))
    assert again.stats()["bytes"] == stage.stats()["bytes"] > 0
    assert {meta.key for meta in again.scan(NAMESPACE)} == {key(number) for number in range(3)}
    assert again.namespaces() == [NAMESPACE]


def test_size_is_right_after_a_crash_that_left_the_counter_wrong(stage):
    stage.save(*make_chunk(0))
    right = stage.stats()["bytes"]
    stage.folders[0].add_used(12345)
    again = PosixStage([stage.folders[0].root], 2**30)
    again.save(*make_chunk(1))
    assert again.stats()["bytes"] == 2 * right


def test_missing_chunks_and_odd_names_load_as_none(stage):
    assert stage.load(NAMESPACE, key(0)) is None
    assert stage.load(NAMESPACE, "../x") is None and stage.load("..", key(0)) is None
    assert stage.counters["misses"] == 3
    assert stage.delete("..", ["../x"]) == 0


@pytest.mark.parametrize("foreign", [dict(namespace=OTHER_NAMESPACE), dict(rank=1, world_size=2), dict(number=2)])
def test_a_file_of_somebody_else_is_refused_and_removed(tmp_path, stage, foreign):
    meta, kv = make_chunk(**{"number": 0, **foreign})
    other = PosixStage([tmp_path / "other"], 2**30, meta.rank, meta.world_size)
    other.save(meta, kv)
    target = chunk_path(stage, 0)
    target.parent.mkdir(parents=True)
    shutil.copy(other.folder_of(meta.key).path(meta.namespace, meta.key, meta.rank), target)
    assert stage.lookup(NAMESPACE, [key(0)]).all()
    assert stage.load(NAMESPACE, key(0)) is None
    assert stage.counters["foreign"] == 1 and not target.exists()


@pytest.mark.parametrize("content", [b"", b"UCMRAYKV", os.urandom(10_000)])
def test_garbage_in_place_of_a_chunk_costs_nothing_but_time(stage, content):
    stage.save(*make_chunk(0))
    chunk_path(stage, 0).write_bytes(content)
    assert list(stage.scan(NAMESPACE)) == []
    assert not chunk_path(stage, 0).exists()
    assert stage.save(*make_chunk(0)) and same(stage.load(NAMESPACE, key(0)))


def test_a_folder_in_place_of_a_chunk_does_not_raise(stage):
    chunk_path(stage, 0).mkdir(parents=True)
    assert stage.load(NAMESPACE, key(0)) is None
    assert stage.save(*make_chunk(0)) in (True, False)
    assert stage.delete(NAMESPACE, [key(0)]) == 0


def test_one_copy_per_content(stage):
    assert stage.save(*make_chunk(0, source_id="aa")) and stage.save(*make_chunk(0, source_id="bb"))
    assert stage.counters["saved"] == 1
    assert stage.load(NAMESPACE, key(0))[0].source_id == "aa"


def test_kv_that_is_not_what_its_meta_says_is_refused(stage):
    meta, kv = make_chunk(0)
    assert not stage.save(meta, kv.float())
    assert not stage.save(meta, kv[:, :, :-1])
    assert not stage.save(make_chunk(0, rank=1, world_size=2)[0], kv)
    assert stage.counters["refused"] == 3


def test_kv_that_is_a_strided_view_is_saved_as_what_it_shows(stage):
    meta, kv = make_chunk(0)
    wide = torch.zeros(*meta.shape[:-1], 16, dtype=kv.dtype)
    wide[..., ::2] = kv
    assert stage.save(meta, wide[..., ::2]) and same(stage.load(NAMESPACE, key(0)))


def test_an_unwritable_root_is_one_clear_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="storage_backends: .*file/store cannot be written .*expected a folder"):
        UcmConnectorFactory.create_connector({"storage_backends": str(tmp_path / "file" / "store")}, 0)


def test_several_roots_share_the_chunks(tmp_path):
    stage = PosixStage([tmp_path / "a", tmp_path / "b"], 2**30)
    for number in range(32):
        stage.save(*make_chunk(number))
    assert all(any((tmp_path / root).rglob("*.kv")) for root in "ab")
    assert all(same(stage.load(NAMESPACE, key(number)), number) for number in range(32))
    assert len(list(stage.scan(NAMESPACE))) == 32 and stage.clear() == 32


def test_clear_takes_one_namespace_or_all(stage):
    stage.save(*make_chunk(0))
    stage.save(*make_chunk(1, namespace=OTHER_NAMESPACE))
    assert stage.clear(NAMESPACE) == 1
    assert stage.lookup(OTHER_NAMESPACE, [key(1)]).all()
    assert stage.clear() == 1 and stage.stats()["bytes"] == 0


def test_a_root_removed_under_the_store_is_made_anew(stage):
    stage.save(*make_chunk(0))
    shutil.rmtree(stage.folders[0].root)
    assert stage.load(NAMESPACE, key(0)) is None and stage.delete(NAMESPACE, [key(0)]) == 0
    assert stage.stats()["bytes"] == 0
    assert stage.save(*make_chunk(0)) and same(stage.load(NAMESPACE, key(0)))


def test_old_temporary_files_go_and_fresh_ones_stay(stage):
    stage.save(*make_chunk(0))
    shelf = chunk_path(stage, 0).parent
    for name, age_s in (("old.tmp", 3600), ("fresh.tmp", 0)):
        (shelf / name).touch()
        os.utime(shelf / name, (time.time() - age_s,) * 2)
    PosixStage([stage.folders[0].root], 2**30).save(*make_chunk(1))
    assert not (shelf / "old.tmp").exists() and (shelf / "fresh.tmp").exists()


# disk faults


@pytest.fixture
def small_disk(tmp_path):
    """A file system that holds six chunks and some."""
    folder = tmp_path / "disk"
    folder.mkdir()
    size = 7 * file_bytes(tmp_path) + 16 * 4096
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=False,
                      capture_output=True).returncode:
        pytest.skip("this user may not mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_evicts_the_oldest(small_disk):
    stage = PosixStage([small_disk / "store"], 2**30)
    gone = []
    stage.on_evict.append(lambda namespace, keys: gone.extend(keys))
    for number in range(20):
        assert stage.save(*make_chunk(number)), number
    assert gone[0] == key(0) and same(stage.load(NAMESPACE, key(19)), 19)
    assert not list(Path(small_disk).rglob("*.tmp"))


def test_a_disk_full_of_other_things_turns_saving_off_with_one_line(small_disk, caplog):
    stage = PosixStage([small_disk / "store"], 2**30)
    assert stage.save(*make_chunk(0))
    stage.pin(NAMESPACE, [key(0)])
    with open(small_disk / "other", "wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(b"x" * 4096)
    assert [stage.save(*make_chunk(number)) for number in range(1, 5)] == [False] * 4
    assert same(stage.load(NAMESPACE, key(0)))
    assert stage.stats()["degraded"]
    assert len([record for record in caplog.records if "not saved" in record.message]) == 1
    (small_disk / "other").unlink()
    stage._degraded_until_s = 0.0
    assert stage.save(*make_chunk(5)) and not stage.stats()["degraded"]


def test_a_write_that_fails_half_way_leaves_nothing_behind(stage, caplog):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        assert [stage.save(*make_chunk(number)) for number in range(3)] == [False, False, False]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [path for path in stage.folders[0].root.rglob("*") if path.suffix in (".kv", ".tmp")]
    assert len([record for record in caplog.records if "not saved" in record.message]) == 1
    assert stage.load(NAMESPACE, key(0)) is None


# tensor-parallel ranks


def ranks(tmp_path) -> list[PosixStage]:
    return [PosixStage([tmp_path / "store"], 2**30, rank, 2) for rank in range(2)]


def test_a_chunk_is_there_when_all_ranks_have_it(tmp_path):
    first, second = ranks(tmp_path)
    first.save(*make_chunk(0, rank=0, world_size=2))
    assert not first.lookup(NAMESPACE, [key(0)]).any() and not second.lookup(NAMESPACE, [key(0)]).any()
    second.save(*make_chunk(0, rank=1, world_size=2))
    assert first.lookup(NAMESPACE, [key(0)]).all() and second.lookup(NAMESPACE, [key(0)]).all()
    assert same(first.load(NAMESPACE, key(0)), rank=0, world_size=2)
    assert same(second.load(NAMESPACE, key(0)), rank=1, world_size=2)


def test_a_bad_file_of_one_rank_takes_the_others_along(tmp_path):
    first, second = ranks(tmp_path)
    for rank, stage in enumerate((first, second)):
        stage.save(*make_chunk(0, rank=rank, world_size=2))
    with open(chunk_path(second, 0), "r+b") as file:
        file.seek(4500)
        file.write(b"changed")
    assert second.load(NAMESPACE, key(0)) is None
    assert first.load(NAMESPACE, key(0)) is None and first.stats()["bytes"] == 0


def test_ranks_never_keep_halves_of_different_sources(tmp_path):
    first, second = ranks(tmp_path)
    for rank, stage in enumerate((first, second)):
        stage.save(*make_chunk(0, rank=rank, world_size=2, source_id="aa", source_position=3))
    chunk_path(second, 0).unlink()
    for rank, stage in reversed(list(enumerate((first, second)))):
        assert stage.save(*make_chunk(0, rank=rank, world_size=2, source_id="bb", source_position=9))
    assert {stage.load(NAMESPACE, key(0))[0].origin for stage in (first, second)} == {("bb", 9)}


# several processes

_CHURN = textwrap.dedent("""
    import random, sys
    from tests.store.conftest import NAMESPACE, key, make_chunk
    from ucm_ray.store import PosixStage
    import torch
    root, seed, capacity = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(seed)
    stage = PosixStage([root], capacity)
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(150):
        number = chance.randrange(20)
        match chance.randrange(8):
            case 0: stage.delete(NAMESPACE, [key(number)])
            case 1: list(stage.scan(NAMESPACE))
            case 2 | 3 | 4:
                chunk = stage.load(NAMESPACE, key(number))
                assert chunk is None or torch.equal(chunk[1], make_chunk(number)[1]), number
            case 5: stage.pin(NAMESPACE, [key(number)]); stage.unpin(NAMESPACE, [key(number)])
            case _: stage.save(*make_chunk(number))
    assert not {"corrupt", "truncated", "foreign", "read_errors", "write_errors"} & set(stage.counters), stage.counters
    print("fine")
""")


def test_processes_that_share_a_folder_never_harm_each_other(tmp_path):
    capacity = 9 * file_bytes(tmp_path)
    root = tmp_path / "store"
    processes = [subprocess.Popen([sys.executable, "-c", _CHURN, str(root), str(seed), str(capacity)],
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                  env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])})
                 for seed in range(3)]
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        output, errors = process.communicate(timeout=120)
        assert output == "fine\n", errors
    size = sum(path.stat().st_size for path in root.rglob("*.kv"))
    assert PosixStage([root], capacity).stats()["bytes"] == size <= capacity
    assert not list(root.rglob("*.tmp"))


def test_a_killed_writer_leaves_no_chunk_and_no_lock(tmp_path):
    root = tmp_path / "store"
    code = ("import os, sys; from tests.store.conftest import *; import ucm_ray.store.chunk_file as f\n"
            "stage = PosixStage([sys.argv[1]], 2**30); f.os.fsync = lambda handle: os._exit(9)\n"
            "stage.pin(NAMESPACE, [key(0)]); stage.save(*make_chunk(0))")
    done = subprocess.run([sys.executable, "-c", code, str(root)], timeout=120, check=False,
                          env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])})
    assert done.returncode == 9
    assert len(list(root.rglob("*.tmp"))) == 1
    stage = PosixStage([root], 2**30)
    assert stage.load(NAMESPACE, key(0)) is None and not stage.lookup(NAMESPACE, [key(0)]).any()
    assert stage.folders[0].pins.all() == set()
    assert stage.save(*make_chunk(0)) and same(stage.load(NAMESPACE, key(0)))
