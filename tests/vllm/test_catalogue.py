"""What the scheduler knows of the store, and that it waits for no disk to know it."""

from __future__ import annotations

import threading
import time

import pytest

from tests.store.conftest import make_chunk
from ucm_ray.integration.vllm import catalogue as catalogue_module
from ucm_ray.integration.vllm.catalogue import ChunkCatalogue
from ucm_ray.store import PosixStage

NEW = "c2" * 16


@pytest.fixture
def stage(tmp_path) -> PosixStage:
    return PosixStage([tmp_path / "store"], 2**30)


@pytest.fixture
def catalogue(stage):
    catalogue = ChunkCatalogue(stage, refresh_s=0.05)
    yield catalogue
    catalogue.close()


def soon(condition, timeout_s: float = 5.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.002)
    return condition()


def test_a_new_namespace_is_ready_once_its_list_was_read(stage, catalogue):
    meta, kv = make_chunk(0, namespace=NEW)
    stage.save(meta, kv)
    assert not catalogue.is_ready(NEW)
    assert soon(lambda: catalogue.is_ready(NEW)) and meta.key in catalogue.index(NEW)


def test_a_new_namespace_is_read_before_those_that_are_only_looked_at_again(catalogue, monkeypatch):
    old = [f"{number:032x}" for number in range(30)]
    for namespace in old:
        catalogue.index(namespace)
    assert soon(lambda: all(catalogue.is_ready(namespace) for namespace in old))
    read, reached, go_on, order = catalogue._read, threading.Event(), threading.Event(), []

    def watched(namespace, index) -> None:
        order.append(namespace)
        reached.set()
        assert go_on.wait(5)
        read(namespace, index)

    monkeypatch.setattr(catalogue, "_read", watched)
    assert reached.wait(5)  # in the middle of a pass over all of them
    catalogue.index(NEW)
    go_on.set()
    assert soon(lambda: catalogue.index(NEW).read_once.is_set())
    assert order[1] == NEW


def test_asking_takes_no_time_and_a_slow_store_is_not_waited_for_too_long(catalogue, monkeypatch):
    never = threading.Event()
    monkeypatch.setattr(catalogue, "_read", lambda namespace, index: never.wait(5))
    monkeypatch.setattr(catalogue_module, "FIRST_READ_S", 0.3)
    begun = time.monotonic()
    assert not catalogue.is_ready(NEW)
    assert time.monotonic() - begun < 0.2
    assert soon(lambda: catalogue.is_ready(NEW)) and time.monotonic() - begun >= 0.3
    never.set()


def test_without_files_everything_is_ready():
    assert ChunkCatalogue(None, refresh_s=1.0).is_ready(NEW)
