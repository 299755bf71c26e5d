"""Recompute policies, one a file. A new policy is a new file here with a subclass of `RecomputePolicy`."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from ucm_ray.blend.policies.base import RecomputePolicy, budget_tokens, positions_to_ranges


@cache
def _policies() -> dict[str, type[RecomputePolicy]]:
    found: dict[str, type[RecomputePolicy]] = {}
    for module_info in iter_modules(__path__):
        module = import_module(f"{__name__}.{module_info.name}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, RecomputePolicy) and value.__module__ == module.__name__:
                if "name" in vars(value):
                    found[value.name] = value
    return found


def policy_names() -> list[str]:
    return sorted(_policies())


def get_policy(name: str, **parameters) -> RecomputePolicy:
    """The policy of that name; `hkvd@1` is `hkvd` with its argument (the layer) set. Raises ValueError if unknown."""
    base, _, argument = name.partition("@")
    policy_class = _policies().get(base)
    if policy_class is None:
        raise ValueError(f"policy: found {name!r}, expected one of {policy_names()}")
    if argument:
        if policy_class.argument is None:
            raise ValueError(f"policy: found {name!r}, but {base!r} takes no argument after '@'")
        if not argument.isdigit():
            raise ValueError(f"policy: found {name!r}, expected a whole number after '@'")
        parameters[policy_class.argument] = int(argument)
    return policy_class(**parameters)


__all__ = ["RecomputePolicy", "budget_tokens", "get_policy", "policy_names", "positions_to_ranges"]
