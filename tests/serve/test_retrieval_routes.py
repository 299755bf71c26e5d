"""Retrieval over HTTP: blocks by name in a real pool, scoped to the API key."""

import asyncio
import json

import httpx
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tests.serve.conftest import KEYS
from ucm_ray.cli import app
from ucm_ray.client import AsyncClient, ClientError
from ucm_ray.retrieval import get_representation
from ucm_ray.serve import api

pytestmark = [pytest.mark.service, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def geometry(service):
    answer = httpx.get(f"{service.url}/ucm/v1/retrieval", headers={"Authorization": f"Bearer {KEYS[0]}"}, timeout=120)
    return api.RetrievalInfo(**answer.json())


def random_blocks(geometry, num_blocks: int, seed: int) -> torch.Tensor:
    keys = torch.randn(geometry.num_layers, num_blocks, 8, geometry.num_kv_heads, geometry.head_dim,
                       generator=torch.Generator().manual_seed(seed))
    return get_representation(geometry.representation).compute(keys)


def random_query(geometry, seed: int = 9) -> torch.Tensor:
    return torch.randn(geometry.num_layers, 2 * geometry.num_kv_heads, geometry.head_dim,
                       generator=torch.Generator().manual_seed(seed))


def test_the_service_says_what_blocks_look_like(geometry):
    assert (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim) == (30, 3, 64)
    assert geometry.representation == "cumulant" and geometry.num_stats == 2 and geometry.capacity_blocks > 100


@pytest.mark.parametrize("per_head", [False, True])
def test_the_chosen_blocks_are_those_with_the_highest_scores(first, geometry, per_head):
    """Against the representation's own scores, computed here over all blocks."""
    stats, query = random_blocks(geometry, 40, seed=1), random_query(geometry)
    assert first.upsert_blocks("report", stats[:, :, :25]).blocks == 25
    assert first.upsert_blocks("report", stats[:, :, 25:], append=True).blocks == 40
    found = first.top_k("report", query, 6, start=2, stop=38, per_head=per_head)
    scores = get_representation(geometry.representation).score(query, stats)  # [layers, kv_heads, blocks]
    scores = scores if per_head else scores.sum(1, keepdim=True)
    best = scores[..., 2:38].topk(6).indices.sort().values + 2
    assert found.blocks == best.tolist() and found.candidates == 36 and found.source == "exact"
    torch.testing.assert_close(torch.tensor(found.scores), scores.gather(2, best), rtol=1e-4, atol=1e-3)


def test_a_second_upsert_takes_the_place_of_the_first(first, geometry):
    before, after = random_blocks(geometry, 12, seed=2), random_blocks(geometry, 5, seed=3)
    first.upsert_blocks("draft", before)
    stored = first.retrieval().blocks
    assert first.upsert_blocks("draft", after).blocks == 5
    assert first.retrieval().blocks == stored - 7
    found = first.top_k("draft", random_query(geometry), 5)
    assert found.candidates == 5 and found.blocks[0] == [[0, 1, 2, 3, 4]]


def test_another_key_finds_replaces_and_evicts_nothing(first, second, geometry):
    first.upsert_blocks("mine", random_blocks(geometry, 4, seed=4))
    assert second.retrieval().names == 0
    for forbidden in (lambda: second.top_k("mine", random_query(geometry), 2), lambda: second.evict_blocks(["mine"])):
        with pytest.raises(ClientError, match="404.*'mine'"):
            forbidden()
    second.upsert_blocks("mine", random_blocks(geometry, 2, seed=5))
    assert first.top_k("mine", random_query(geometry), 4).candidates == 4
    assert second.evict_blocks(["mine"]).blocks == 2
    assert first.top_k("mine", random_query(geometry), 4).candidates == 4


def test_evicted_names_are_gone_and_their_room_is_free(first, geometry):
    first.upsert_blocks("old", random_blocks(geometry, 7, seed=6))
    before = first.retrieval()
    with pytest.raises(ClientError, match="404.*'unknown'"):
        first.evict_blocks(["old", "unknown"])
    assert first.evict_blocks(["old"]) == api.Evicted(names=1, blocks=7)
    after = first.retrieval()
    assert (after.names, after.blocks) == (before.names - 1, before.blocks - 7)
    with pytest.raises(ClientError, match="404"):
        first.top_k("old", random_query(geometry), 1)


def test_a_full_pool_refuses_and_keeps_what_it_has(first, second, geometry):
    part = random_blocks(geometry, 100, seed=7)
    with pytest.raises(ClientError, match="507.*evict"):
        for _ in range(geometry.capacity_blocks // 100 + 1):
            second.upsert_blocks("big", part, append=True)
    assert first.top_k("mine", random_query(geometry), 4).candidates == 4
    second.evict_blocks(["big"])


def test_the_async_client_does_the_same(service, first, geometry):
    async def scenario():
        async with AsyncClient(service.url, api_key=KEYS[0]) as client:
            await client.upsert_blocks("async", random_blocks(geometry, 9, seed=8))
            return await client.top_k("async", random_query(geometry), 3), await client.evict_blocks(["async"])

    found, evicted = asyncio.run(scenario())
    assert len(found.blocks) == geometry.num_layers and len(found.blocks[0][0]) == 3 and evicted.blocks == 9


def test_the_command_line_stores_asks_and_drops(service, first, geometry, tmp_path):
    def ucm_ray(*arguments: str):
        return CliRunner().invoke(app, ["retrieval", *arguments, "--url", service.url, "--api-key", KEYS[0]])

    blocks, query = random_blocks(geometry, 12, seed=11), random_query(geometry)
    np.save(tmp_path / "blocks.npy", blocks)
    np.save(tmp_path / "query.npy", query)
    np.save(tmp_path / "bad.npy", np.full(query.shape, np.nan))
    (tmp_path / "text.npy").write_text("no array")
    assert ucm_ray("upsert", "shell", str(tmp_path / "blocks.npy")).stdout == "shell: 12 blocks\n"
    expected = first.top_k("shell", query, 3, start=1)
    asked = ["query", "shell", str(tmp_path / "query.npy"), "-k", "3", "--start", "1"]
    assert json.loads(ucm_ray(*asked, "--json").stdout)["blocks"] == expected.blocks
    shown = ucm_ray(*asked).stdout
    # on a busy machine the shards may miss their deadline; the blocks are the same then
    assert " ".join(map(str, expected.blocks[0][0])) in shown and "of 11 blocks, scored by " in shown, shown
    assert json.loads(ucm_ray("info").stdout)["head_dim"] == 64
    for name, file, words in (("nobody", "query", "'nobody'"), ("shell", "bad", "NaN"),
                              ("shell", "text", "numpy.save")):
        refused = ucm_ray("query", name, str(tmp_path / f"{file}.npy"))
        assert refused.exit_code == 1 and words in refused.stderr and refused.stderr.count("\n") == 1, refused.output
    assert ucm_ray("evict", "shell").stdout == "1 names with 12 blocks dropped\n"


def tensor(shape, value="0.5", count=None):
    numbers = ",".join([value] * (int(np.prod(shape)) if count is None else count))
    return f'{{"shape": {json.dumps(list(shape))}, "data": [{numbers}]}}'


@pytest.mark.parametrize(("path", "body", "words"), [
    ("blocks", f'{{"name": "a", "blocks": {tensor((2, 30, 1, 3, 64), "NaN")}}}', "NaN"),
    ("blocks", f'{{"name": "a", "blocks": {tensor((2, 30, 1, 3, 64), "1e39")}}}', "infinite"),
    ("blocks", f'{{"name": "a", "blocks": {tensor((2, 30, 1, 3, 64), count=7)}}}', "expected 11520"),
    ("blocks", f'{{"name": "a", "blocks": {tensor((2, 30, 1, 3, 32))}}}', "[2, 30, num_blocks, 3, 64]"),
    ("blocks", f'{{"name": "a", "blocks": {tensor((2, 30, 10**6, 3, 64), count=1)}}}', "at most"),
    ("blocks", '{"name": "a", "blocks": {"shape": [1], "data": "*"}}', "base64"),
    ("blocks", f'{{"name": "", "blocks": {tensor((1,))}}}', "name"),
    ("top_k", f'{{"name": "mine", "k": 0, "query": {tensor((30, 6, 64))}}}', "k"),
    ("top_k", f'{{"name": "mine", "k": 2, "query": {tensor((30, 6, 64), "Infinity")}}}', "infinite"),
    ("top_k", f'{{"name": "mine", "k": 2, "query": {tensor((6, 64))}}}', "[num_layers, num_heads, head_dim]"),
    ("top_k", f'{{"name": "mine", "k": 2, "query": {tensor((30, 5, 64))}}}', "grouped"),
    ("evict", '{"names": []}', "names"),
])
def test_what_cannot_be_stored_or_asked_is_refused_with_the_reason(service, first, geometry, path, body, words):
    first.upsert_blocks("mine", random_blocks(geometry, 4, seed=4))
    answer = httpx.post(f"{service.url}/ucm/v1/retrieval/{path}", content=body, timeout=60, headers={
        "Authorization": f"Bearer {KEYS[0]}", "Content-Type": "application/json"})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text[:500]
