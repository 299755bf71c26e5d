"""The file format: one chunk of one tensor-parallel rank, self-describing, checksummed, free of pickle.

    offset 0    prefix, 56 bytes little-endian: magic, version, json bytes, payload offset, payload bytes,
                XXH3 of the header block, XXH3 of the payload, XXH3 of the 48 bytes before
    offset 56   header block: canonical JSON, token ids (int32), one XXH3 per layer (uint64), zeros up to the payload
    4096 * n    payload: KV `[num_layers, 2, num_tokens, num_kv_heads, head_dim]`, so that layers can be read in order

Every byte of the file is covered by a checksum. The checksum of the whole payload is what `read_chunk` verifies; the
ones of the layers let a reader use the first layers before the last ones are read.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from dataclasses import MISSING, fields
from functools import lru_cache
from typing import NamedTuple, get_type_hints

import msgspec
import numpy as np
import torch
import xxhash

from ucm_ray.store.base import DTYPES, ChunkMeta
from ucm_ray.store.buffers import BufferPool

MAGIC = b"UCMRAYKV"
VERSION = 1
_PREFIX = struct.Struct("<8sIIQQQQ")
_CHECKSUM = struct.Struct("<Q")
_BLOCK_START = _PREFIX.size + _CHECKSUM.size
_PAGE = 4096
# a piece is still in the processor's cache when it is checksummed; smaller ones cost more calls
_PIECE_BYTES = 2 * 1024 * 1024
_MAX_HEADER_BYTES = 64 * 1024 * 1024


def _json_type() -> type[msgspec.Struct]:
    """The header's JSON: the fields of `ChunkMeta`, their token ids replaced by how many there are."""
    types = get_type_hints(ChunkMeta)
    entries = [(field.name, types[field.name]) if field.default is MISSING else
               (field.name, types[field.name], field.default)
               for field in fields(ChunkMeta) if field.name != "token_ids"]
    return msgspec.defstruct("_Json", [("num_tokens", int), *entries], kw_only=True)


_Json = _json_type()
_encode_json = msgspec.json.Encoder(order="sorted").encode
_decode_json = msgspec.json.Decoder(_Json).decode


class BadChunkFile(Exception):
    """A file that must not be used. `kind` is truncated, corrupt, foreign or unsupported (a later version)."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Header(NamedTuple):
    meta: ChunkMeta
    payload_offset: int
    payload_checksum: int
    layer_checksums: bytes  # little-endian uint64 [num_layers]

    @property
    def file_bytes(self) -> int:
        return self.payload_offset + self.meta.payload_bytes


def payload_view(kv: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy (bfloat16 too, which numpy does not know)."""
    return memoryview(kv.reshape(-1).view(torch.uint8).numpy())


def encode_header(meta: ChunkMeta, payload: memoryview) -> bytes:
    """Prefix and header block for `payload`, padded to a whole number of pages."""
    layer_bytes = meta.payload_bytes // meta.num_layers
    layers = [xxhash.xxh3_64_intdigest(payload[start:start + layer_bytes])
              for start in range(0, meta.payload_bytes, layer_bytes)]
    text = _encode_json({name: getattr(meta, name) for name in _Json.__struct_fields__})
    block = text + meta.token_ids.astype("<i4").tobytes() + np.array(layers, dtype="<u8").tobytes()
    offset = -(-(_BLOCK_START + len(block)) // _PAGE) * _PAGE
    block = block.ljust(offset - _BLOCK_START, b"\0")
    prefix = _PREFIX.pack(MAGIC, VERSION, len(text), offset, meta.payload_bytes,
                          xxhash.xxh3_64_intdigest(block), xxhash.xxh3_64_intdigest(payload))
    return prefix + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(prefix)) + block


def largest_file_bytes(meta: ChunkMeta) -> int:
    """What the file of a chunk takes at most: exact but for the length of the JSON."""
    strings = sum(len(value) for value in vars(meta).values() if isinstance(value, str))
    block = _BLOCK_START + 512 + 6 * strings + meta.token_ids.nbytes + meta.num_layers * _CHECKSUM.size
    return -(-block // _PAGE) * _PAGE + meta.payload_bytes


def write_chunk(path: str, meta: ChunkMeta, kv: torch.Tensor) -> int:
    """Write a new file and force it to the disk; returns its size in bytes. Raises OSError, leaving the file."""
    payload = payload_view(kv)
    header = encode_header(meta, payload)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        _write(handle, memoryview(header), 0)
        # whole pages straight from this memory: filling the page cache with what host memory holds already would cost
        # most of the processor time of saving, beside an engine that needs it
        whole = len(payload) // _PAGE * _PAGE
        direct = _write_direct(handle, payload[:whole], len(header))
        _write(handle, payload[direct:], len(header) + direct)
        os.fsync(handle)
    finally:
        os.close(handle)
    return len(header) + len(payload)


def _write(handle: int, data: memoryview, offset: int) -> None:
    position = 0
    while position < len(data):
        position += os.pwrite(handle, data[position:], offset + position)


def _write_direct(handle: int, data: memoryview, offset: int) -> int:
    """Write past the page cache as far as file system and alignment allow; returns the bytes written."""
    if not data or not hasattr(os, "O_DIRECT"):
        return 0
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    position = 0
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, flags | os.O_DIRECT)
        while position < len(data):
            position += os.pwrite(handle, data[position:], offset + position)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    fcntl.fcntl(handle, fcntl.F_SETFL, flags)
    return position


