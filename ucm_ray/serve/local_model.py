"""Start-up hook for models that lie in a local folder."""

from __future__ import annotations

from pathlib import Path

from ray.llm._internal.common.callbacks.base import CallbackBase


class LocalModel(CallbackBase):
    """Skips Ray Serve LLM's download task where there is nothing to download: it would start one more process that
    imports vLLM, about 15 s of every start on two cores."""

    async def on_before_node_init(self) -> None:
        source = self.llm_config.model_loading_config.model_source
        if isinstance(source, str) and Path(source).is_dir():
            self.ctx.run_init_node = False
