"""What separates KV of one engine from KV of another: weights, revision, salt."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from tests.vllm.small_model import save_small_llama
from ucm_ray.integration.vllm.settings import namespace_of, weights_fingerprint
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


def test_a_branch_of_a_hub_model_is_the_commit_that_is_here(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert weights_fingerprint("org/model", None) == "hub:org/model@main"
    folder = tmp_path / "models--org--model"
    for commit in ("a" * 40, "b" * 40):
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / "config.json").write_text("{}")
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(commit)
        assert weights_fingerprint("org/model", None) == f"hub:org/model@{commit}"
    assert weights_fingerprint("org/model", "a" * 40) == f"hub:org/model@{'a' * 40}"
    assert weights_fingerprint("no/name/of a hub's", None) == "hub:no/name/of a hub's@main"


def engine_with(model: Path, **changes) -> SimpleNamespace:
    config = SimpleNamespace(
        model=str(model), served_model_name=None, revision=None, dtype="torch.float32", max_model_len=512,
        quantization=None, quantization_config=None, hf_text_config=SimpleNamespace(rope_parameters={}),
        get_num_layers=lambda parallel: 1, get_total_num_kv_heads=lambda: 2, get_head_size=lambda: 64)
    vars(config).update(changes)
    return SimpleNamespace(model_config=config, parallel_config=SimpleNamespace(tensor_parallel_size=1))


def test_the_same_folder_quantized_by_the_engine_is_another_model(tmp_path):
    folder = save_small_llama(tmp_path / "llama", layers=1)
    plain = namespace_of(engine_with(folder))
    assert plain.revision == weights_fingerprint(str(folder), None)
    quantized = [plain, namespace_of(engine_with(folder, quantization="fp8")),
                 namespace_of(engine_with(folder, quantization="bitsandbytes")),
                 namespace_of(engine_with(folder, quantization="online", quantization_config={"linear": "mxfp8"}))]
    assert len({namespace.hex for namespace in quantized}) == 4


def test_every_part_of_a_namespace_separates_keys():
    base = Namespace(**BASE)
    for name, value in BASE.items():
        other = Namespace(**{**BASE, name: value + (1 if isinstance(value, int) else "x")})
        assert other.hex != base.hex, name
        assert chunk_key(other.hex, [1, 2, 3]) != chunk_key(base.hex, [1, 2, 3]), name
