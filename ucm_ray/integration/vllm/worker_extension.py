"""What may be asked of vLLM's workers over `collective_rpc`; mixed into the worker class by `worker_extension_cls`."""

from __future__ import annotations

from typing import Any


class UcmWorkerExtension:
    """Names begin with `ucm_`, since they stand beside the worker's own."""

    def ucm_store_stats(self) -> dict[str, Any]:
        """Numbers of this worker's store by stage; empty without our connector."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        if not has_kv_transfer_group():
            return {}
        worker = getattr(get_kv_transfer_group(), "_worker", None)
        return worker.store_stats() if worker is not None else {}
