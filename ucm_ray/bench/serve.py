"""Load on a running service: throughput and latency without reuse, with prefix caching only, and with blend.

The three modes are requests to the same service, each under a `cache_salt` of its own, so that none profits from
another: `plain` gives every request a new salt and switches blending off (nothing is ever reused), `prefix` switches
blending off (the engine's own prefix cache works), `blend` changes nothing.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

MODES = ("plain", "prefix", "blend")
WORKLOADS = ("rag", "rag_topics", "multi_turn", "agent")
NUM_DOCUMENTS, PER_REQUEST, PER_TOPIC = 200, 8, 10


@dataclass
class Step:
    """One request: its messages, and whether the answer goes into the session's next one."""

    messages: list[dict[str, str]]


@dataclass
class Session:
    """Requests that one user sends one after the other."""

    steps: list[Step]


@dataclass
class Measured:
    """One finished request; times in seconds."""

    ttft_s: float
    gaps_s: list[float] = field(default_factory=list)
    total_s: float = 0.0
    tokens: int = 0
    receipt: dict[str, Any] = field(default_factory=dict)

    @property
    def tpot_s(self) -> float:
        return (self.total_s - self.ttft_s) / max(self.tokens - 1, 1)


def documents_of(count: int, seed: int = 0) -> list[str]:
    """Texts of about 260 tokens: the bundled documents, then recombinations of their sentences."""
    from ucm_ray.bench.data import SEPARATOR, load_documents

    texts = [document.text for document in load_documents()]
    sentences = [sentence for text in texts for sentence in re.split(r"(?<=[.!?])\s+", text)]
    length = sum(map(len, texts)) // len(texts)
    draw = random.Random(f"bench serve documents {seed}")
    while len(texts) < count:
        text = f"Record {len(texts)}."
        while len(text) < length:
            text += " " + draw.choice(sentences)
        texts.append(text[:length].rsplit(" ", 1)[0] + ".")
    return [text + SEPARATOR for text in texts[:count]]


def system_prompt() -> str:
    from ucm_ray.bench.data import load_system_prompt

    return load_system_prompt()


def rag_sessions(count: int, seed: int) -> list[Session]:
    """8 of 200 documents a request, popularity by Zipf's law, in random order, and a question."""
    documents = documents_of(NUM_DOCUMENTS)
    draw = random.Random(f"bench serve rag {seed}")
    order = list(range(NUM_DOCUMENTS))
    draw.shuffle(order)
    weights = [1 / (rank + 1) for rank in range(NUM_DOCUMENTS)]
    sessions = []
    for number in range(count):
        chosen: list[int] = []
        while len(chosen) < PER_REQUEST:
            rank = draw.choices(range(NUM_DOCUMENTS), weights)[0]
            if order[rank] not in chosen:
                chosen.append(order[rank])
        draw.shuffle(chosen)
        sessions.append(_asked(number, [documents[index] for index in chosen], draw))
    return sessions


def rag_topics_sessions(count: int, seed: int) -> list[Session]:
    """As retrieval answers: documents of one topic together. 20 topics of 10 of the same 200 documents; the topic of a
    request by the same Zipf's law, 8 of its 10 documents in random order, and a question."""
    documents = documents_of(NUM_DOCUMENTS)
    draw = random.Random(f"bench serve rag topics {seed}")
    order = draw.sample(range(NUM_DOCUMENTS), NUM_DOCUMENTS)
    topics = [order[start:start + PER_TOPIC] for start in range(0, NUM_DOCUMENTS, PER_TOPIC)]
    weights = [1 / (rank + 1) for rank in range(len(topics))]
    return [_asked(number, [documents[index] for index in draw.sample(draw.choices(topics, weights)[0], PER_REQUEST)],
                   draw) for number in range(count)]


def _asked(number: int, documents: Sequence[str], draw: random.Random) -> Session:
    """One request about documents."""
    question = f"Question {number}: what does the text number {draw.randint(1, PER_REQUEST)} above speak of?"
    return Session([Step(_chat("".join(documents) + question))])


