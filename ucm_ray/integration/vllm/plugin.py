"""Entry point of group `vllm.general_plugins`: vLLM calls `register` in every process before it loads a model.

Nothing of vLLM is patched. Two public extension points are used: PyTorch's module-registration hook, by which the
model that owns an attention layer can be found later, and vLLM's backend registry, by which our subclasses of the CPU
and the FlashAttention backend take the place of theirs (they behave the same until a runtime is attached).
"""

from __future__ import annotations

import weakref

from torch import nn

_PARENTS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
_registered = False


def register() -> None:
    """Install the hook and the backends, once per process."""
    global _registered
    if _registered:
        return
    _registered = True

    import ucm_ray.store.threads  # noqa: F401  remembers this process's processors before vLLM binds it to one

    # isort: split
    from torch.nn.modules.module import register_module_module_registration_hook
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_module_module_registration_hook(_remember_parent)
    register_backend(AttentionBackendEnum.CPU_ATTN, "ucm_ray.integration.vllm.esa_backend.UcmCPUAttentionBackend")
    register_backend(AttentionBackendEnum.FLASH_ATTN,
                     "ucm_ray.integration.vllm.esa_backend_flash.UcmFlashAttentionBackend")


def _remember_parent(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if submodule is not None:
        _PARENTS[submodule] = weakref.ref(module)


def root_module(module: nn.Module) -> nn.Module:
    """The outermost module that holds `module`: the model vLLM runs."""
    while (parent := _PARENTS.get(module)) is not None and parent() is not None:
        module = parent()
    return module
