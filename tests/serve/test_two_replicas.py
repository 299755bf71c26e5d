"""Two replicas over one folder: sharing, and what happens when parts of the service are killed."""

import asyncio
import os
import re
import signal
from pathlib import Path

import httpx
import openai as openai_package
import pytest

from tests.fake_nodes import FakeNodesCluster
from tests.serve.conftest import ENGINE, MODEL, STORE, eventually, messages_of, stop_single_service
from ucm_ray.client import Client, ClientError

pytestmark = [pytest.mark.service, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = FakeNodesCluster(tmp_path_factory.mktemp("cluster"), {"CPU": 1}, max_workers=1,
                               object_store_bytes=200 * 2**20)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def pair(start_service, cluster):
    """One replica, which fills the head node but for a rest; a second one needs a node that is not there yet."""
    stop_single_service()
    return start_service({
        "engine": ENGINE, "store": STORE,
        "esa": {"enabled": True, "min_saved_bytes": 0, "deadline_ms": 200.0},
        "retrieval": {"backend": "ray", "capacity_bytes": "64MiB"},
        # any request within Serve's last 30 s asks for the second replica: it goes only when the load has ended
        "service": {"model_id": MODEL, "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 0.01,
                    "downscale_delay_s": 12, "router": "chunk_aware", "replica_cpus": 1},
    }, cluster=cluster)


@pytest.fixture
def client(pair):
    with Client(pair.url) as client:
        yield client


def ask(pair, *calls: dict, **common) -> list:
    """Sends requests at the same time; answers or exceptions, in order."""
    async def scenario():
        async with openai_package.AsyncOpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0) as api:
            return await asyncio.gather(*(api.chat.completions.create(
                model=MODEL, temperature=0, **{"max_tokens": 16} | common | call) for call in calls),
                return_exceptions=True)

    return asyncio.run(scenario())


def ucm_of(answer) -> dict:
    return answer.model_extra["kv_transfer_params"]["ucm"]


def processes_named(pair, name: str) -> list[int]:
    found = []
    for process in pair.processes():
        try:
            if name in Path(f"/proc/{process}/cmdline").read_text():
                found.append(process)
        except OSError:
            continue
    return found


def test_waiting_requests_bring_a_second_replica_on_a_node_of_its_own(pair, cluster, client, documents):
    assert cluster.num_nodes() == 1
    seen: set[str] = set()

    async def scenario():
        async with openai_package.AsyncOpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0) as api:
            async def user(number: int) -> None:
                while len(seen) < 2:
                    answer = await api.chat.completions.create(
                        model=MODEL, messages=messages_of([], f"Count to {number}."), max_tokens=32, temperature=0)
                    seen.add(ucm_of(answer)["replica"])

            await asyncio.gather(*map(user, range(4)))

    asyncio.run(asyncio.wait_for(scenario(), 400))
    assert cluster.num_nodes() == 2


def test_a_document_ingested_through_one_replica_is_reused_by_both(pair, client, documents):
    ingested = client.ingest([document.stored_text for document in documents[:8]]).data
    tokens = sum(one.num_tokens for one in ingested)
    calls = [{"messages": messages_of(documents[:8], document.questions[0].question)} for document in documents[:8]]
    answers = ask(pair, *calls)
    assert all(ucm_of(answer)["blend"]["reused_tokens"] >= 0.9 * tokens for answer in answers)
    assert len({ucm_of(answer)["replica"] for answer in answers}) == 2, "one replica got everything"


def test_a_prompt_goes_where_its_chunks_are_in_memory(pair, client, documents):
    groups = [documents[8:12], documents[12:16]]
    for group in groups:
        client.ingest([document.stored_text for document in group])
    homes = []
    for group in groups:
        home = {ucm_of(ask(pair, {"messages": messages_of(group, question.question)})[0])["replica"]
                for document in group for question in document.questions[:1]}
        homes.append(home)
    assert all(len(home) == 1 for home in homes), "the same documents were sent to both replicas"


