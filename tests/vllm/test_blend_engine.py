"""Blend inside vLLM, with the default model: the design's invariants, each compared with plain vLLM."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
import torch

from tests.vllm.helpers import receipt, shuffled, text_ids
from ucm_ray.integration.vllm.catalogue import ChunkCatalogue

pytestmark = pytest.mark.engine


def logprobs_of(output) -> torch.Tensor:
    """Log-probabilities of the chosen tokens."""
    steps = zip(output.outputs[0].logprobs, text_ids(output), strict=True)
    return torch.tensor([step[token].logprob for step, token in steps])


# ---- invariant 1


def test_recomputing_everything_equals_full_prefill(fresh, documents, rag):
    prompt = rag([2, 0, 3, 1])
    plain = fresh.plain(prompt, logprobs=1)
    fresh.forget_prefixes()
    fresh.ingest(documents[:4])
    blended = fresh.ask(prompt, ucm={"policy": "query", "budget": 1.0}, logprobs=1)
    assert receipt(blended)["recomputed_tokens"] == receipt(blended)["reused_tokens"] > 300
    assert text_ids(blended) == text_ids(plain)
    assert torch.allclose(logprobs_of(blended), logprobs_of(plain), atol=1e-3)


def test_without_recompute_the_answer_differs_from_full_prefill(fresh, documents, rag):
    """The check above can fail: reuse without repair is visible in the same numbers."""
    prompt = rag([2, 0, 3, 1])
    plain = fresh.plain(prompt, logprobs=1)
    fresh.forget_prefixes()
    fresh.ingest(documents[:4])
    blended = fresh.ask(prompt, ucm={"policy": "none"}, logprobs=1)
    assert receipt(blended)["recomputed_tokens"] == 0
    same = text_ids(blended) == text_ids(plain)
    assert not (same and torch.allclose(logprobs_of(blended), logprobs_of(plain), atol=1e-3))


def test_a_prompt_computed_exactly_and_sent_again_needs_no_recompute(fresh, rag):
    prompt = rag([0, 1, 2])
    first = fresh.ask(prompt, ucm={"blend": False, "save": True}, logprobs=1)
    fresh.forget_prefixes()
    again = fresh.ask(prompt, logprobs=1)
    assert receipt(again)["recomputed_tokens"] == 0
    assert receipt(again)["reused_tokens"] >= len(prompt) - 64 - 1
    assert text_ids(again) == text_ids(first)
    assert torch.allclose(logprobs_of(again), logprobs_of(first), atol=1e-4)
    # its KV is exact, so vLLM's own prefix cache may have it
    third = fresh.ask(prompt, logprobs=1)
    assert receipt(third)["prefix_tokens"] >= len(prompt) - 32 - 1
    assert text_ids(third) == text_ids(first)


# ---- invariant 2


def test_a_recomputed_token_is_unaffected_by_kv_after_its_position(engine, documents):
    from ucm_ray.integration.vllm.virtual_sequences import Row

    worker, blocks = engine.worker, np.arange(8, 16)
    tokens = np.array(documents[0] + documents[1], np.int32)
    rows = [Row(start, start + 3, tokens, blocks) for start in range(20, 120, 20)]
    worker._virtual.run([Row(0, 192, tokens, blocks)])
    worker._virtual.run(rows)
    slots = worker._paged.slots(torch.from_numpy(blocks), torch.arange(192))
    last = len(worker._paged.names) - 1
    positions = torch.cat([torch.arange(row.start, row.end) for row in rows])
    before = [half[positions] for half in worker._paged.read(last, slots)]
    for layer in range(last + 1):
        key, value = worker._paged.read(layer, slots)
        worker._paged.write(layer, slots[103:], key[103:] + 9.0, value[103:] - 7.0)
    worker._virtual.run(rows)
    after = [half[positions] for half in worker._paged.read(last, slots)]
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])


def test_a_row_with_a_hole_is_what_the_model_computes_for_a_prompt_with_one(engine, documents, model_dir):
    """Against transformers, with the same tokens left out and the same positions."""
    from transformers import AutoModelForCausalLM

    from ucm_ray.integration.vllm.virtual_sequences import Row

    worker, blocks = engine.worker, np.arange(8, 16)
    tokens = np.array(documents[0] + documents[1], np.int32)
    slots = worker._paged.slots(torch.from_numpy(blocks), torch.arange(192))
    last = len(worker._paged.names) - 1
    for layer in range(last + 1):  # whoever looks into the hole sees this
        junk = torch.full((64, worker._paged.num_kv_heads, worker._paged.head_dim), 50.0)
        worker._paged.write(layer, slots[64:128], junk, junk)
    worker._virtual.run([Row(0, 64, tokens, blocks)])
    worker._virtual.run([Row(128, 150, tokens, blocks, hidden=(64, 128))])
    key, value = worker._paged.read(last, slots[128:150])
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    positions = torch.cat([torch.arange(64), torch.arange(128, 150)])
    with torch.inference_mode():
        found = model(torch.from_numpy(tokens)[positions][None].long(), position_ids=positions[None], use_cache=True)
    expected = found.past_key_values.layers[last]
    assert torch.allclose(key, expected.keys[0, :, 64:].transpose(0, 1), atol=2e-3)
    assert torch.allclose(value, expected.values[0, :, 64:].transpose(0, 1), atol=2e-3)


def test_new_text_before_a_far_question_is_computed_once(fresh, documents, rag, monkeypatch):
    new = documents[6] + documents[7] + documents[8]
    prompt = rag([1, 0]) + new + fresh.tokens("\n\nQuestion: Which of these is the oldest?\nAnswer:")
    full = fresh.plain(prompt, 16)
    fresh.forget_prefixes()
    fresh.ingest(documents[:2])
    run, computed = fresh.worker._virtual.run, []

    def counting_run(rows, *args):
        computed.extend(position for row in rows for position in range(row.start, row.end))
        return run(rows, *args)

    monkeypatch.setattr(fresh.worker._virtual, "run", counting_run)
    repaired = fresh.ask(prompt, 16, ucm={"budget": 1.0, "save": False})
    assert text_ids(repaired) == text_ids(full)
    assert receipt(repaired)["policy"] == "query"
    # all of it, and before that the question and what lies between documents
    assert len(computed) < len(prompt) + 128 + 2 * 32 + 60
    assert len(set(computed)) > len(prompt) - 3


# ---- invariants 3 and 4


def test_blended_kv_is_unreachable_through_the_exact_prefix_cache(fresh, documents, rag):
    prompt = rag([3, 1, 0, 2])
    plain = fresh.plain(prompt, 16)
    fresh.forget_prefixes()
    fresh.ingest(documents[:4])
    fresh.ask(prompt, 16, ucm={"policy": "none"})
    after = fresh.plain(prompt, 16)
    assert text_ids(after) == text_ids(plain)
    assert after.num_cached_tokens == 0
    # and the exact KV of that run is served again
    assert fresh.plain(prompt, 16).num_cached_tokens >= len(prompt) - 33


def test_same_text_blended_and_plain_in_the_same_step(fresh, documents, rag):
    prompt = rag([1, 3, 0])
    plain = fresh.plain(prompt, 12)
    fresh.forget_prefixes()
    fresh.ingest(documents[:4])
    engine = fresh.llm.llm_engine
    from vllm.sampling_params import RequestOutputKind

    finished = {}
    for name, ucm in (("b1", {"policy": "none"}), ("b2", {"policy": "none"}),
                      ("p1", {"blend": False}), ("p2", {"blend": False})):
        params = fresh.sampling(12, {**ucm, "save": False})
        params.output_kind = RequestOutputKind.FINAL_ONLY
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            finished[output.request_id] = output
    fresh.settle()
    assert text_ids(finished["p1"]) == text_ids(finished["p2"]) == text_ids(plain)
    assert text_ids(finished["b1"]) == text_ids(finished["b2"])
    assert receipt(finished["b1"])["reused_tokens"] == receipt(finished["b2"])["reused_tokens"] > 0


def test_nothing_is_written_below_vllms_own_prefix_hit(fresh, documents, rag):
    shared = rag([0, 1], question="")
    fresh.plain(shared, 1)
    hit = len(shared) // 32 * 32
    fresh.ingest(documents[2:5])
    prompt = shared + documents[4] + documents[3] + fresh.tokens("\n\nQuestion: Who is named?\nAnswer:")
    blended = fresh.ask(prompt, ucm={"policy": "none"})
    assert receipt(blended)["prefix_tokens"] >= hit - 32
    assert receipt(blended)["reused_tokens"] > 100
    longer = shared + fresh.tokens(" And then?")
    with_hit = fresh.plain(longer, 8)
    assert with_hit.num_cached_tokens >= hit - 32
    fresh.forget_prefixes()
    assert text_ids(fresh.plain(longer, 8)) == text_ids(with_hit)


def test_blended_kv_never_enters_the_store(fresh, documents, rag):
    fresh.ingest(documents[:4])
    before = fresh.files()
    for seed in range(3):
        blended = fresh.ask(rag(shuffled(range(4), seed)), ucm={"policy": "query"})
        assert receipt(blended)["reused_tokens"] > 300
    assert fresh.files() == before


# ---- invariant 5


@pytest.mark.parametrize("damage", ["corrupt", "truncate", "delete", "foreign"])
def test_a_damaged_chunk_costs_time_and_no_wrong_token(fresh, documents, rag, damage):
    prompt = rag([1, 0, 2])
    plain = fresh.plain(prompt)
    fresh.forget_prefixes()
    fresh.ingest(documents[:3])
    fresh.forget_host_memory()
    files = fresh.files()
    others = [path.read_bytes() for path in files[1:] + files[:1]]
    for path, other in zip(files, others, strict=True):
        data = bytearray(path.read_bytes())
        if damage == "corrupt":
            data[-100] ^= 0x40
            path.write_bytes(data)
        elif damage == "truncate":
            path.write_bytes(data[: len(data) // 2])
        elif damage == "delete":
            path.unlink()
        else:
            path.write_bytes(other)
    os.sync()
    blended = fresh.ask(prompt, ucm={"policy": "none"})
    assert receipt(blended)["reused_tokens"] == 0
    assert text_ids(blended) == text_ids(plain)


def test_one_damaged_chunk_is_computed_and_the_others_are_reused(fresh, documents, rag):
    fresh.ingest(documents[:3])
    fresh.forget_host_memory()
    victim = fresh.files()[0]
    victim.write_bytes(victim.read_bytes()[:-9])
    blended = fresh.ask(rag([2, 1, 0]), ucm={"policy": "none"})
    assert receipt(blended)["failed_chunks"] == 1
    assert receipt(blended)["reused_tokens"] >= 150
    assert not victim.exists()


# ---- invariant 6


def test_two_cache_salts_never_share(fresh, documents, rag):
    fresh.ingest(documents[:3], cache_salt="alice")
    prompt = rag([1, 2, 0])
    assert receipt(fresh.ask(prompt, 1, salt="alice"))["reused_tokens"] > 200
    for salt in ("bob", None):
        other = receipt(fresh.ask(prompt, 1, salt=salt, ucm={"save": False}))
        assert other["reused_tokens"] == 0 and other["reason"]


def test_after_a_restart_a_salts_first_request_finds_its_chunks_and_stops_nobody(fresh, documents, rag, monkeypatch):
    """The list of stored chunks is read meanwhile: the request waits for it, a decoding one goes on."""
    fresh.ingest(documents[:3], cache_salt="carol")
    side, engine = fresh.scheduler_side, fresh.llm.llm_engine
    restarted = ChunkCatalogue(side._store.posix, 0.2)
    read = restarted._read

    def slowly(*args) -> None:
        time.sleep(0.15)
        read(*args)

    monkeypatch.setattr(restarted, "_read", slowly)
    monkeypatch.setattr(side, "_catalogue", restarted)
    asked, match = [], side.match
    monkeypatch.setattr(side, "match", lambda *args: asked.append(match(*args)) or asked[-1])
    engine.add_request("decoding", {"prompt_token_ids": fresh.tokens("Once upon a time")},
                       fresh.sampling(60, {"blend": False, "save": False}))
    engine.step()
    asked.clear()
    engine.add_request("carol", {"prompt_token_ids": rag([1, 2, 0]), "cache_salt": "carol"},
                       fresh.sampling(1, {"save": False}))
    finished = {}
    while engine.has_unfinished_requests():
        finished.update((output.request_id, output) for output in engine.step() if output.finished)
    fresh.settle()
    restarted.close()
    assert (None, False) in asked, "the list was read before the request came"
    assert receipt(finished["carol"])["reused_tokens"] > 200
    assert len(text_ids(finished["decoding"])) == 60


# ---- new text, novel orders, several requests


def test_new_text_between_cached_documents_is_reused_at_its_third_occurrence(fresh, documents, rag):
    fresh.ingest([documents[0], documents[1]])
    first = receipt(fresh.ask(rag([0, 5, 1])))
    assert first["missed_tokens"] >= 96
    second = receipt(fresh.ask(rag([1, 5, 0])))
    third = receipt(fresh.ask(rag([5, 1, 0])))
    assert third["reused_tokens"] >= second["reused_tokens"] >= first["reused_tokens"] + 64


def test_a_chat_whose_oldest_turn_is_dropped_reuses_the_later_ones_and_their_answers(fresh, documents):
    """Every request's last turn is new, and stood behind reused text when it came first."""
    system = fresh.tokens("You answer at length.")
    turns: list[list[int]] = []
    for number in range(7):
        ask = fresh.tokens("\nUser: ") + documents[number] + fresh.tokens("\nAssistant:")
        history = sum(turns[-3:], [])
        output = fresh.ask(system + history + ask, 40)
        turns.append(ask + text_ids(output))
        fresh.forget_prefixes()
        if number > 3:  # the oldest turn is gone
            assert receipt(output)["policy"] == "query"
            assert receipt(output)["reused_tokens"] >= len(history) - 8


