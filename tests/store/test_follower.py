"""A follower tells what other processes stored and removed, once each, and reads no more than it must."""

from __future__ import annotations

import shutil

from tests.store.conftest import NAMESPACE, OTHER_NAMESPACE, chunk_path, key, make_chunk
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
