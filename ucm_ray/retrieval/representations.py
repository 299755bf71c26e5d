"""Block representations: a few statistics per KV block by which a query scores the block without reading it.

Every representation here is linear in its statistics once the query has been turned into features:

    score(query, block) = sum over statistics s of <features_s(query), stats_s(block)>

so grouped query heads are summed into the features of their KV head first, and all representations share one
scoring kernel, whatever their number of statistics. Scores are in the unit of attention logits (q.k / sqrt(head_dim)).

To add one: subclass `BlockRepresentation` with `name`, `num_stats`, `compute` and `features`; it registers itself.
"""

from abc import ABC, abstractmethod

import torch

_REGISTRY: dict[str, "BlockRepresentation"] = {}


class BlockRepresentation(ABC):
    """How a block of keys is summarised and scored. Stateless; get the shared instance from `get_representation`."""

    name: str
    num_stats: int

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        _REGISTRY[cls.name] = cls()

    @abstractmethod
    def compute(self, keys: torch.Tensor) -> torch.Tensor:
        """Statistics of full blocks of keys.

        Args:
            keys: `[..., num_blocks, block_size, num_kv_heads, head_dim]`, any float dtype.
        Returns:
            `[num_stats, ..., num_blocks, num_kv_heads, head_dim]`, float32.
        """

    @abstractmethod
    def features(self, scaled):
        """Features of query heads, one per statistic, before those of a KV head are summed.

        Args:
            scaled: query times 1/sqrt(head_dim), float32, any shape; a torch tensor or a numpy array, so use only
                operators and methods both have.
        Returns:
            Tuple of `num_stats` tensors of that shape.
        """

    def query_features(self, query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
        """Query heads reduced to one feature vector per statistic and KV head.

        Query head i reads KV head i // (num_heads / num_kv_heads), as in every grouped-query model.

        Args:
            query: `[..., num_heads, head_dim]`, any float dtype.
        Returns:
            `[num_stats, ..., num_kv_heads, head_dim]`, float32.
        """
        return torch.stack([feature.sum(-2) for feature in self.features(_group_heads(query, num_kv_heads))])

    def score(self, query: torch.Tensor, stats: torch.Tensor, reduce: str = "sum") -> torch.Tensor:
        """Score of every block for every KV head; vectorised over the leading dimensions (layers, requests).

        Args:
            query: `[..., num_heads, head_dim]`.
            stats: `[num_stats, ..., num_blocks, num_kv_heads, head_dim]`.
            reduce: how the query heads of one KV head are joined. "sum": their logits are added. "mass": each head's
                softmax over the blocks is added, an estimate of the attention mass the group gives to each block (needs
                all blocks at once, so shards cannot use it).
        Returns:
            `[..., num_kv_heads, num_blocks]`, float32.
        """
        if stats.shape[0] != self.num_stats:
            raise ValueError(
                f"representation {self.name!r} stores {self.num_stats} statistics per block, got {stats.shape[0]}")
        stats = stats.float()
        num_kv_heads = stats.shape[-2]
        if reduce == "sum":
            return torch.einsum("s...hd,s...nhd->...hn", self.query_features(query, num_kv_heads), stats)
        if reduce == "mass":
            features = torch.stack(self.features(_group_heads(query, num_kv_heads)))
            return torch.einsum("s...hgd,s...nhd->...hgn", features, stats).softmax(dim=-1).sum(dim=-2)
        raise ValueError(f"reduce is {reduce!r}, expected 'sum' or 'mass'")


class Mean(BlockRepresentation):
    """Mean of the keys (the seed's, also UCM's)."""

    name = "mean"
    num_stats = 1

    def compute(self, keys):
        return keys.float().mean(dim=-3).unsqueeze(0)

    def features(self, scaled):
        return (scaled,)


class MinMax(BlockRepresentation):
    """Channel-wise minimum and maximum of the keys (Quest, Tang et al. 2024).

    The score is the upper bound of q.k over the box the keys lie in: sum over channels of max(q*min, q*max), which is
    linear in (min, max) after splitting the query into its negative and positive part.
    """

    name = "minmax"
    num_stats = 2

    def compute(self, keys):
        low, high = torch.aminmax(keys.float(), dim=-3)
        return torch.stack((low, high))

    def features(self, scaled):
        return scaled.clip(max=0), scaled.clip(min=0)


class MeanStd(BlockRepresentation):
    """Mean plus one standard deviation of the keys in the direction of the query, channel by channel."""

    name = "mean_std"
    num_stats = 2

    def compute(self, keys):
        mean, var = _mean_and_variance(keys)
        return torch.stack((mean, var.sqrt()))

    def features(self, scaled):
        return scaled, abs(scaled)


class Cumulant(BlockRepresentation):
    """Second-order cumulant expansion of log mean exp(q.k / sqrt(d)) over the block: the log of its mean weight.

    score = q.mean/sqrt(d) + 1/2 sum(q^2 var)/d, with the covariance of the keys taken as diagonal. Nothing to tune.
    """

    name = "cumulant"
    num_stats = 2

    def compute(self, keys):
        mean, var = _mean_and_variance(keys)
        return torch.stack((mean, var))

    def features(self, scaled):
        return scaled, 0.5 * scaled * scaled


def _mean_and_variance(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Over the tokens of each block. By the second moment: `torch.var_mean` is 17 times slower on a CPU, and what is
    lost to cancellation is far below what a logit can show."""
    keys = keys.float()
    tokens = keys.dim() - 3
    # Paged caches often come as views whose tokens lie innermost: reduced in memory order they stream.
    order = sorted(range(keys.dim()), key=keys.stride, reverse=True)
    ordered, axis = keys.permute(order), order.index(tokens)
    mean = ordered.mean(dim=axis)
    second = torch.linalg.vector_norm(ordered, dim=axis).square_().div_(keys.shape[tokens])
    var = second.sub_(mean.square()).clamp_(min=0.0)
    rest = [dim - (dim > tokens) for dim in order if dim != tokens]
    back = [rest.index(dim) for dim in range(len(rest))]
    return mean.permute(back), var.permute(back)


def get_representation(name: str) -> BlockRepresentation:
    """The representation called `name`. Raises ValueError listing the known ones."""
    try:
        return _REGISTRY[name]
    except KeyError:
        raise ValueError(f"unknown block representation {name!r}, known: {', '.join(representation_names())}") from None


def representation_names() -> list[str]:
    """Names of all registered representations, sorted."""
    return sorted(_REGISTRY)


def group_size(num_heads: int, num_kv_heads: int) -> int:
    """Query heads per KV head. Raises ValueError unless they divide evenly."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot be grouped onto {num_kv_heads} KV heads")
    return num_heads // num_kv_heads


def _group_heads(query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """`[..., num_heads, head_dim]` as `[..., num_kv_heads, group_size, head_dim]`, float32, times 1/sqrt(head_dim)."""
    num_heads, head_dim = query.shape[-2:]
    shape = (*query.shape[:-2], num_kv_heads, group_size(num_heads, num_kv_heads), head_dim)
    return query.float().reshape(shape) * head_dim ** -0.5
