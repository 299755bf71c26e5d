"""`serve run serve_app:app` as it is typed, on a Ray of its own; and `ucm-ray serve` where there is no Ray."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import yaml

from tests.fake_nodes import kill_marked

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
MODEL = "smollm2-135m-instruct"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class OwnRay:
    """A Ray head with its own address and folder; everything that runs on it carries our mark and ends with it."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="ray")  # short: Ray puts sockets there
        self.address = f"127.0.0.1:{free_port()}"
        self._mark = f"UCM_RAY_TEST_RAY={uuid.uuid4().hex}"
        name, value = self._mark.split("=")
        environment = {key: text for key, text in os.environ.items() if not key.startswith("RAY_")}
        self.environment = environment | {
            name: value, "RAY_ADDRESS": self.address, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": self.folder, "PYTHONPATH": str(ROOT)}
        self.run("ray", "start", "--head", "--node-ip-address=127.0.0.1", f"--port={self.address.split(':')[1]}",
                 "--num-cpus=4", "--include-dashboard=false", f"--temp-dir={self.folder}",
                 f"--object-store-memory={200 * 2 ** 20}")

    def run(self, *command: str) -> None:
        done = subprocess.run([BIN / command[0], *command[1:]], env=self.environment, capture_output=True, text=True,
                              timeout=180)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    def stop(self) -> None:
        kill_marked(self._mark)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def own_ray() -> Iterator[OwnRay]:
    ray = OwnRay()
    yield ray
    ray.stop()


@pytest.mark.service
@pytest.mark.timeout(900)
def test_serve_run_answers_a_chat_completion_and_ends_with_ctrl_c(own_ray: OwnRay, tmp_path: Path) -> None:
    config, log = tmp_path / "config.yaml", tmp_path / "serve.log"
    config.write_text(yaml.safe_dump({
        "engine": {"device": "cpu", "max_model_len": 1024, "cpu_kv_cache_gib": 1, "max_num_seqs": 4},
        "store": {"storage_backends": str(tmp_path / "store"), "cache_capacity_bytes": "64MiB"}}))
    port = free_port()
    own_ray.run("serve", "start", "--http-host=127.0.0.1", f"--http-port={port}")
    with open(log, "wb") as out:
        serving = subprocess.Popen([BIN / "serve", "run", "serve_app:app", f"config={config}", "blend.budget=0.2",
                                    "service.port=8123"],
                                   env=own_ray.environment, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    deadline_s = time.monotonic() + 500
    while "Application 'default' is ready" not in log.read_text():
        assert serving.poll() is None and time.monotonic() < deadline_s, log.read_text()[-4000:]
        time.sleep(0.5)
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120) as client:
        answer = client.chat.completions.create(
            model=MODEL, max_tokens=12, temperature=0,
            messages=[{"role": "user", "content": "What is the capital of France? Answer in one word."}])
    assert "Paris" in answer.choices[0].message.content
    assert answer.model_extra["kv_transfer_params"]["ucm"]["blend"]["reason"]
    said = f"service.port=8123 has no effect: Ray Serve listens on 127.0.0.1:{port}"
    logs = Path(own_ray.folder).glob("session_*/logs/serve/replica_*UcmIngress*.log")
    assert any(said in one.read_text() for one in logs), "nobody was told that Serve's own port counts"
    serving.send_signal(signal.SIGINT)
    assert serving.wait(timeout=90) == 0


@pytest.mark.timeout(400)
def test_where_an_application_default_runs_serve_refuses_and_leaves_it_alone(own_ray: OwnRay, tmp_path: Path) -> None:
    port = free_port()
    own_ray.run("python", "-c", f"""
from ray import serve

@serve.deployment(ray_actor_options={{"num_cpus": 0}})
class Other:
    def __call__(self, request):
        return "somebody else's"

serve.start(http_options={{"host": "127.0.0.1", "port": {port}}})
serve.run(Other.bind(), name="default")
""")
    done = subprocess.run(
        [sys.executable, "-m", "ucm_ray", "serve", "--port", str(free_port()), f"store.storage_backends={tmp_path}"],
        env=own_ray.environment, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith("ucm-ray: an application called 'default' runs on the Ray cluster at 127.0.0.1"), done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert httpx.get(f"http://127.0.0.1:{port}/", timeout=60).text == "somebody else's"


@pytest.mark.parametrize(("options", "variable", "words"), [
    ([], "127.0.0.1:9", "no Ray cluster answers at 127.0.0.1:9"),
    (["--address", "127.0.0.1:9"], None, "no Ray cluster answers at 127.0.0.1:9"),
    (["--address", "nowhere"], None, "found 'nowhere', expected HOST:PORT"),
    (["--address", "no-such-host.invalid:6379"], None, "no Ray cluster answers at no-such-host.invalid:6379"),
])
def test_without_a_ray_at_the_address_serve_says_so_in_one_line(
        tmp_path: Path, options: list[str], variable: str | None, words: str) -> None:
    environment = {key: text for key, text in os.environ.items() if key != "RAY_ADDRESS"}
    environment |= {"RAY_ADDRESS": variable} if variable else {}
    done = subprocess.run(
        [sys.executable, "-m", "ucm_ray", "serve", "--port", str(free_port()), *options,
         f"store.storage_backends={tmp_path}"],
        env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and words in lines[0] and "Traceback" not in done.stdout + done.stderr, done.stderr


def test_a_ray_that_cannot_start_is_one_sentence_without_a_traceback(tmp_path: Path) -> None:
    """Ray's folder is a file, so no node can come up."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    environment = {key: text for key, text in os.environ.items() if key != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-m", "ucm_ray", "serve", "--port", str(free_port()), f"store.storage_backends={tmp_path}"],
        env=environment | {"RAY_TMPDIR": str(blocked)}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("ucm-ray: starting Ray failed:"), done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_stopping_on_a_ray_that_goes_on_ends_the_retrieval_pools(monkeypatch: pytest.MonkeyPatch,
                                                                 capsys: pytest.CaptureFixture) -> None:
    from actors import retrieval_pool
    from ucm_ray.config import parse_settings
    from ucm_ray.serve.run import _end_pools

    ended: list[tuple[str, str]] = []
    monkeypatch.setattr(retrieval_pool, "end_pools", lambda *pools: ended.append(pools))
    for backend in ("local", "ray"):
        _end_pools(parse_settings({"retrieval": {"backend": backend, "namespace": "here"}}))
    assert ended == [("here", "default")]
    monkeypatch.setattr(retrieval_pool, "end_pools", lambda *_: 1 / 0)
    _end_pools(parse_settings({"retrieval": {"backend": "ray"}}))
    assert "could not be ended: division by zero" in capsys.readouterr().err