def multi_turn_sessions(count: int, seed: int, turns: int = 16, kept: int = 8) -> list[Session]:
    """Conversations that outgrow their window, eight turns of 310 tokens: from the tenth on the oldest is dropped and
    nothing after the system prompt is a prefix."""
    documents = documents_of(NUM_DOCUMENTS)
    draw = random.Random(f"bench serve multi turn {seed}")
    sessions = []
    for _ in range(max(1, count // turns)):
        told = [draw.choice(documents) + f"Sum this up, part {turn}." for turn in range(turns)]
        replies = [draw.choice(documents)[:200] for _ in range(turns)]
        steps = []
        for turn in range(turns):
            messages = [{"role": "system", "content": system_prompt()}]
            for before in range(max(0, turn - kept), turn):
                messages += [{"role": "user", "content": told[before]},
                             {"role": "assistant", "content": replies[before]}]
            steps.append(Step([*messages, {"role": "user", "content": told[turn]}]))
        sessions.append(Session(steps))
    return sessions


def agent_sessions(count: int, seed: int, rounds: int = 5, tools: int = 12) -> list[Session]:
    """Agents that are shown the outputs of tools again and again, newest first, behind a line that changes."""
    documents = documents_of(NUM_DOCUMENTS)
    draw = random.Random(f"bench serve agent {seed}")
    outputs = draw.sample(documents, tools)
    sessions = []
    for number in range(max(1, count // rounds)):
        seen: list[str] = draw.sample(outputs, 2)
        steps = []
        for turn in range(rounds):
            seen = [draw.choice([output for output in outputs if output not in seen]), *seen]
            text = f"Step {turn} of task {number}.\n\n" + "".join(f"Tool output:\n{output}" for output in seen)
            steps.append(Step(_chat(text + "Which tool is to be called next, and why?")))
        sessions.append(Session(steps))
    return sessions


SESSIONS = {"rag": rag_sessions, "rag_topics": rag_topics_sessions, "multi_turn": multi_turn_sessions,
            "agent": agent_sessions}


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system_prompt()}, {"role": "user", "content": text}]


class Load:
    """Sends sessions with a bounded number at once."""

    def __init__(self, url: str, api_key: str | None, model: str, max_tokens: int, run: str):
        import httpx

        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.http = httpx.AsyncClient(base_url=url, headers=headers, timeout=600)
        self._model, self._max_tokens, self._run = model, max_tokens, run

    def controls(self, mode: str) -> dict[str, Any]:
        if mode == "plain":
            return {"cache_salt": uuid.uuid4().hex, "kv_transfer_params": {"ucm": {"blend": False, "save": False}}}
        if mode == "prefix":
            return {"cache_salt": f"{self._run}-prefix", "kv_transfer_params": {"ucm": {"blend": False, "save": False}}}
        return {"cache_salt": f"{self._run}-blend"}

    async def send(self, step: Step, mode: str) -> Measured:
        """One streamed request. Raises RuntimeError with the service's words."""
        body = {"model": self._model, "messages": step.messages, "max_tokens": self._max_tokens, "temperature": 0,
                "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}} | self.controls(mode)
        started_s = last_s = time.perf_counter()
        measured = None
        async with self.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode()[:300]}")
            async for chunk in _chunks(answer.aiter_lines()):
                now_s = time.perf_counter()
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                if any(choice["delta"].get("content") for choice in chunk["choices"]):
                    if measured is None:
                        measured = Measured(now_s - started_s)
                    else:
                        measured.gaps_s.append(now_s - last_s)
                    last_s = now_s
                if measured is not None:
                    measured.tokens = (chunk.get("usage") or {}).get("completion_tokens", measured.tokens)
                    measured.receipt = (chunk.get("kv_transfer_params") or {}).get("ucm", measured.receipt)
        if measured is None:
            raise RuntimeError("the answer has no token")
        measured.total_s = last_s - started_s
        return measured

    async def run(self, sessions: Sequence[Session], mode: str, concurrency: int) -> tuple[list[Measured], float]:
        """All requests, and the seconds from the first to the last."""
        waiting, done = iter(sessions), []

        async def user(mine: Iterator[Session]) -> None:
            for session in mine:
                for step in session.steps:
                    done.append(await self.send(step, mode))

        started_s = time.perf_counter()
        # all users draw from one iterator: whoever is free takes the next session
        await asyncio.gather(*(user(waiting) for _ in range(concurrency)))
        return done, time.perf_counter() - started_s

    async def read_bytes(self) -> float:
        """Bytes of KV that the stages behind host memory have read so far, all replicas together."""
        from prometheus_client.parser import text_string_to_metric_families

        text = (await self.http.get("/metrics")).text
        return sum(sample.value for family in text_string_to_metric_families(text)
                   if family.name == "vllm:ucm_store_loaded_bytes" for sample in family.samples)

    async def bytes_per_token(self) -> float:
        """Of the KV stored under the blend mode's salt; 0 while nothing is stored."""
        salt = self.controls("blend")["cache_salt"]
        page = (await self.http.get("/ucm/v1/chunks", params={"cache_salt": salt, "limit": 100})).json()["data"]
        return sum(chunk["num_bytes"] for chunk in page) / max(sum(chunk["num_tokens"] for chunk in page), 1)

    async def ingest(self, documents: Sequence[str]) -> float:
        """Store documents under the blend mode's salt; seconds."""
        started_s = time.perf_counter()
        for start in range(0, len(documents), 16):
            body = {"documents": [{"text": text} for text in documents[start:start + 16]],
                    "cache_salt": self.controls("blend")["cache_salt"]}
            answer = await self.http.post("/ucm/v1/documents", json=body)
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {answer.text[:300]}")
        return time.perf_counter() - started_s


async def _chunks(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    async for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line[len("data: "):])


def row_of(workload: str, mode: str, done: list[Measured], wall_s: float, ttft_limit_s: float,
           tpot_limit_s: float) -> dict[str, Any]:
    """One row of the result."""
    from ucm_ray.bench.report import percentile

    ttft = [one.ttft_s for one in done]
    gaps = [gap for one in done for gap in one.gaps_s] or [0.0]
    good = sum(one.ttft_s <= ttft_limit_s and one.tpot_s <= tpot_limit_s for one in done)
    blend = [one.receipt.get("blend") or {} for one in done]
    prompt = sum(receipt.get("prompt_tokens", 0) for receipt in blend)
    reused = sum(receipt.get("reused_tokens", 0) for receipt in blend)
    prefix = sum(receipt.get("prefix_tokens", 0) for receipt in blend)
    return {
        "workload": workload, "mode": mode, "requests": len(done), "req_s": len(done) / wall_s,
        "ttft_p50_s": percentile(ttft, 50), "ttft_p99_s": percentile(ttft, 99),
        "tpot_p50_ms": 1e3 * percentile([one.tpot_s for one in done], 50),
        "gap_max_ms": 1e3 * max(gaps), "goodput_req_s": good / wall_s,
        "reused_share": reused / prompt if prompt else 0.0, "prefix_share": prefix / prompt if prompt else 0.0,
    }


def memory_share(done: list[Measured], read_bytes: float, bytes_per_token: float) -> float:
    """Share of the reused tokens whose KV was found in the host memory of the replica that wanted it."""
    reused = sum((one.receipt.get("blend") or {}).get("reused_tokens", 0) for one in done)
    if not reused or not bytes_per_token:
        return 0.0
    return max(0.0, 1.0 - read_bytes / bytes_per_token / reused)


async def measure(load: Load, workloads: Sequence[str], modes: Sequence[str], requests: int, concurrency: int,
                  seed: int, ttft_limit_s: float, tpot_limit_s: float) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows, and the seconds that ingesting took."""
    rows, ingest_s = [], {}
    for workload in workloads:
        sessions = SESSIONS[workload](requests, seed)
        for mode in modes:
            if mode == "blend" and workload.startswith("rag"):
                ingest_s[workload] = await load.ingest(documents_of(NUM_DOCUMENTS))
            await load.send(Step(_chat(f"Say hello. {mode}")), mode)  # the system prompt is nobody's first
            read_before = await load.read_bytes()
            done, wall_s = await load.run(sessions, mode, concurrency)
            rows.append(row_of(workload, mode, done, wall_s, ttft_limit_s, tpot_limit_s))
            if mode == "blend":
                read = await load.read_bytes() - read_before
                rows[-1]["memory_share"] = memory_share(done, read, await load.bytes_per_token())
            typer.echo(f"{workload} {mode}: {rows[-1]['req_s']:.2f} requests/s, "
                       f"TTFT {rows[-1]['ttft_p50_s']:.3f} s", err=True)
    return rows, ingest_s


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    url: Annotated[str, typer.Option(envvar="UCM_RAY_URL", help="Address of a running service.")] = (
        "http://127.0.0.1:8000"),
    api_key: Annotated[str | None, typer.Option(envvar="UCM_RAY_API_KEY")] = None,
    workload: Annotated[list[str] | None, typer.Option(help=f"{', '.join(WORKLOADS)}; default: all.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help="plain, prefix, blend; default: all.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests per workload and mode.")] = 40,
    concurrency: Annotated[int, typer.Option(min=1)] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of every request.")] = 32,
    seed: int = 0,
    goodput_ttft_s: Annotated[float, typer.Option(help="A request is good below this time to first token ...")] = 2.0,
    goodput_tpot_ms: Annotated[float, typer.Option(help="... and below this time per output token.")] = 200.0,
) -> None:
    """Load on a running service: plain, prefix caching only, and blend."""
    import httpx

    from ucm_ray.bench.report import machine_info, table, write_json

    workloads, modes = workload or list(WORKLOADS), mode or list(MODES)
    for given, known in ((workloads, WORKLOADS), (modes, MODES)):
        if unknown := sorted(set(given) - set(known)):
            raise typer.BadParameter(f"found {unknown[0]!r}, expected some of {', '.join(known)}")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=10)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        typer.echo(f"no service answers at {url} ({error}); start one with 'make serve'", err=True)
        raise typer.Exit(2) from None
    model = answer.json()["data"][0]["id"]

    async def run() -> tuple[list[dict[str, Any]], dict[str, float]]:
        load = Load(url, api_key, model, max_tokens, uuid.uuid4().hex[:8])
        async with load.http:
            return await measure(load, workloads, modes, requests, concurrency, seed, goodput_ttft_s,
                                 goodput_tpot_ms / 1e3)

    rows, ingest_s = asyncio.run(run())
    table(rows)
    if json_path is not None:
        write_json(json_path, {"rows": rows, "ingest_s": ingest_s, "machine": machine_info(),
                               "settings": {"requests": requests, "concurrency": concurrency, "max_tokens": max_tokens,
                                            "documents": NUM_DOCUMENTS, "per_request": PER_REQUEST, "seed": seed,
                                            "goodput_ttft_s": goodput_ttft_s, "goodput_tpot_ms": goodput_tpot_ms}})
