"""A cluster whose nodes are processes of this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]


def marked_processes(mark: str) -> list[Path]:
    """Folders in /proc of all living processes that were started with `mark` (`NAME=VALUE`) in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mine = mark.encode() in (process / "environ").read_bytes()
            if mine and "\nState:\tZ" not in (process / "status").read_text():
                found.append(process)
        except OSError:
            continue  # it ended meanwhile, or is not ours to read
    return found


def kill_marked(mark: str) -> None:
    for process in marked_processes(mark):
        with suppress(ProcessLookupError):
            os.kill(int(process.name), signal.SIGKILL)


class FakeNodesCluster:
    """Ray's fake multi-node autoscaling cluster: nodes are processes, and exist only once somebody needs them.

    `ray.cluster_utils.AutoscalingCluster` is the same, but begins and ends with `ray stop --force`, which kills every
    other Ray on the machine, and misses a file in Ray's wheel. So: the same node provider, on a port and in a folder of
    its own, and only processes that carry our mark are killed.
    """

    def __init__(self, folder: Path, worker_resources: dict[str, float], max_workers: int,
                 object_store_bytes: int = 100 * 2**20):
        import ray  # costs seconds, and every test imports this file

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"{ray.util.get_node_ip_address()}:{port}"
        self.mark = f"UCM_RAY_TEST_CLUSTER={uuid.uuid4().hex}"
        self._folder = tempfile.mkdtemp(prefix="ray")  # short: Ray puts sockets there
        name, value = self.mark.split("=")
        environment = {key: text for key, text in os.environ.items() if not key.startswith("RAY_")}
        self.environment = environment | {
            name: value, "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
        config = folder / "cluster.yaml"
        config.write_text(json.dumps({
            "cluster_name": "fake", "max_workers": max_workers, "idle_timeout_minutes": 0.1, "upscaling_speed": 10,
            "provider": {
                "type": "external", "gcs_address": self.address, "use_node_id_as_ip": True,
                "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
                "disable_node_updaters": True, "disable_launch_config_check": True},
            # What Ray's providers have defaults for, and external ones must name.
            "auth": {}, "docker": {}, "file_mounts": {}, "cluster_synced_files": [], "rsync_exclude": [],
            "rsync_filter": [], "initialization_commands": [], "setup_commands": [], "head_setup_commands": [],
            "worker_setup_commands": [], "head_start_ray_commands": [], "worker_start_ray_commands": [],
            "file_mounts_sync_continuously": False,
            "head_node_type": "ray.head.default",
            "available_node_types": {
                "ray.head.default": {"resources": {"CPU": 2}, "node_config": {}, "max_workers": 0},
                "worker": {"resources": worker_resources, "node_config": {}, "min_workers": 0,
                           "max_workers": max_workers}}}))
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}",
                   f"--autoscaling-config={config}", "--num-cpus=2", "--include-dashboard=false",
                   f"--temp-dir={self._folder}", f"--object-store-memory={object_store_bytes}"]
        started = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=120)
        if started.returncode:
            self.stop()
            raise RuntimeError(started.stdout[-2000:] + started.stderr[-2000:])

    def num_nodes(self) -> int:
        """Living nodes, the head among them: each has one raylet."""
        count = 0
        for process in marked_processes(self.mark):
            with suppress(OSError):  # it ended meanwhile
                count += b"/raylet/raylet" in (process / "cmdline").read_bytes().split(b"\0")[0]
        return count

    def stop(self) -> None:
        kill_marked(self.mark)
        shutil.rmtree(self._folder, ignore_errors=True)