def test_text_that_comes_again_is_stored_beside_a_decoding_request(fresh, documents, rag, monkeypatch):
    """A busy engine has no idle step: what is met a second time is computed in small slices between the others."""
    fresh.ingest([documents[0], documents[1]])
    before = set(fresh.files())
    worker, engine = fresh.worker, fresh.llm.llm_engine
    run, slices = worker._virtual.run, []

    def counting_run(rows, *args):
        slices.append(sum(row.end - row.start for row in rows))
        return run(rows, *args)

    def through(number: int, prompt: list[int]) -> None:
        engine.add_request(f"new-{number}", {"prompt_token_ids": prompt}, fresh.sampling(1, {"policy": "none"}))
        for _ in range(30):
            engine.step()

    engine.add_request("decoding", {"prompt_token_ids": fresh.tokens("Once upon a time")},
                       fresh.sampling(100, {"blend": False, "save": False}))
    through(1, rag([0, 5, 1]))
    worker._store.flush(20)
    assert set(fresh.files()) == before
    monkeypatch.setattr(worker._virtual, "run", counting_run)
    through(2, rag([1, 5, 0]))
    assert engine.has_unfinished_requests(), "the other one had ended: the engine was idle"
    worker._store.flush(20)
    assert set(fresh.files()) > before
    assert max(slices) <= 128
    while engine.has_unfinished_requests():
        engine.step()
    fresh.settle()


