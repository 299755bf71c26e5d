"""What the routes under `/ucm/v1` take and give, with their limits; `/openapi.json` is made of it."""

from __future__ import annotations

import base64
import binascii
import math
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

MAX_BODY_BYTES = 64 * 2**20
MAX_DOCUMENTS = 64
MAX_MESSAGES = 4_096
MAX_TEXT_CHARS = 1_000_000
MAX_TOKENS = 262_144
MAX_KEYS = 10_000
MAX_PAGE = 1_000
MAX_NAMES = 256
MAX_TOP_K = 1_024
MAX_VALUES = 4_194_304  # 16 MiB as float32
MAX_INT32 = 2**31 - 1


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Document(_Body):
    """A text, or its token ids. Give the text exactly as prompts will contain it."""

    text: str | None = Field(default=None, min_length=1, max_length=MAX_TEXT_CHARS)
    token_ids: list[int] | None = Field(default=None, min_length=1, max_length=MAX_TOKENS)

    @model_validator(mode="after")
    def _one_of_two(self) -> Document:
        if (self.text is None) == (self.token_ids is None):
            raise ValueError("expected exactly one of 'text' and 'token_ids'")
        return self


class IngestRequest(_Body):
    """Documents to compute and store before anybody asks about them."""

    documents: list[Document] = Field(min_length=1, max_length=MAX_DOCUMENTS)
    model: str | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    pin: bool = Field(default=False, description="keep them whatever else needs room")


class IngestedDocument(BaseModel):
    id: str = Field(description="of the sequence its KV was computed in; delete and list documents by it")
    num_tokens: int
    num_chunks: int
    num_bytes: int
    new_chunks: int = Field(description="chunks that were not stored before")
    chunks: list[str] = Field(description="keys of its chunks, in order")
    seconds: float


class IngestResponse(BaseModel):
    object: Literal["list"] = "list"
    data: list[IngestedDocument]


class LookupRequest(_Body):
    """A prompt as it would be sent: `messages`, `prompt` or `token_ids`. Nothing is computed."""

    messages: list[dict[str, Any]] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    prompt: str | None = Field(default=None, min_length=1, max_length=MAX_TEXT_CHARS)
    token_ids: list[int] | None = Field(default=None, min_length=1, max_length=MAX_TOKENS)
    model: str | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    budget: float | None = Field(default=None, ge=0.0, le=1.0)
    tokens: bool = Field(default=False, description="also give every token's text")

    @model_validator(mode="after")
    def _one_of_three(self) -> LookupRequest:
        if sum(value is not None for value in (self.messages, self.prompt, self.token_ids)) != 1:
            raise ValueError("expected exactly one of 'messages', 'prompt' and 'token_ids'")
        texts = (message.get("content") for message in self.messages or ())
        chars = sum(len(text) for text in texts if isinstance(text, str))
        if chars > MAX_TEXT_CHARS:
            raise ValueError(f"messages: found {chars} characters, expected at most {MAX_TEXT_CHARS}")
        return self


class Span(BaseModel):
    """Tokens [start, end) of the prompt."""

    start: int
    end: int
    match: Literal["full_match", "partial_match", "no_match"]
    chunk: str | None = None
    document: str | None = None
    source_position: int | None = None
    mismatched: list[int] = Field(default_factory=list, description="positions whose token differs: recomputed")


class LookupResponse(BaseModel):
    prompt_tokens: int
    reusable_tokens: int = Field(description="tokens whose KV is stored")
    recomputed_tokens: int = Field(description="tokens of them that the budget would recompute")
    computed_tokens: int = Field(description="tokens that have to be computed in any case")
    estimated_saving: float = Field(description="share of the prompt's prefill that would not be computed")
    estimated_saving_s: float | None = Field(description="seconds, once the service has seen a prefill to judge by")
    spans: list[Span]
    tokens: list[str] | None = None


class ChunkInfo(BaseModel):
    key: str
    document: str | None
    source_position: int
    num_tokens: int
    num_bytes: int
    context: str
    pinned: bool
    nodes: list[str]
    created_s: float


class ChunkDetail(ChunkInfo):
    token_ids: list[int]
    text: str


class ChunkPage(BaseModel):
    object: Literal["list"] = "list"
    total: int
    offset: int
    data: list[ChunkInfo]


class DocumentInfo(BaseModel):
    id: str
    num_tokens: int
    num_chunks: int
    num_bytes: int
    pinned: bool
    created_s: float


class DocumentPage(BaseModel):
    object: Literal["list"] = "list"
    total: int
    offset: int
    data: list[DocumentInfo]


class KeysRequest(_Body):
    """Chunks by key, or all chunks of documents by document id."""

    keys: list[str] = Field(default_factory=list, max_length=MAX_KEYS)
    documents: list[str] = Field(default_factory=list, max_length=MAX_KEYS)
    model: str | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)

    @model_validator(mode="after")
    def _something(self) -> KeysRequest:
        if not (self.keys or self.documents):
            raise ValueError("expected at least one key in 'keys' or one id in 'documents'")
        return self


