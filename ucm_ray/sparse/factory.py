"""Sparse methods by name; each is imported when it is first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ucm_ray.sparse.base import UcmSparseBase, UcmSparseRole


class UcmSparseFactory:
    """Registry of sparse methods: `register(name, module, class)`, then `create_sparse_method(name, role, config)`."""

    _registry: dict[str, tuple[str, str]] = {
        "ESA": ("ucm_ray.sparse.esa", "ESA"),
        "Blend": ("ucm_ray.blend", "Blend"),
    }

    @classmethod
    def register(cls, name: str, module: str, class_name: str) -> None:
        """Add a method. Raises ValueError if the name is taken."""
        if name in cls._registry:
            raise ValueError(f"sparse method {name!r} is already registered as {'.'.join(cls._registry[name])}")
        cls._registry[name] = (module, class_name)

    @classmethod
    def known(cls) -> list[str]:
        return sorted(cls._registry)

    @classmethod
    def create_sparse_method(cls, name: str, role: UcmSparseRole, config: dict[str, Any]) -> UcmSparseBase:
        """Build method `name`. Raises ValueError naming the known methods if there is no such method."""
        if name not in cls._registry:
            raise ValueError(f"sparse method: found {name!r}, expected one of {cls.known()}")
        module, class_name = cls._registry[name]
        return getattr(import_module(module), class_name)(role, config)