def test_text_behind_the_kept_passage_has_the_kv_of_the_whole_computation(fresh, documents, rag, monkeypatch):
    """The passage's KV is computed once; what is ingested behind it afterwards is as if all had been."""
    from ucm_ray.integration.vllm.virtual_sequences import Row

    fresh.ingest([documents[0], documents[1]])
    worker = fresh.worker
    save, run, computed, rows = worker._save_chunks, worker._virtual.run, [], []

    def compare(blocks, chunks) -> None:
        save(blocks, chunks)
        for start, meta in chunks:
            computed.append((start, meta.token_ids, worker._unwritten[(meta.namespace, meta.key)][1].clone()))

    def seeing_run(new, *args):
        rows.extend(new)
        return run(new, *args)

    monkeypatch.setattr(worker, "_sink", None)
    fresh.ask(rag([0, 4, 1]), 1)
    monkeypatch.setattr(worker, "_save_chunks", compare)
    monkeypatch.setattr(worker._virtual, "run", seeing_run)
    fresh.ask(rag([0, 5, 1]), 1)
    (start, text, found), sink = computed[0], worker._sink[0]
    assert start == len(sink) == rows[-1].start, "the passage was computed again"
    tokens, blocks = np.concatenate([sink, text]).astype(np.int32), np.arange(1, 40)
    run([Row(0, len(tokens), tokens, blocks)])
    whole = torch.empty_like(found)
    worker._placer.copy_out(blocks, start, whole)
    assert torch.allclose(found, whole, atol=2e-3)


