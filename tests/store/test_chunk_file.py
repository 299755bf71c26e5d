"""The file format: what is written is read again, and anything else is recognised."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ucm_ray.store
from tests.store.conftest import NAMESPACE, chunk_path, key, make_chunk
from ucm_ray.store import ChunkMeta, PosixStage
from ucm_ray.store.base import DTYPES
from ucm_ray.store.buffers import BufferPool
from ucm_ray.store.chunk_file import BadChunkFile, read_header, read_layer, read_payload, write_chunk

fresh_files = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read(path: Path) -> tuple[ChunkMeta, torch.Tensor]:
    with open(path, "rb") as file:
        header = read_header(file.fileno())
        return header.meta, read_payload(file.fileno(), header, BufferPool(0))


@fresh_files
@given(dtype=st.sampled_from(sorted(DTYPES)), layers=st.integers(1, 5), tokens=st.integers(1, 900),
       heads=st.integers(1, 3), dim=st.sampled_from([8, 64]), position=st.integers(0, 2**31 - 1),
       context=st.text(max_size=20), seed=st.integers(0, 2**32 - 1))
def test_what_is_written_is_read_again(tmp_path, dtype, layers, tokens, heads, dim, position, context, seed):
    ids = np.random.default_rng(seed).integers(-2**31, 2**31, tokens).astype(np.int32)
    meta = ChunkMeta(key(1), NAMESPACE, ids, "5e", position, layers, heads, dim, dtype, context, rank=1, world_size=2)
    kv = torch.randn(meta.shape).to(DTYPES[dtype])
    path = tmp_path / f"{os.urandom(8).hex()}.kv"
    size = write_chunk(str(path), meta, kv)
    assert size == path.stat().st_size
    got, got_kv = read(path)
    assert got == meta and got.created_s == meta.created_s
    assert got_kv.dtype == kv.dtype and torch.equal(got_kv, kv)
    with open(path, "rb") as file:
        header = read_header(file.fileno())
        for layer in range(layers):
            assert torch.equal(read_layer(file.fileno(), header, layer, BufferPool(0)), kv[layer])


def test_nan_and_negative_zero_keep_their_bits(tmp_path):
    meta, kv = make_chunk(dtype="float32")
    bits = torch.randint(-2**31, 2**31 - 1, meta.shape, dtype=torch.int32)
    write_chunk(str(tmp_path / "x.kv"), meta, bits.view(torch.float32))
    assert torch.equal(read(tmp_path / "x.kv")[1].view(torch.int32), bits)


@fresh_files
@given(position=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_a_changed_byte_anywhere_is_found(tmp_path, position, flip):
    meta, kv = make_chunk(num_tokens=4)
    stage = PosixStage([tmp_path / "store"], 2**30)
    assert stage.save(meta, kv)
    path = chunk_path(stage, 0)
    content = bytearray(path.read_bytes())
    content[int(position * len(content))] ^= flip
    path.write_bytes(content)
    with pytest.raises(BadChunkFile):
        read(path)
    assert stage.load(NAMESPACE, key(0)) is None
    assert stage.counters["corrupt"] + stage.counters["truncated"] == 1
    assert not path.exists()


@pytest.mark.parametrize("offset", [*range(64), 100, 600, 4095, 4096, -1])
def test_a_changed_byte_of_every_header_field_is_found(tmp_path, offset):
    meta, kv = make_chunk(num_tokens=4)
    write_chunk(str(tmp_path / "x.kv"), meta, kv)
    content = bytearray((tmp_path / "x.kv").read_bytes())
    content[offset] ^= 0x10
    (tmp_path / "x.kv").write_bytes(content)
    with pytest.raises(BadChunkFile):
        read(tmp_path / "x.kv")


@fresh_files
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_found_and_removed(tmp_path, share):
    meta, kv = make_chunk()
    stage = PosixStage([tmp_path / "store"], 2**30)
    assert stage.save(meta, kv)
    path = chunk_path(stage, 0)
    os.truncate(path, int(share * path.stat().st_size))
    assert stage.load(NAMESPACE, key(0)) is None
    assert stage.counters["truncated"] == 1 and not path.exists()


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("num_tokens", [1, 43, 128, 1001])
def test_any_size_in_any_memory_reads_back(tmp_path, num_tokens, offset):
    """Whole pages may go past the page cache, the rest and memory of odd alignment may not."""
    meta, kv = make_chunk(num_tokens=num_tokens)
    memory, _ = BufferPool(2**20).tensor((kv.numel() + offset,), kv.dtype)
    source = memory[offset:].view(kv.shape)
    source.copy_(kv)
    size = write_chunk(str(tmp_path / "x.kv"), meta, source)
    assert size == (tmp_path / "x.kv").stat().st_size
    assert torch.equal(read(tmp_path / "x.kv")[1], kv)


def test_a_file_system_that_knows_only_its_page_cache_will_do(tmp_path, monkeypatch):
    meta, kv = make_chunk(num_tokens=128)
    refused = []

    def refuse(handle, command, value=0):
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            refused.append(value)
            raise OSError(errno.EINVAL, "no")
        return real(handle, command, value)

    real = fcntl.fcntl
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    write_chunk(str(tmp_path / "x.kv"), meta, kv)
    assert refused and torch.equal(read(tmp_path / "x.kv")[1], kv)


def test_a_longer_file_is_refused(stage):
    stage.save(*make_chunk())
    with open(chunk_path(stage, 0), "ab") as file:
        file.write(b"\0")
    assert stage.load(NAMESPACE, key(0)) is None


def test_a_later_version_is_neither_read_nor_removed(stage):
    import xxhash

    stage.save(*make_chunk())
    path = chunk_path(stage, 0)
    content = bytearray(path.read_bytes())
    content[8] = 2
    content[48:56] = xxhash.xxh3_64_intdigest(bytes(content[:48])).to_bytes(8, "little")
    path.write_bytes(content)
    assert stage.load(NAMESPACE, key(0)) is None
    assert stage.counters["unsupported"] == 1 and path.exists()


def test_a_header_that_lies_with_right_checksums_is_refused(tmp_path):
    import msgspec
    import xxhash

    meta, kv = make_chunk()
    write_chunk(str(tmp_path / "x.kv"), meta, kv)
    content = bytearray((tmp_path / "x.kv").read_bytes())
    length = int.from_bytes(content[12:16], "little")
    honest = msgspec.json.decode(bytes(content[56:56 + length]))
    for lie in ({"num_layers": 2}, {"num_tokens": 10**9}, {"num_tokens": -1}, {"dtype": "int4"}, {"head_dim": "8"},
                {"num_layers": 0}, {"num_layers": -3}, {"source_position": None}):
        text = msgspec.json.encode(honest | lie)
        block = (text + content[56 + length:4096])[:4096 - 56].ljust(4096 - 56, b"\0")
        content[12:16] = len(text).to_bytes(4, "little")
        content[32:40] = xxhash.xxh3_64_intdigest(block).to_bytes(8, "little")
        content[48:56] = xxhash.xxh3_64_intdigest(bytes(content[:48])).to_bytes(8, "little")
        (tmp_path / "lie.kv").write_bytes(bytes(content[:56]) + block + bytes(content[4096:]))
        with pytest.raises(BadChunkFile):
            read(tmp_path / "lie.kv")


def test_nothing_is_ever_unpickled(stage):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(stage.folders[0].root / "exploded"),)

    stage.save(*make_chunk())
    chunk_path(stage, 0).write_bytes(pickle.dumps(Bomb()) * 2000)
    assert stage.load(NAMESPACE, key(0)) is None
    assert list(stage.scan(NAMESPACE)) == []
    assert not (stage.folders[0].root / "exploded").exists()
    for source in Path(ucm_ray.store.__file__).parent.glob("*.py"):
        text = source.read_text()
        assert "import pickle" not in text and "torch.load" not in text and "torch.save" not in text, source
