"""The service from outside: OpenAI's client, our client, plain HTTP."""

import asyncio
import json
import random
import re

import httpx
import openai as openai_package
import pytest

from tests.serve.conftest import KEYS, MODEL, eventually, messages_of
from ucm_ray.client import AsyncClient, Client, ClientError
from ucm_ray.serve.metrics import ServiceMetrics

pytestmark = [pytest.mark.service, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def ingested(service, documents):
    with Client(service.url, api_key=KEYS[0]) as client:
        return client.ingest([document.stored_text for document in documents]).data


def ask(openai, documents, question, **extra):
    return openai.chat.completions.create(model=MODEL, messages=messages_of(documents, question), temperature=0,
                                          max_tokens=8, extra_body=extra)


def blend_of(answer) -> dict:
    return answer.model_extra["kv_transfer_params"]["ucm"]["blend"]


def document_tokens(ingested, chosen) -> int:
    return sum(ingested[index].num_tokens for index in chosen)


def test_ingested_documents_are_reused_in_any_order(openai, ingested, documents):
    """20 documents, 10 questions over shuffled subsets: at least 90% of the documents' tokens come from the store."""
    draw = random.Random(6)
    for number in range(10):
        chosen = draw.sample(range(20), 6)
        subject = documents[chosen[number % 6]]
        answer = ask(openai, [documents[index] for index in chosen], subject.questions[0].question)
        blend = blend_of(answer)
        assert blend["reused_tokens"] >= 0.9 * document_tokens(ingested, chosen), blend
        assert blend["policy"] == "query" and 0 < blend["recomputed_tokens"] <= 0.15 * blend["reused_tokens"]


def test_another_key_reuses_lists_finds_and_deletes_nothing(service, openai, ingested, documents, first, second):
    key = ingested[0].chunks[0]
    assert first.chunks().total > 0 and second.chunks().total == 0 and second.documents().total == 0
    assert second.stats().chunks == 0
    assert second.lookup(messages=messages_of(documents[:4], "What?")).reusable_tokens == 0
    for forbidden in (lambda: second.chunk(key), lambda: second.delete([key]), lambda: second.pin([key]),
                      lambda: second.delete(documents=[ingested[0].id])):
        with pytest.raises(ClientError) as refused:
            forbidden()
        assert refused.value.status == 404
    assert second.clear().chunks == 0
    stranger = openai_package.OpenAI(base_url=f"{service.url}/v1", api_key=KEYS[1], max_retries=0)
    answer = ask(stranger, documents[:4], documents[0].questions[0].question)
    assert blend_of(answer)["reused_tokens"] == 0 and blend_of(answer)["reason"]
    with pytest.raises(ClientError, match="404"):
        first.receipt(answer.id)
    assert first.chunk(key).num_tokens == 64
    eventually(lambda: second.chunks().total > 0)  # its own text, saved
    second.clear()


def test_a_clients_own_cache_salt_divides_its_cache(openai, ingested, documents):
    answer = ask(openai, documents[:4], documents[0].questions[0].question, cache_salt="elsewhere")
    assert blend_of(answer)["reused_tokens"] == 0


def test_no_answer_listing_or_statistic_shows_the_salt(service, ingested, documents):
    from ucm_ray.serve.auth import salt_of

    salt = salt_of(KEYS[0])
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    with httpx.Client(base_url=service.url, headers=headers, timeout=60) as http:
        answers = [http.get(path) for path in ("/ucm/v1/chunks", "/ucm/v1/documents", "/ucm/v1/stats", "/metrics",
                                               f"/ucm/v1/chunks/{ingested[0].chunks[0]}", "/v1/models")]
        answers.append(http.post("/ucm/v1/lookup", json={"prompt": documents[0].text}))
        answers.append(http.post("/v1/chat/completions", json={
            "model": MODEL, "messages": messages_of(documents[:2], "What?"), "max_tokens": 2}))
    for answer in answers:
        assert answer.status_code == 200 and salt not in answer.text, answer.request.url
    assert salt not in service.log.read_text()


def test_a_stream_ends_with_its_receipt_if_usage_is_asked_for(openai, ingested, documents):
    for usage in (True, False):
        chunks = list(openai.chat.completions.create(
            model=MODEL, messages=messages_of(documents[3:7], documents[4].questions[0].question), temperature=0,
            max_tokens=6, stream=True, **({"stream_options": {"include_usage": True}} if usage else {})))
        with_receipt = [chunk for chunk in chunks if (chunk.model_extra or {}).get("kv_transfer_params")]
        if usage:
            assert chunks[-1] is with_receipt[0] and len(with_receipt) == 1 and chunks[-1].choices == []
            assert chunks[-1].model_extra["kv_transfer_params"]["ucm"]["blend"]["reused_tokens"] > 900
        else:
            assert not with_receipt


def test_every_receipt_can_be_read_afterwards(openai, ingested, documents, first):
    answer = ask(openai, documents[:4], documents[0].questions[0].question)
    stored = first.receipt(answer.id)["ucm"]
    assert stored["blend"] == blend_of(answer)
    stream = openai.chat.completions.create(
        model=MODEL, messages=messages_of(documents[:4], "What else?"), max_tokens=3, stream=True)
    name = [chunk.id for chunk in stream][0]
    assert first.receipt(name)["ucm"]["blend"]["reused_tokens"] > 900


def test_completions_with_text_and_with_token_ids_are_blended_too(openai, ingested, documents, model_dir):
    from transformers import AutoTokenizer

    text = "Here is what we know.\n" + documents[5].stored_text + documents[6].stored_text + "In one word:"
    answer = openai.completions.create(model=MODEL, prompt=text, max_tokens=4, temperature=0)
    assert blend_of(answer)["reused_tokens"] >= 0.9 * document_tokens(ingested, (5, 6))
    tokens = AutoTokenizer.from_pretrained(model_dir).encode(text)
    again = openai.completions.create(model=MODEL, prompt=tokens, max_tokens=4, temperature=0)
    assert again.choices[0].text == answer.choices[0].text


def test_lookup_says_what_a_request_would_reuse(openai, ingested, documents, first):
    question = documents[8].questions[0].question
    found = first.lookup(messages=messages_of(documents[8:12], question), tokens=True)
    blend = blend_of(ask(openai, documents[8:12], question, kv_transfer_params={"ucm": {"save": False}}))
    assert found.prompt_tokens == blend["prompt_tokens"] == len(found.tokens)
    assert found.spans[0].start == 0 and found.spans[-1].end == found.prompt_tokens
    assert abs(found.reusable_tokens - blend["reused_tokens"]) <= 0.05 * found.prompt_tokens
    assert 0 < found.recomputed_tokens < found.reusable_tokens and found.estimated_saving > 0.5


def test_ingesting_again_computes_nothing(ingested, documents, first):
    again = first.ingest([documents[0].stored_text]).data[0]
    assert again.new_chunks == 0 and again.chunks == ingested[0].chunks and again.id == ingested[0].id


def test_a_document_given_as_token_ids_is_listed_pinned_and_deleted(first):
    draw = random.Random(1)
    document = first.ingest([[draw.randrange(1000, 40000) for _ in range(150)]], pin=True).data[0]
    assert (document.num_tokens, document.num_chunks) == (150, 3)
    page = first.chunks(document=document.id)
    assert page.total == 3 and all(chunk.pinned for chunk in page.data)
    assert first.pin(documents=[document.id], pinned=False).chunks == 3
    assert first.chunk(document.chunks[0]).pinned is False
    assert first.delete(keys=document.chunks[:1]).chunks == 1
    assert first.delete(documents=[document.id]).chunks == 2
    with pytest.raises(ClientError, match="404"):
        first.chunk(document.chunks[1])


def test_the_async_client_does_the_same(service, ingested, documents):
    async def scenario():
        async with AsyncClient(service.url, api_key=KEYS[0]) as client:
            pages = await asyncio.gather(client.documents(limit=5), client.chunks(limit=5), client.stats())
            return pages, await client.lookup(documents[0].stored_text)

    (documents_page, chunks_page, stats), found = asyncio.run(scenario())
    assert documents_page.total >= 19 and len(chunks_page.data) == 5 and stats.chunks == chunks_page.total
    assert found.reusable_tokens >= 0.9 * ingested[0].num_tokens


@pytest.mark.parametrize(("path", "body", "words"), [
    ("/ucm/v1/documents", {"documents": []}, "documents"),
    ("/ucm/v1/documents", {"documents": [{"text": "a", "token_ids": [1]}]}, "exactly one"),
    ("/ucm/v1/documents", {"documents": [{"token_ids": [10**7]}]}, "expected 0 to"),
    ("/ucm/v1/documents", {"documents": [{"text": "a"}], "other": 1}, "other"),
    ("/ucm/v1/lookup", {}, "exactly one of"),
    ("/ucm/v1/delete", {}, "at least one key"),
    ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "a"}],
                              "kv_transfer_params": {"ucm": {"policy": "best"}}}, "policy"),
    ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "a"}],
                              "kv_transfer_params": {"do_remote_prefill": True}}, "do_remote_prefill"),
])
def test_what_cannot_be_done_is_refused_with_the_reason(service, path, body, words):
    answer = httpx.post(service.url + path, json=body, headers={"Authorization": f"Bearer {KEYS[0]}"}, timeout=60)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_every_route_asks_for_a_key(service):
    schema = httpx.get(f"{service.url}/openapi.json", timeout=60).json()
    assert {"/ucm/v1/documents", "/ucm/v1/chunks/{key}", "/ucm/v1/lookup", "/ucm/v1/receipts/{request_id}",
            "/ucm/v1/stats"} <= set(schema["paths"])
    for path, operations in schema["paths"].items():
        if path == "/health":
            continue
        for method in operations:
            answer = httpx.request(method, service.url + re.sub(r"{[^}]+}", "abcd", path), timeout=60)
            assert answer.status_code == 401, (method, path)
    assert httpx.get(f"{service.url}/metrics", timeout=60).status_code == 401