def test_a_hundred_novel_orders_keep_the_reuse_and_grow_no_store(fresh, documents, rag):
    fresh.ingest([ids[:64] for ids in documents[:14]])
    before = fresh.files()
    prompts = [sum((documents[i][:64] for i in shuffled(range(14), seed)), fresh.tokens("Read this.\n"))
               + fresh.tokens("\nQuestion: What is it about?\nAnswer:") for seed in range(100)]
    reused = [receipt(output)["reused_tokens"] for output in fresh.ask(prompts, 1, ucm={"policy": "none"})]
    assert min(reused) >= 14 * 60
    assert fresh.files() == before


def test_several_blended_requests_at_once_answer_as_one_by_one(fresh, documents, rag):
    fresh.ingest(documents[:5])
    prompts = [rag(shuffled(range(5), seed)) for seed in range(4)]
    alone = [text_ids(fresh.ask(prompt, ucm={"policy": "query"})) for prompt in prompts]
    together = fresh.ask(prompts, ucm={"policy": "query"})
    assert [text_ids(output) for output in together] == alone
    assert all(receipt(output)["recomputed_tokens"] > 0 for output in together)


def test_several_answers_to_one_prompt(fresh, documents, rag):
    fresh.ingest(documents[:3])
    from vllm import SamplingParams

    params = SamplingParams(n=3, temperature=0.8, seed=1, max_tokens=6, extra_args={"kv_transfer_params": {"ucm": {}}})
    output = fresh.llm.generate([{"prompt_token_ids": rag([2, 0, 1])}], params, use_tqdm=False)[0]
    fresh.settle()
    assert len(output.outputs) == 3


