"""`Client.in_cluster`: from a driver and from a task inside the service's Ray, by the ingress's handle."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.conftest import KEYS

pytestmark = [pytest.mark.service, pytest.mark.timeout(900)]

PROGRAM = '''
import asyncio, json, sys
import ray
from ucm_ray.client import AsyncClient, Client, ClientError

address, text, own, other = json.loads(sys.argv[1])
ray.init(address=address, namespace="application", log_to_driver=False)


@ray.remote(num_cpus=0)
def task(text, own, other):
    with Client.in_cluster(api_key=own) as mine, Client.in_cluster(api_key=other) as theirs:
        document = mine.ingest([text]).data[0]
        report = {"ingested": document.model_dump(), "reusable": mine.lookup(text).reusable_tokens,
                  "listed": [one.id for one in mine.documents().data],
                  "theirs": [theirs.lookup(text).reusable_tokens, theirs.chunks(document=document.id).total]}
        try:
            theirs.delete(documents=[document.id])
        except ClientError as error:
            report["refused"] = error.status
    with Client.in_cluster(api_key=own, cache_salt="apart") as apart:
        report["apart"] = apart.lookup(text).reusable_tokens
    try:
        Client.in_cluster(api_key="wrong").stats()
    except ClientError as error:
        report["unknown"] = error.status
    return report


async def driver(document):
    async with AsyncClient.in_cluster(api_key=own) as client:
        found, blocks = await asyncio.gather(client.lookup(text), client.retrieval())
        deleted = await client.delete(documents=[document])
        return {"reusable": found.reusable_tokens, "layers": blocks.num_layers, "deleted": deleted.chunks}


report = ray.get(task.remote(text, own, other), timeout=300)
print(json.dumps({"task": report, "driver": asyncio.run(driver(report["ingested"]["id"]))}))
'''


def test_a_task_and_a_driver_use_the_cache_without_http_and_see_their_keys_part_only(service, first, tmp_path):
    text = " ".join(f"The keeper of lighthouse {number} wrote {number * 7} letters." for number in range(40))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    arguments = json.dumps([service.ray_address(), text, *KEYS])
    # a Ray that was started here asks for its token, which Ray reads for a given address only in this mode
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "RAY_AUTH_MODE": "token"}
    done = subprocess.run([sys.executable, program, arguments], capture_output=True, text=True, timeout=400,
                          env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    task, driver = report["task"], report["driver"]
    assert task["ingested"]["new_chunks"] == task["ingested"]["num_chunks"] > 4
    assert task["reusable"] == driver["reusable"] >= 0.9 * task["ingested"]["num_tokens"]
    assert task["ingested"]["id"] in task["listed"]
    assert task["theirs"] == [0, 0] and task["apart"] == 0
    assert (task["refused"], task["unknown"]) == (404, 401)
    assert driver["layers"] == 30 and driver["deleted"] == task["ingested"]["num_chunks"]
    assert first.lookup(text).reusable_tokens == 0