class PinRequest(KeysRequest):
    pinned: bool = True


class Affected(BaseModel):
    """How many chunks a request changed."""

    chunks: int


class Statistics(BaseModel):
    """Of the caller's own cache (the part of one `cache_salt`, or what has none) and requests only."""

    chunks: int
    tokens: int
    bytes: int
    pinned: int
    requests: dict[str, float] = Field(description="receipts of the key's requests, whatever their salts, summed")
    directory: dict[str, Any]


Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]


def _at_most(data: Any) -> Any:
    """Too much is refused before every number of it is checked."""
    most = 4 * math.ceil(4 * MAX_VALUES / 3) if isinstance(data, str) else MAX_VALUES
    if isinstance(data, (str, list)) and len(data) > most:
        kind = "base64 characters" if isinstance(data, str) else "numbers"
        raise ValueError(f"found {len(data)} {kind}, expected at most {most}; send the blocks in parts, with 'append'")
    return data


class Tensor(_Body):
    """An array: its shape, and its numbers in C order, listed or as base64 of little-endian float32."""

    shape: list[Annotated[int, Field(ge=1, le=MAX_VALUES)]] = Field(min_length=1, max_length=8)
    data: Annotated[list[float] | str, BeforeValidator(_at_most)]

    @model_validator(mode="after")
    def _complete_and_finite(self) -> Tensor:
        expected = math.prod(self.shape)
        if expected > MAX_VALUES:
            raise ValueError(f"shape {self.shape} holds {expected} numbers, expected at most {MAX_VALUES}; "
                             "send the blocks in parts, with 'append'")
        if isinstance(self.data, str):
            try:
                size = len(base64.b64decode(self.data, validate=True)) / 4
            except binascii.Error as error:
                raise ValueError(f"data: expected base64 ({error})") from None
        else:
            size = len(self.data)
        if size != expected:
            raise ValueError(f"data holds {size:g} float32 numbers, expected {expected} for shape {self.shape}")
        if not np.isfinite(self.array()).all():
            raise ValueError("data holds NaN or infinite values (as float32), expected finite numbers")
        return self

    def array(self) -> np.ndarray:
        """float32 `[*shape]`."""
        with np.errstate(over="ignore"):
            flat = (np.frombuffer(base64.b64decode(self.data), "<f4") if isinstance(self.data, str)
                    else np.asarray(self.data, np.float64).astype(np.float32))
        return flat.reshape(self.shape)

    @classmethod
    def of(cls, values: Any) -> Tensor:
        """From anything numpy reads: nested lists, arrays, torch tensors on the CPU."""
        array = np.ascontiguousarray(values, "<f4")
        return cls(shape=list(array.shape), data=base64.b64encode(array.tobytes()).decode())


class BlocksRequest(_Body):
    """Representations of the KV blocks of one request or document, under a name of the caller's."""

    name: Name
    blocks: Tensor = Field(description="[num_stats, num_layers, num_blocks, num_kv_heads, head_dim], as "
                                       "`BlockRepresentation.compute` returns them; see GET /ucm/v1/retrieval")
    append: bool = Field(default=False, description="behind the blocks the name has, instead of in their place")
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)


class BlocksResponse(BaseModel):
    name: str
    blocks: int = Field(description="how many the name has now")


class TopKRequest(_Body):
    """A query of one decode step: which blocks of a name should be read?"""

    name: Name
    query: Tensor = Field(description="[num_layers, num_heads, head_dim]; num_heads is a multiple of num_kv_heads")
    k: int = Field(ge=1, le=MAX_TOP_K)
    start: int = Field(default=0, ge=0, le=MAX_INT32, description="the first block that may be chosen")
    stop: int | None = Field(default=None, ge=0, le=MAX_INT32,
                             description="the first one behind those that may be chosen")
    per_head: bool = Field(default=False, description="choose for every KV head; otherwise heads are summed")
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)


class TopKResponse(BaseModel):
    """Per layer, and per KV head or once: the chosen blocks, ascending, and their scores in attention logits."""

    name: str
    candidates: int = Field(description="blocks that were scored")
    source: Literal["exact", "local"] = Field(description="who scored: the shards, or in their stead the owner's copy")
    blocks: list[list[list[int]]]
    scores: list[list[list[float]]]


class NamesRequest(_Body):
    names: list[Name] = Field(min_length=1, max_length=MAX_NAMES)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)


class Evicted(BaseModel):
    names: int
    blocks: int


class RetrievalInfo(BaseModel):
    """What blocks must look like, and how many there are."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    representation: str
    num_stats: int
    dtype: str
    capacity_blocks: int = Field(description="of all callers together")
    names: int = Field(description="of the caller")
    blocks: int = Field(description="of the caller")