def test_cached_tokens_count_what_was_reused_and_not_recomputed(fresh, documents, rag):
    fresh.ingest(documents[:3])
    output = fresh.ask(rag([2, 0, 1]), ucm={"policy": "query", "budget": 0.2})
    found = receipt(output)
    assert output.num_cached_tokens == found["prefix_tokens"] + found["reused_tokens"] - found["recomputed_tokens"]


@pytest.mark.parametrize("policy", ["none", "boundary", "hkvd@1", "hkvd@3", "query"])
def test_every_policy_keeps_its_budget(fresh, documents, rag, policy):
    fresh.ingest(documents[:3])
    found = receipt(fresh.ask(rag([2, 0, 1]), 1, ucm={"policy": policy, "budget": 0.1}))
    assert found["policy"] == policy
    share = found["recomputed_tokens"] / found["reused_tokens"]
    assert share == 0 if policy == "none" else 0.08 < share <= 0.1


def test_without_a_question_the_boundary_policy_takes_over_and_the_receipt_says_so(fresh, documents, rag):
    fresh.ingest(documents[:3])
    found = receipt(fresh.ask(rag([2, 0, 1], question=""), 1, ucm={"policy": "query"}))
    assert found["policy"] == "boundary" and "no question" in found["reason"]


# ---- life of a request


def test_a_request_aborted_in_mid_load_gives_its_blocks_back(fresh, documents, rag, monkeypatch):
    from ucm_ray.integration.vllm import worker_side

    fresh.ingest(documents[:4])
    monkeypatch.setattr(worker_side, "IDLE_TOKENS", 4)
    free = fresh.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    engine = fresh.llm.llm_engine
    engine.add_request("doomed", {"prompt_token_ids": rag([3, 2, 1, 0])}, fresh.sampling(8, {"policy": "query"}))
    for _ in range(4):
        engine.step()
    assert fresh.worker._tasks
    engine.abort_request(list(fresh.scheduler.requests), internal=True)
    fresh.settle()
    assert not fresh.worker._tasks
    assert fresh.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    assert receipt(fresh.ask(rag([3, 2, 1, 0]), 1))["reused_tokens"] > 300


