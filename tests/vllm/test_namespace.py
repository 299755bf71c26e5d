"""What separates KV of one engine from KV of another: weights, revision, salt."""

from __future__ import annotations

from pathlib import Path

from tests.vllm.small_model import save_small_llama
from ucm_ray.integration.vllm.settings import weights_fingerprint
from ucm_ray.keys import Namespace, chunk_key

BASE = dict(model="m", revision="r", dtype="float32", rope="{}", kv_layout="layers=1", world_size=1, lora="", salt="")


def test_other_weights_under_the_same_name_have_another_fingerprint(tmp_path):
    one, two, copy = (save_small_llama(tmp_path / name / "llama", seed=seed, layers=1)
                      for name, seed in (("a", 0), ("b", 1), ("c", 0)))
    assert weights_fingerprint(str(one), None) == weights_fingerprint(str(copy), None)
    assert weights_fingerprint(str(one), None) != weights_fingerprint(str(two), None)


def test_a_changed_configuration_changes_the_fingerprint(tmp_path):
    folder = save_small_llama(tmp_path / "llama", layers=1)
    before = weights_fingerprint(str(folder), None)
    config = Path(folder) / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert weights_fingerprint(str(folder), None) != before


def test_a_hub_model_is_separated_by_its_revision():
    assert weights_fingerprint("org/model", "v1") != weights_fingerprint("org/model", "v2")


def test_every_part_of_a_namespace_separates_keys():
    base = Namespace(**BASE)
    for name, value in BASE.items():
        other = Namespace(**{**BASE, name: value + (1 if isinstance(value, int) else "x")})
        assert other.hex != base.hex, name
        assert chunk_key(other.hex, [1, 2, 3]) != chunk_key(base.hex, [1, 2, 3]), name