def metrics_of(service) -> dict[str, float]:
    """Samples of `/metrics` by name with labels."""
    answer = httpx.get(f"{service.url}/metrics", headers={"Authorization": f"Bearer {KEYS[0]}"}, timeout=60)
    return {name: float(value) for name, value in re.findall(r"^(vllm:\S+(?:{.*})?) (\S+)$", answer.text, re.MULTILINE)}


def test_metrics_grow_by_the_numbers_of_receipt_and_ingest(service, openai, documents, first):
    """A document nobody has seen is stored, then asked about once, saving nothing."""
    text = " ".join(f"On day {day} the harbour counted {day * 37 % 101} ships." for day in range(70)) + "\n\n"
    before = metrics_of(service)
    stored = first.ingest([text]).data[0]
    answer = openai.chat.completions.create(
        model=MODEL, temperature=0, max_tokens=4, extra_body={"kv_transfer_params": {"ucm": {"save": False}}},
        messages=[{"role": "user", "content": f"Read this: {text}How many ships came on day 3?"}])
    receipt = answer.model_extra["kv_transfer_params"]["ucm"]
    blend, replica = receipt["blend"], receipt["replica"]
    assert blend["reused_tokens"] >= 0.9 * stored.num_tokens > 500

    def grown(name: str, after: dict[str, float]) -> float:
        return after[name] - before.get(name, 0.0)

    written = f'vllm:ucm_store_bytes{{replica="{replica}",stage="Posix"}}'
    after = eventually(lambda: (now := metrics_of(service)) and grown(written, now) and now)
    assert after["vllm:ucm_directory_up"] == 1.0
    expected = {
        'vllm:ucm_prompt_tokens_total{source="prefix"}': blend["prefix_tokens"],
        'vllm:ucm_prompt_tokens_total{source="reused"}': blend["reused_tokens"] - blend["recomputed_tokens"],
        'vllm:ucm_prompt_tokens_total{source="recomputed"}': blend["recomputed_tokens"],
        'vllm:ucm_prompt_tokens_total{source="computed"}':
            blend["prompt_tokens"] - blend["prefix_tokens"] - blend["reused_tokens"],
        'vllm:ucm_requests_total{outcome="blended",reason=""}': 1,
        "vllm:ucm_missed_tokens_total": blend["missed_tokens"],
        "vllm:ucm_load_seconds_count": 1,
        "vllm:ucm_load_seconds_sum": blend["load_ms"] / 1e3,
        "vllm:ucm_recompute_seconds_count": 1,
        "vllm:ucm_recompute_seconds_sum": blend["recompute_ms"] / 1e3,
        "vllm:ucm_ingested_tokens_total": stored.num_tokens,
        "vllm:ucm_stored_chunks": stored.new_chunks,
        "vllm:ucm_stored_bytes": stored.num_bytes,
        written: stored.num_bytes + stored.new_chunks * 4096,  # the first page of every file is its header
        f'vllm:ucm_store_reads{{replica="{replica}",result="hits",stage="Cache"}}': stored.num_chunks,
    }
    assert {name: grown(name, after) for name in expected} == pytest.approx(expected)


