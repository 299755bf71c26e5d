"""Capacity in bytes: least recently used chunks go first, pinned ones stay."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.store.conftest import NAMESPACE, chunk_path, file_bytes, key, make_chunk
from ucm_ray.store import CacheStage, PosixStage
from ucm_ray.store.kept_pins import KeptPins


def age(stage: PosixStage, *numbers: int) -> None:
    """Let the chunks have been used in this order, long ago."""
    for order, number in enumerate(numbers):
        os.utime(chunk_path(stage, number), (time.time() - 1000 + order,) * 2)


def here(stage, count: int = 10) -> list[int]:
    found = stage.lookup(NAMESPACE, [key(number) for number in range(count)])
    return found.nonzero()[0].tolist()


@pytest.fixture
def small(tmp_path) -> PosixStage:
    """Room for three files and a half."""
    return PosixStage([tmp_path / "store"], int(3.5 * file_bytes(tmp_path)))


def test_files_stay_within_the_capacity(small):
    for number in range(10):
        assert small.save(*make_chunk(number))
        assert sum(path.stat().st_size for path in small.folders[0].root.rglob("*.kv")) <= small.capacity_bytes
    assert small.stats()["evictions"] == 7 and here(small) == [7, 8, 9]


def test_the_file_used_longest_ago_goes_first_and_loading_is_a_use(small):
    gone = []
    small.on_evict.append(lambda namespace, keys: gone.extend((namespace, name) for name in keys))
    for number in (0, 1, 2):
        small.save(*make_chunk(number))
    age(small, 1, 0, 2)
    assert small.load(NAMESPACE, key(1)) is not None
    small.save(*make_chunk(3))
    assert here(small) == [1, 2, 3] and gone == [(NAMESPACE, key(0))]


def test_the_order_of_use_survives_a_restart(small):
    for number in (0, 1, 2):
        small.save(*make_chunk(number))
    age(small, 2, 0, 1)
    again = PosixStage([small.folders[0].root], small.capacity_bytes)
    again.save(*make_chunk(3))
    assert here(again) == [0, 1, 3]


def test_pinned_files_stay_until_unpinned_as_often(small):
    for number in (0, 1, 2):
        small.save(*make_chunk(number))
    age(small, 0, 1, 2)
    small.pin(NAMESPACE, [key(0)])
    small.pin(NAMESPACE, [key(0), key(1)])
    small.save(*make_chunk(3))
    assert here(small) == [0, 1, 3]
    small.unpin(NAMESPACE, [key(0)])
    age(small, 0, 1, 3)
    small.save(*make_chunk(4))
    assert here(small) == [0, 1, 4]
    small.unpin(NAMESPACE, [key(0)])
    small.save(*make_chunk(5))
    assert here(small) == [1, 4, 5]


def test_if_everything_is_pinned_nothing_is_saved(small):
    for number in (0, 1, 2):
        small.save(*make_chunk(number))
    small.pin(NAMESPACE, [key(number) for number in (0, 1, 2)])
    assert not small.save(*make_chunk(3))
    assert here(small) == [0, 1, 2] and small.counters["no_room"] == 1


def test_another_process_respects_a_pin_until_its_owner_ends(small):
    for number in (0, 1, 2):
        small.save(*make_chunk(number))
    age(small, 0, 1, 2)
    code = ("import sys; from tests.store.conftest import *; stage = PosixStage([sys.argv[1]], 2**30)\n"
            "stage.pin(NAMESPACE, [key(0)]); print('pinned', flush=True); sys.stdin.readline(); os._exit(1)"
            ).replace("import sys", "import os, sys")
    owner = subprocess.Popen([sys.executable, "-c", code, str(small.folders[0].root)], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True,
                             env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])})
    assert owner.stdout.readline() == "pinned\n"
    small.save(*make_chunk(3))
    assert here(small) == [0, 2, 3]
    owner.communicate("end\n", timeout=60)
    age(small, 0, 2, 3)
    small.save(*make_chunk(4))
    assert here(small) == [2, 3, 4]
    assert not list(small.folders[0].root.rglob("*.pins"))


def test_a_chunk_larger_than_the_capacity_evicts_nobody(small):
    small.save(*make_chunk(0))
    assert not small.save(*make_chunk(1, num_tokens=500))
    assert here(small) == [0]


def test_a_listener_that_fails_harms_nobody(small):
    small.on_evict.append(lambda namespace, keys: 1 / 0)
    assert all(small.save(*make_chunk(number)) for number in range(5))


def test_host_memory_stays_within_the_capacity_and_forgets_the_least_used():
    meta, kv = make_chunk(0)
    cache = CacheStage(3 * (kv.nbytes + meta.token_ids.nbytes + 2048))
    for number in (0, 1, 2):
        assert cache.save(*make_chunk(number))
    cache.load(NAMESPACE, key(0))
    cache.save(*make_chunk(3))
    assert here(cache) == [0, 2, 3]
    cache.pin(NAMESPACE, [key(2)])
    cache.save(*make_chunk(4))
    assert here(cache) == [2, 3, 4] and cache.stats()["bytes"] <= cache.capacity_bytes
    assert not cache.save(*make_chunk(5, num_tokens=5000)) and here(cache) == [2, 3, 4]
    cache.unpin(NAMESPACE, [key(2)])
    cache.save(*make_chunk(6))
    assert here(cache) == [3, 4, 6]
    assert cache.delete(NAMESPACE, [key(3), key(9)]) == 1 and cache.clear() == 2 and cache.stats()["bytes"] == 0


def test_kept_pins_hold_though_their_keeper_ended_and_for_chunks_that_come_later(small):
    for number in (0, 1, 2):
        small.save(*make_chunk(number))
    age(small, 0, 1, 2)
    root = small.folders[0].root
    before = PosixStage([root], 2**30)
    KeptPins(before).set(NAMESPACE, [key(0), key(0), key(7)], True)
    before.close()
    small.save(*make_chunk(3))
    assert here(small) == [0, 2, 3]
    pins = KeptPins(PosixStage([root], 2**30))
    assert pins.among(NAMESPACE, [key(1), key(7)]) == [key(7)] and pins.of(NAMESPACE) == sorted([key(0), key(7)])
    small.save(*make_chunk(7))
    age(small, 7, 0, 3)
    small.save(*make_chunk(4))
    assert here(small) == [0, 4, 7]
    pins.set(NAMESPACE, [key(0)], False)
    small.save(*make_chunk(5))
    assert here(small) == [4, 5, 7]
    assert KeptPins(PosixStage([root], 2**30)).of(NAMESPACE) == [key(7)]


def test_every_folder_keeps_the_pins_of_its_own_chunks(tmp_path):
    stage = PosixStage([tmp_path / "one", tmp_path / "two"], 2**30)
    names = [key(number) for number in range(20)]
    KeptPins(stage).set(NAMESPACE, names, True)
    for folder in stage.folders:
        assert folder.pins.all() == {(NAMESPACE, name) for name in names if stage.folder_of(name) is folder}
    assert KeptPins(stage).of(NAMESPACE) == sorted(names)


def test_a_damaged_list_of_kept_pins_is_no_pins(small):
    (small.folders[0].root / ".store" / "directory_pins.json").write_text('{"a0": [')
    assert KeptPins(small).of(NAMESPACE) == []