def test_a_pass_that_fails_leaves_the_request_to_vllm(fresh, documents, rag, monkeypatch):
    prompt = rag([2, 0, 1])
    plain = fresh.plain(prompt)
    fresh.forget_prefixes()
    fresh.ingest(documents[:3])

    def broken(*_):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(fresh.worker._virtual, "run", broken)
    output = fresh.ask(prompt, ucm={"policy": "query"})
    assert text_ids(output) == text_ids(plain)
    assert "out of luck" in receipt(output)["reason"] and receipt(output)["reused_tokens"] == 0


def test_an_engine_that_failed_its_check_answers_as_plain_vllm(fresh, documents, rag, monkeypatch):
    """The scheduler sends plans until it has heard of the check, which it never does here."""
    prompt = rag([2, 0, 1])
    plain = fresh.plain(prompt)
    fresh.forget_prefixes()
    fresh.ingest(documents[:3])
    monkeypatch.setattr(fresh.worker, "_ready", False)
    monkeypatch.setattr(fresh.worker, "_paged", None)
    output = fresh.ask(prompt, ucm={"policy": "none"})
    assert text_ids(output) == text_ids(plain)
    assert "self-check" in receipt(output)["reason"] and receipt(output)["reused_tokens"] == 0


def test_an_error_in_a_hook_never_reaches_the_engine(fresh, documents, rag, monkeypatch):
    fresh.ingest(documents[:3])
    prompt = rag([2, 0, 1])
    plain = fresh.plain(prompt)
    fresh.forget_prefixes()

    def broken(*_, **__):
        raise RuntimeError("out of luck")

    for target, name in ((fresh.scheduler_side, "match"), (fresh.scheduler_side, "build_meta"),
                         (fresh.scheduler_side, "finish"), (fresh.worker, "_work"), (fresh.worker, "take_report")):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, broken)
            output = fresh.ask(prompt, ucm={"policy": "query", "budget": 1.0})
        assert text_ids(output) == text_ids(plain), name
        fresh.forget_prefixes()
    assert receipt(fresh.ask(prompt))["reused_tokens"] > 200


def test_counters_add_up_to_the_receipts(fresh, documents, rag, monkeypatch):
    fresh.ingest(documents[:3])
    fresh.scheduler_side.take_counters()
    with monkeypatch.context() as patch:  # the engine would take them every step
        patch.setattr(fresh.scheduler_side, "take_counters", dict)
        seen = [receipt(fresh.ask(rag(shuffled(range(3), seed)), 1)) for seed in range(3)]
    counters = fresh.scheduler_side.take_counters()
    for name in ("reused_tokens", "recomputed_tokens", "missed_tokens"):
        assert counters[name] == sum(found[name] for found in seen)
    assert counters["requests_blended"] == 3


def test_slices_give_what_one_piece_gives(fresh, documents, rag, monkeypatch):
    from ucm_ray.integration.vllm import worker_side

    fresh.ingest(documents[:4])
    prompt = rag([3, 0, 1, 2])
    whole = fresh.ask(prompt, ucm={"policy": "query"}, logprobs=1)
    monkeypatch.setattr(worker_side, "IDLE_TOKENS", 16)
    sliced = fresh.ask(prompt, ucm={"policy": "query"}, logprobs=1)
    assert text_ids(sliced) == text_ids(whole)
    assert torch.allclose(logprobs_of(sliced), logprobs_of(whole), atol=1e-3)


def test_the_loading_time_is_reading_and_placing_without_the_steps_in_between(fresh, documents, rag, monkeypatch):
    fresh.ingest(documents[:3])
    accept = fresh.worker._accept_read_plans

    def late(*args) -> None:
        time.sleep(0.4)
        accept(*args)

    monkeypatch.setattr(fresh.worker, "_accept_read_plans", late)
    assert 0 < receipt(fresh.ask(rag([2, 0, 1]), 1))["load_ms"] < 400