def test_every_metric_of_the_ingress_is_exposed(service):
    exposed = httpx.get(f"{service.url}/metrics", headers={"Authorization": f"Bearer {KEYS[0]}"}, timeout=60).text
    families = set(re.findall(r"# TYPE (\S+)", exposed))
    assert {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in ServiceMetrics().names()} <= {
        re.sub(r"_total$", "", family) for family in families}


def test_text_becomes_the_ids_the_engine_reads_and_back(service, first, openai, model_dir):
    """vLLM's helper routes; a chat's ids are those of the request itself."""
    from transformers import AutoTokenizer

    def post(path: str, **body) -> httpx.Response:
        return httpx.post(service.url + path, json=body, headers={"Authorization": f"Bearer {KEYS[0]}"}, timeout=60)

    tokenizer, text = AutoTokenizer.from_pretrained(model_dir), "The lighthouse of Kolka, 1884 – ünïcode."
    answer = post("/tokenize", model=MODEL, prompt=text, return_token_strs=True).json()
    ids = tokenizer.encode(text)
    assert answer["tokens"] == ids and answer["count"] == len(ids) and answer["max_model_len"] == 4096
    assert answer["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    assert post("/tokenize", prompt=text).json()["tokens"] == ids
    assert post("/detokenize", model=MODEL, tokens=ids).json()["prompt"] == text
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    chat = post("/tokenize", model=MODEL, messages=messages).json()
    assert chat["tokens"] == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    asked = openai.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    assert asked.usage.prompt_tokens == chat["count"]
    for path, body, status in (("/tokenize", {}, 400), ("/tokenize", {"model": "none", "prompt": "a"}, 404),
                               ("/detokenize", {"tokens": ["a"]}, 400), ("/detokenize", {"tokens": [-1]}, 400),
                               ("/detokenize", {"tokens": [10**12]}, 400)):
        refused = post(path, **body)
        assert refused.status_code == status and refused.json()["error"]["message"], (path, body, refused.text)


def test_the_command_line_does_the_same(service, documents, tmp_path):
    from typer.testing import CliRunner

    from ucm_ray.cli import app

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(app, [*arguments, "--url", service.url, "--api-key", KEYS[1]])
        assert done.exit_code == 0, done.output
        return done.output

    file = tmp_path / "one.txt"
    file.write_text(documents[15].text)
    stored = json.loads(run("ingest", str(file), "--json"))[0]
    assert stored["num_chunks"] >= 4
    assert "1 of 1 documents" in run("cache", "list")
    assert "would be recomputed" in run("cache", "lookup", f"@{file}")
    assert "chunks pinned" in run("cache", "pin", "-d", stored["id"])
    assert "chunks deleted" in run("cache", "delete", "-d", stored["id"])
    assert "0 of 0 documents" in run("cache", "list")
    assert json.loads(run("cache", "stats"))["pinned"] == 0
    refused = CliRunner().invoke(app, ["cache", "stats", "--url", service.url, "--api-key", "wrong"])
    assert refused.exit_code == 1 and "401" in refused.output


def test_a_newcomers_first_blended_answer_takes_curl_alone(service, tmp_path):
    """The example of the README, with this service's key and model name."""
    import shutil
    import subprocess
    from pathlib import Path

    shutil.copytree(Path(__file__).parents[2] / "examples", tmp_path / "examples")
    question = tmp_path / "examples" / "question.json"
    question.write_text(question.read_text().replace("smollm2-135m-instruct", MODEL))
    script = tmp_path / "examples" / "first_request.sh"
    script.write_text(script.read_text().replace("JSON=(", f"JSON=(-H 'Authorization: Bearer {KEYS[1]}' "))
    done = subprocess.run(["bash", script, service.url], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    receipt = json.loads(done.stdout.split("Receipt:")[1])
    assert receipt["blend"]["reused_tokens"] > 900
