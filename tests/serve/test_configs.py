"""Every file under configs/ that needs a cluster or a cloud, as far as it can be checked without one."""

import json
import re
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import ServeDeploySchema

from ucm_ray.config import load_settings
from ucm_ray.serve.app import _dotted, request_router
from ucm_ray.serve.metrics import ServiceMetrics
from ucm_ray.serve.router import ChunkAwareRouter

CONFIGS = Path(__file__).parents[2] / "configs"


def deploy_schema(raw: dict) -> ServeDeploySchema:
    schema = ServeDeploySchema.model_validate(raw)
    for application in schema.applications:
        assert application.import_path == "serve_app:app"
        load_settings(overrides=_dotted(application.args))
    return schema


def test_the_serve_config_is_one_that_serve_and_our_settings_accept():
    schema = deploy_schema(yaml.safe_load((CONFIGS / "serve.yaml").read_text()))
    assert schema.logging_config.encoding == "JSON"


def test_the_router_named_in_the_settings_is_loaded_by_ray_serve():
    settings = load_settings(overrides={"service.router": "chunk_aware"})
    config = request_router(settings)["request_router_config"]
    assert isinstance(config, RequestRouterConfig)
    assert config.get_request_router_class() is ChunkAwareRouter
    assert request_router(load_settings(overrides={"service.router": "default"})) == {}


def test_ray_up_accepts_the_cluster_and_its_workers_scale():
    config = yaml.safe_load((CONFIGS / "cluster.yaml").read_text())
    validate_config(prepare_config(config))
    types = config["available_node_types"]
    assert types["engine"]["max_workers"] > types["engine"]["min_workers"] and types["engine"]["resources"]["GPU"]
    assert config["head_node_type"] in types and "GPU" not in types[config["head_node_type"]]["resources"]


def test_the_ray_service_holds_a_valid_serve_config_and_its_workers_fit_a_replica():
    service, claim = list(yaml.safe_load_all((CONFIGS / "kuberay.yaml").read_text()))
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    schema = deploy_schema(yaml.safe_load(service["spec"]["serveConfigV2"]))
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster["enableInTreeAutoscaling"]
    arguments = schema.applications[0].args
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        container = group["template"]["spec"]["containers"][0]
        assert float(container["resources"]["limits"]["nvidia.com/gpu"]) >= arguments["service"]["replica_gpus"]
        assert float(container["resources"]["limits"]["cpu"]) >= arguments["service"]["replica_cpus"]
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert any(arguments["store"]["storage_backends"].startswith(path) for path in mounts)
        claimed = [volume["persistentVolumeClaim"]["claimName"] for volume in group["template"]["spec"]["volumes"]
                   if "persistentVolumeClaim" in volume]
        assert claimed == [claim["metadata"]["name"]]
    assert "ReadWriteMany" in claim["spec"]["accessModes"]


@pytest.fixture(scope="module")
def known_metrics() -> set[str]:
    from vllm.v1.metrics.ray_wrappers import RayPrometheusMetric

    ours = ServiceMetrics().names()
    # the engines' metrics go through Ray, which writes a name of its own
    sanitised = RayPrometheusMetric._get_sanitized_opentelemetry_name("vllm:time_to_first_token_seconds")
    return ours | {f"ray_{sanitised}{end}" for end in ("_bucket", "_sum", "_count")}


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:ray_)?vllm[:_][a-z_]+", expression))


def test_the_dashboard_asks_for_metrics_that_exist(known_metrics):
    dashboard = json.loads((CONFIGS / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = set().union(*map(metrics_in, expressions))
    assert asked <= known_metrics, sorted(asked - known_metrics)
    shown = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in asked}
    ours = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in ServiceMetrics().names()}
    assert ours <= shown, f"not on the dashboard: {sorted(ours - shown)}"


def test_alerts_ask_for_metrics_that_exist_and_say_what_to_do(known_metrics):
    rules = [rule for group in yaml.safe_load((CONFIGS / "alerts.yaml").read_text())["groups"]
             for rule in group["rules"]]
    assert rules
    for rule in rules:
        asked = metrics_in(rule["expr"])
        assert asked and asked <= known_metrics, (rule["alert"], sorted(asked - known_metrics))
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]