def test_a_decoding_request_never_waits_for_more_than_a_slice(fresh, documents, rag, monkeypatch):
    """The work done for plans in any one step beside a decoding request stays within `blend_tokens_per_step`."""
    fresh.ingest(documents[:6])
    fresh.worker._settings.blend.blend_tokens_per_step = 64
    steps: list[int] = []
    run, after_forward = fresh.worker._virtual.run, fresh.worker.after_forward

    def counting_run(rows, *args):
        steps[-1] += sum(row.end - row.start for row in rows)
        return run(rows, *args)

    def counting_step(meta):
        steps.append(0)
        busy.append(meta.num_scheduled_tokens > 0)
        return after_forward(meta)

    busy: list[bool] = []
    monkeypatch.setattr(fresh.worker._virtual, "run", counting_run)
    monkeypatch.setattr(fresh.worker, "after_forward", counting_step)
    engine = fresh.llm.llm_engine
    alone = text_ids(fresh.plain(fresh.tokens("Once upon a time"), 150))
    fresh.forget_prefixes()
    engine.add_request("decoding", {"prompt_token_ids": fresh.tokens("Once upon a time")},
                       fresh.sampling(150, {"blend": False, "save": False}))
    for _ in range(3):
        engine.step()
    engine.add_request("blending", {"prompt_token_ids": rag([5, 4, 3, 2, 1, 0])},
                       fresh.sampling(2, {"policy": "query", "budget": 0.5}))
    outputs = {}
    while engine.has_unfinished_requests():
        outputs.update((output.request_id, output) for output in engine.step() if output.finished)
    fresh.settle()
    fresh.worker._settings.blend.blend_tokens_per_step = 512
    assert text_ids(outputs["decoding"]) == alone
    assert receipt(outputs["blending"])["recomputed_tokens"] > 200
    worked = [work for work, is_busy in zip(steps, busy, strict=True) if is_busy and work]
    assert len(worked) >= 5 and max(worked) <= 64


def test_reset_with_the_connector_forgets_every_chunk(fresh, documents, rag):
    fresh.ingest(documents[:3])
    assert fresh.files()
    assert fresh.llm.llm_engine.reset_prefix_cache(reset_connector=True)
    found = receipt(fresh.ask(rag([2, 0, 1]), 1, ucm={"save": False}))
    assert found["reused_tokens"] == 0
    assert not fresh.files()


def test_nothing_computed_before_a_reset_with_the_connector_is_stored_after_it(fresh, documents, rag, monkeypatch):
    """Not what waits in the blocks of a finished request, not what a running one has computed."""
    from ucm_ray.integration.vllm import worker_side

    monkeypatch.setattr(worker_side, "SAVE_TOKENS_PER_STEP", 1)
    monkeypatch.setattr(worker_side, "IDLE_SAVE_TOKENS", 1)
    engine, save = fresh.llm.llm_engine, {"blend": False, "save": True}
    engine.add_request("running", {"prompt_token_ids": rag([3, 4])}, fresh.sampling(20, save))
    engine.add_request("finished", {"prompt_token_ids": rag([0, 1, 2])}, fresh.sampling(1, save))
    while not fresh.scheduler_side.has_held_requests:
        engine.step()
    engine.step()
    engine.reset_prefix_cache(reset_connector=True)  # False: there are running requests
    while engine.has_unfinished_requests():
        engine.step()
    fresh.settle()
    assert not fresh.files() and not fresh.scheduler_side.has_held_requests
    assert not len(fresh.scheduler_side._catalogue.index(fresh.scheduler_side._namespace.hex))
    fresh.forget_prefixes()
    fresh.ask(rag([0, 1, 2]), 1, ucm=save)
    assert fresh.files()