def test_a_conversation_goes_on_where_its_text_was_computed(pair, client, documents):
    """Nothing of it was ingested, and what its first turn computed may not be listed yet when the second comes."""
    homes = []
    for talk in range(3):
        messages = [{"role": "system", "content": f"You are reader number {talk}."}]
        for turn in range(3):
            told = documents[11 + 3 * talk + turn].text[::-1][:600]  # text that no other test stores
            messages += [{"role": "user", "content": f"{talk}: {told}"}]
            homes.append(ucm_of(ask(pair, {"messages": messages}, max_tokens=4)[0])["replica"])
            messages += [{"role": "assistant", "content": f"That was part {turn}."}]
    assert all(len(set(homes[start:start + 3])) == 1 for start in (0, 3, 6)), homes


def test_a_killed_directory_stops_nobody_and_comes_back(pair, client, documents):
    before = client.documents().total
    for process in processes_named(pair, "ChunkDirectory"):
        os.kill(process, signal.SIGKILL)
    answer = ask(pair, {"messages": messages_of(documents[:4], "What is it about?")})[0]
    assert ucm_of(answer)["blend"]["reused_tokens"] > 900

    def listed() -> bool:
        try:
            return client.documents().total == before
        except ClientError as error:
            assert error.status == 503, error
            return False

    eventually(listed, 60)


def test_killed_retrieval_shards_stop_nobody_and_come_back(pair, client, documents):
    """Sparse decode asks the shards; without them it decodes by what it has, and says so."""
    def esa_of(question: str) -> dict:
        answer = ask(pair, {"messages": messages_of(documents[:8], question)}, max_tokens=48,
                     extra_body={"ignore_eos": True})[0]
        return ucm_of(answer)["esa"]

    assert eventually(lambda: esa_of("What is it about?")["sparse_steps"] > 0, 60)
    shards = processes_named(pair, "RetrievalShardActor")
    assert shards
    for process in shards:
        os.kill(process, signal.SIGKILL)
    assert esa_of("And who says so?")["blocks_total"] > 0

    def exact_again() -> bool:
        receipt = esa_of("Where was that?")
        return receipt["sparse_steps"] > 40 and receipt["fallbacks"] == 0

    assert eventually(exact_again, 120)
    assert not set(shards) & set(processes_named(pair, "RetrievalShardActor"))


def test_a_replica_killed_in_mid_stream_breaks_its_own_streams_only(pair, client, documents):
    before = client.chunks().total
    engines = processes_named(pair, "UcmLLMServer")
    assert len(engines) == 2

    async def stream(api, number: int) -> str:
        question = documents[number % 8].questions[0].question
        chunks = await api.chat.completions.create(
            model=MODEL, messages=messages_of(documents[:8], question), max_tokens=120, stream=True, temperature=0,
            extra_body={"ignore_eos": True})
        async for _ in chunks:
            started.add(number)
        return "finished"

    async def scenario() -> list:
        async with openai_package.AsyncOpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0) as api:
            streams = [asyncio.create_task(stream(api, number)) for number in range(6)]
            while len(started) < 6:
                await asyncio.sleep(0.02)
            os.kill(engines[0], signal.SIGKILL)
            return await asyncio.gather(*streams, return_exceptions=True)

    started: set[int] = set()
    ends = asyncio.run(scenario())
    broken = [end for end in ends if end != "finished"]
    assert 0 < len(broken) < 6, ends
    for error in broken:
        assert isinstance(error, openai_package.APIError) and "not available" in str(error), repr(error)
    # the cache is as it was, and the next request is answered, and from it
    assert client.chunks().total >= before
    answer = ask(pair, {"messages": messages_of(documents[:8], "What else?")})[0]
    assert ucm_of(answer)["blend"]["reused_tokens"] > 1800
    assert re.search(r"vllm:ucm_stream_failures_total [1-6]", httpx.get(f"{pair.url}/metrics", timeout=60).text)


def test_when_the_load_has_ended_the_second_replica_goes_and_the_first_answers(pair, client, documents):
    def engines() -> int:
        return len(processes_named(pair, "UcmLLMServer"))

    eventually(lambda: engines() == 2, 60)  # the one that was killed is replaced
    eventually(lambda: engines() == 1, 120)
    answer = ask(pair, {"messages": messages_of(documents[:8], "What is left?")})[0]
    assert ucm_of(answer)["blend"]["reused_tokens"] > 1800
