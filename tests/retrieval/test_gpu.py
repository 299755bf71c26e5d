"""What only a GPU can show."""

import numpy as np
import pytest
import torch

from tests.retrieval.conftest import make_query, make_stats
from ucm_ray.retrieval import Geometry, PackedQuery, representation_names
from ucm_ray.retrieval.bank import BlockBank

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", representation_names())
@pytest.mark.parametrize("per_head", [False, True])
def test_cuda_answers_what_the_cpu_answers(name, dtype, per_head):
    geometry = Geometry(4, 2, 64, name, dtype)
    # Signs instead of numbers: every sum is exact on both devices, and ties abound.
    stats, query = make_stats(90, geometry=geometry).sign(), make_query(3, geometry=geometry).sign()
    keys = [f"b{i}" for i in range(90)]
    answers = []
    for device in ("cpu", "cuda"):
        bank = BlockBank(geometry, 100 * geometry.record_bytes, device=device)
        bank.upsert(keys, geometry.pack(stats))
        for request, span in {"all": keys, "some": keys[20:50], "none": []}.items():
            bank.append(request, span)
        answers.append(bank.answer(PackedQuery.build(["all", "some", "none"], query, geometry, 25, per_head=per_head)))
    assert np.array_equal(answers[0].blocks, answers[1].blocks)
    assert np.array_equal(answers[0].candidates, answers[1].candidates)


def test_records_survive_the_trip_to_the_device():
    geometry = Geometry(2, 2, 64, "cumulant", "bfloat16")
    bank = BlockBank(geometry, 10 * geometry.record_bytes, device="cuda")
    records = geometry.pack(make_stats(5, geometry=geometry))
    bank.upsert(list("abcde"), records)
    assert torch.equal(bank.read(["d", "b"])[1], records[[3, 1]])