def read_header(handle: int) -> Header:
    """Header of an open file, verified, and the file's size checked against it. Raises BadChunkFile."""
    start = os.pread(handle, _PAGE, 0)
    if len(start) < _BLOCK_START:
        raise BadChunkFile("truncated", f"the file has {len(start)} bytes, expected at least {_BLOCK_START}")
    magic, version, json_bytes, offset, payload_bytes, block_checksum, payload_checksum = _PREFIX.unpack_from(start)
    if magic != MAGIC:
        raise BadChunkFile("corrupt", f"the file starts with {magic!r}, expected {MAGIC!r}")
    if xxhash.xxh3_64_intdigest(start[:_PREFIX.size]) != _CHECKSUM.unpack_from(start, _PREFIX.size)[0]:
        raise BadChunkFile("corrupt", "the checksum of the prefix does not match")
    if version != VERSION:
        raise BadChunkFile("unsupported", f"the file has format version {version}, expected {VERSION}")
    if not _BLOCK_START + json_bytes <= offset <= _MAX_HEADER_BYTES:
        raise BadChunkFile("corrupt", f"the payload starts at byte {offset}, after {json_bytes} bytes of JSON")
    file_bytes = os.lseek(handle, 0, os.SEEK_END)
    if file_bytes != offset + payload_bytes:
        raise BadChunkFile("truncated", f"the file has {file_bytes} bytes, expected {offset + payload_bytes}")
    block = start[_BLOCK_START:offset]
    if offset > len(start):
        block += os.pread(handle, offset - len(start), len(start))
    if xxhash.xxh3_64_intdigest(block) != block_checksum:
        raise BadChunkFile("corrupt", "the checksum of the header does not match")
    meta, layers = _parse_block(block, json_bytes)
    if meta.payload_bytes != payload_bytes:
        raise BadChunkFile("corrupt", f"KV of shape {meta.shape} has {meta.payload_bytes} bytes, not {payload_bytes}")
    return Header(meta, offset, payload_checksum, layers)


# a chunk that is read again, because host memory had no room for it, brings the very same bytes
@lru_cache(maxsize=1024)
def _parse_block(block: bytes, json_bytes: int) -> tuple[ChunkMeta, bytes]:
    try:
        values = msgspec.structs.asdict(_decode_json(block[:json_bytes]))
        token_ids = np.frombuffer(block, "<i4", values.pop("num_tokens"), json_bytes)
        start = json_bytes + token_ids.nbytes
        layers = block[start:start + values["num_layers"] * _CHECKSUM.size]
        if values["dtype"] not in DTYPES:
            raise ValueError(f"dtype is {values['dtype']!r}, expected one of {', '.join(DTYPES)}")
        return ChunkMeta.trusted(values, token_ids), layers
    except (ValueError, msgspec.MsgspecError) as error:
        raise BadChunkFile("corrupt", f"the header cannot be understood: {error}") from None


def read_payload(handle: int, header: Header, pool: BufferPool) -> torch.Tensor:
    """The KV of an open file in a buffer of `pool`, verified while it is read. Raises BadChunkFile."""
    num_bytes = header.meta.payload_bytes
    tensor, view = pool.tensor(header.meta.shape, header.meta.torch_dtype)
    checksum = xxhash.xxh3_64()
    position = 0
    while position < num_bytes:
        piece = view[position:position + _PIECE_BYTES]
        count = os.preadv(handle, [piece], header.payload_offset + position)
        if not count:
            raise BadChunkFile("truncated", f"the payload ends after {position} bytes, expected {num_bytes}")
        checksum.update(piece if count == len(piece) else piece[:count])
        position += count
    if checksum.intdigest() != header.payload_checksum:
        raise BadChunkFile("corrupt", "the checksum of the payload does not match")
    return tensor


def read_layer(handle: int, header: Header, layer: int, pool: BufferPool) -> torch.Tensor:
    """KV `[2, num_tokens, num_kv_heads, head_dim]` of one layer, verified. Raises BadChunkFile."""
    num_bytes = header.meta.payload_bytes // header.meta.num_layers
    tensor, view = pool.tensor(header.meta.shape[1:], header.meta.torch_dtype)
    position = 0
    while position < num_bytes:
        count = os.preadv(handle, [view[position:]], header.payload_offset + layer * num_bytes + position)
        if not count:
            raise BadChunkFile("truncated", f"layer {layer} ends after {position} bytes, expected {num_bytes}")
        position += count
    if xxhash.xxh3_64_intdigest(view) != _CHECKSUM.unpack_from(header.layer_checksums, layer * _CHECKSUM.size)[0]:
        raise BadChunkFile("corrupt", f"the checksum of layer {layer} does not match")
    return tensor
