"""A follower tells what other processes stored and removed, once each, and reads no more than it must."""

from __future__ import annotations

import shutil

from tests.store.conftest import NAMESPACE, OTHER_NAMESPACE, chunk_path, key, make_chunk
from ucm_ray.store import PosixStage
from ucm_ray.store.follower import StoreFollower


def keys_of(metas) -> list[str]:
    return sorted(meta.key for meta in metas)


def test_new_and_vanished_chunks_are_told_once_by_namespace(stage):
    follower = StoreFollower(stage)
    for number in range(3):
        stage.save(*make_chunk(number))
    stage.save(*make_chunk(3, namespace=OTHER_NAMESPACE))
    added, removed = follower.changes()
    assert {name: keys_of(metas) for name, metas in added.items()} == {
        NAMESPACE: sorted(key(number) for number in range(3)), OTHER_NAMESPACE: [key(3)]}
    assert not removed
    assert follower.changes() == ({}, {})
    stage.delete(NAMESPACE, [key(1)])
    stage.save(*make_chunk(4))
    added, removed = follower.changes()
    assert keys_of(added[NAMESPACE]) == [key(4)] and removed == {NAMESPACE: [key(1)]}


def test_chunks_of_a_folder_that_vanished_as_a_whole_are_gone(stage):
    follower = StoreFollower(stage)
    stage.save(*make_chunk(0))
    stage.save(*make_chunk(1, namespace=OTHER_NAMESPACE))
    follower.changes()
    shutil.rmtree(stage.folders[0].root / NAMESPACE)
    assert follower.changes() == ({}, {NAMESPACE: [key(0)]})


def test_headers_of_known_chunks_are_not_read(stage, monkeypatch):
    follower = StoreFollower(stage)
    stage.save(*make_chunk(0))
    stage.save(*make_chunk(1))
    load, asked = stage.load_header, []
    monkeypatch.setattr(stage, "load_header", lambda space, name: asked.append(name) or load(space, name))
    changes = list(follower.changes_of(NAMESPACE, {key(0)}.__contains__))
    assert [meta.key for change in changes for meta in change.added] == asked == [key(1)]
    stage.delete(NAMESPACE, [key(0)])
    assert [change.removed for change in follower.changes_of(NAMESPACE)] == [[key(0)]]


def test_a_doubted_chunk_is_told_again_if_its_file_is_good(stage, monkeypatch):
    follower = StoreFollower(stage)
    for number in range(3):
        stage.save(*make_chunk(number))
    follower.changes()
    monkeypatch.setattr("ucm_ray.store.follower._SETTLED_NS", 0)
    load, asked = stage.load_header, []
    monkeypatch.setattr(stage, "load_header", lambda space, name: asked.append(name) or load(space, name))
    chunk_path(stage, 1).write_bytes(b"nothing")
    follower.doubt(NAMESPACE, [key(0), key(9)])
    follower.doubt(NAMESPACE, [key(1)])
    added, removed = follower.changes()
    assert keys_of(added[NAMESPACE]) == asked == [key(0)] and not removed
    assert follower.changes() == ({}, {})


def test_a_doubted_chunk_whose_ranks_differ_in_the_source_is_not_told(tmp_path, monkeypatch):
    """It could never be used; unknown, it is computed and stored anew."""
    monkeypatch.setattr("ucm_ray.store.follower._SETTLED_NS", 0)
    ranks = [PosixStage([tmp_path], 2**30, rank, 2) for rank in range(2)]
    for rank, stage in enumerate(ranks):
        stage.save(*make_chunk(0, rank=rank, world_size=2))
        stage.save(*make_chunk(1, rank=rank, world_size=2, source_id=f"a{rank}"))
    ranks[0].save(*make_chunk(2, rank=0, world_size=2))
    follower = StoreFollower(ranks[0])
    follower.changes()
    follower.doubt(NAMESPACE, [key(number) for number in range(3)])
    added, removed = follower.changes()
    assert keys_of(added[NAMESPACE]) == [key(0)] and not removed


def test_a_damaged_file_is_not_told_and_told_when_it_is_good_again(stage):
    follower = StoreFollower(stage)
    stage.save(*make_chunk(0))
    chunk_path(stage, 0).write_bytes(b"nothing")
    assert follower.changes() == ({}, {})
    stage.save(*make_chunk(0))
    assert keys_of(follower.changes()[0][NAMESPACE]) == [key(0)]


def test_after_forgetting_everything_is_new_even_what_was_being_read(stage):
    follower = StoreFollower(stage)
    stage.save(*make_chunk(0))
    reading = follower.changes_of(NAMESPACE)
    next(reading)
    follower.forget()
    assert list(reading) == []
    assert keys_of(follower.changes()[0][NAMESPACE]) == [key(0)]
    follower.forget(NAMESPACE)
    assert keys_of(follower.changes()[0][NAMESPACE]) == [key(0)]
