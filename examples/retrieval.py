"""A pool of two shards: publish blocks, ask with futures, kill a shard, ask on. Run: python examples/retrieval.py"""

import os
import signal

import ray
import torch

from actors.retrieval_pool import PoolSettings, start_pool, stop_pool
from ucm_ray.retrieval import Geometry, PackedQuery
from ucm_ray.retrieval.client import RetrievalClient

ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
pool = start_pool(PoolSettings(shards=2))
client = RetrievalClient.connect(deadline_s=1.0, geometry=Geometry(4, 2, 64, "cumulant"))

keys_of_blocks = torch.randn(4, 100, 32, 2, 64)  # [layers, blocks, block_size, kv_heads, head_dim]
names = [f"block {i}" for i in range(100)]
stats = client.geometry.method.compute(keys_of_blocks)
client.publish(names, stats, appends={"request 1": names[:60], "request 2": names[40:]})

queries = torch.randn(2, 4, 8, 64)  # [requests, layers, query heads, head_dim]
query = PackedQuery.build(["request 1", "request 2"], queries, client.geometry, k=5)
future = client.submit(query)
print("layer 0 of request 1 needs blocks", future.result().selected(0, 0), future.source)

os.kill(next(iter(ray.get(pool.info.remote())["shards"].values()))["pid"], signal.SIGKILL)
for _ in range(3):
    future = client.submit(query)
    print("a shard is dead:  ", future.result().selected(0, 0), future.source, future.reason)

client.wait_ready(timeout_s=30)
future = client.submit(query)
print("it is back:       ", future.result().selected(0, 0), future.source)
client.close()
stop_pool()