def test_a_text_that_stands_twice_in_a_stored_prompt_is_reused(fresh, documents):
    twice = documents[0][:64]
    fresh.ask(documents[1][:64] + twice + twice, 1, ucm={"blend": False, "save": True})
    assert len(fresh.files()) == 2
    for _ in range(2):
        fresh.forget_prefixes()
        prompt = fresh.tokens("Read this.\n") + twice + fresh.tokens("\nQuestion: What is it about?\nAnswer:")
        found = receipt(fresh.ask(prompt, 1, ucm={"policy": "none", "save": False}))
        assert found["reused_tokens"] >= 60 and not found["failed_chunks"]


def test_turns_dropped_and_reordered_are_reused(fresh, documents):
    """A chat whose history is cut at the front, then re-ordered: vLLM's prefix cache finds none of it."""
    turns = [fresh.tokens(f"User: tell me more ({i}).\nAssistant: ") + documents[i] for i in range(5)]
    ask = fresh.tokens("\nUser: Can you give an example of that?\nAssistant:")
    for end in range(1, 5):
        fresh.ask(sum(turns[:end], []) + ask, 4, ucm={"policy": "query"})
    dropped = receipt(fresh.ask(sum(turns[2:4], []) + ask, 4))
    assert dropped["reused_tokens"] >= 100
    swapped = receipt(fresh.ask(turns[3] + turns[0] + turns[2] + ask, 4))
    assert swapped["reused_tokens"] >= 150


# ---- what is declined, and what is not understood


def test_declined_requests_say_why(fresh, documents, rag):
    fresh.ingest(documents[:3])
    prompt = rag([1, 0, 2])
    assert "prompt_logprobs" in receipt(fresh.ask(prompt, 1, prompt_logprobs=0))["reason"]
    assert "skip_reading_prefix_cache" in receipt(fresh.ask(prompt, 1, skip_reading_prefix_cache=True))["reason"]
    assert "switched off" in receipt(fresh.ask(prompt, 1, ucm={"blend": False, "save": False}))["reason"]
    assert receipt(fresh.ask(fresh.tokens("Hello there"), 1))["reason"]


def test_strange_kv_transfer_params_never_harm_the_engine(fresh, documents, rag):
    fresh.ingest(documents[:2])
    strange = [None, {}, [], 7, "x", {"ucm": None}, {"ucm": []}, {"ucm": "yes"},
               {"ucm": {"policy": 3}}, {"ucm": {"policy": "nope"}}, {"ucm": {"budget": -1}},
               {"ucm": {"budget": float("nan")}}, {"ucm": {"budget": "much"}}, {"ucm": {"blend": "no"}},
               {"ucm": {"ingest_from": -5}}, {"ucm": {"ingest_from": 10**9}}, {"ucm": {"ingest_from": True}},
               {"ucm": {1: 2}}, {"ucm": {"sparse_ratio": 0}}, {"ucm": {"policy": "hkvd@999"}},
               {"ucm": {"policy": "query@1"}}, {"do_remote_prefill": True}]
    from vllm import SamplingParams

    prompt = rag([1, 0])
    for params in strange:
        sampling = SamplingParams(max_tokens=1, temperature=0, extra_args={"kv_transfer_params": params})
        output = fresh.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
        assert len(text_ids(output)) == 1, params
        fresh.settle()
        fresh.forget_prefixes()
    assert receipt(fresh.ask(prompt, 1))["reused_tokens"] > 100


# ---- Model Runner V2's way of calling a connector


def test_the_worker_side_driven_by_model_runner_v2(fresh, documents, rag, monkeypatch):
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

    fresh.ingest(documents[:3])
    prompt = rag([1, 2, 0])
    expected = fresh.ask(prompt, ucm={"policy": "query"})
    runner = fresh.core.model_executor.driver_worker.worker.model_runner
    caches = {name: layer.kv_cache for name, layer in fresh.worker._layers.items()}
    active = ActiveKVConnector(runner.vllm_config, caches)
    monkeypatch.setattr(runner, "kv_connector_no_forward",
                        lambda scheduler_output, config: active.no_forward(scheduler_output))
    output = fresh.ask(prompt, ucm={"policy": "query"})
    assert receipt(output)["reused_tokens"] == receipt(expected)["reused_tokens"] > 200
    assert text_ids(output) == text_ids(expected)
