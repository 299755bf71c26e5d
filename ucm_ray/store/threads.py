"""Where the store's threads run, and how urgently."""

from __future__ import annotations

import logging
import os
from threading import get_native_id

logger = logging.getLogger("ucm_ray.store")

_LOWEST_PRIORITY = 19
# vLLM binds the thread that starts it, and with it all threads started from there, to single processors; what the
# process was given is only known before. So the plugin imports this module first.
_PROCESSORS = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def run_anywhere() -> None:
    """Let the calling thread use all processors of this process, not only the one of the engine's thread."""
    if _PROCESSORS is not None:
        try:
            os.sched_setaffinity(0, _PROCESSORS)
        except OSError as error:
            logger.info("a thread of the store stays on the engine's processor: %s", error)


def run_when_idle() -> None:
    """Let the calling thread run only where the engine leaves a processor idle (Linux has priorities per thread)."""
    run_anywhere()
    try:
        os.setpriority(os.PRIO_PROCESS, get_native_id(), _LOWEST_PRIORITY)
    except (AttributeError, OSError) as error:
        logger.info("the writing thread keeps its priority: %s", error)
