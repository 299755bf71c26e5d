"""What sparse decode costs in quality: attention mass kept, KL and agreement with dense decode, on natural text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

BLOCK_SIZE = 32
COLUMNS = (
    "representation", "ratio", "read", "mass", "mass_worst_head", "oracle_mass", "kl", "kl_question", "kl_next",
    "agreement",
)
KINDS = ("question", "next")
_PLAIN = {"static_share": 0.0, "lexical_blocks": 0}
_SEED = {"representation": "mean", "per_head": False, "local_window_sz": 2, **_PLAIN}
# The seed scores means, one selection for all heads of a layer, nothing static or lexical, two blocks as local window;
# `mean_128` is that on the 128-token blocks of UCM's accelerators. The next three retrieve their whole share.
METHODS: dict[str, dict[str, Any]] = {
    "mean": _SEED,
    "mean_128": {**_SEED, "block_size": 128},
    "minmax": {"representation": "minmax", **_PLAIN},
    "mean_std": {"representation": "mean_std", **_PLAIN},
    "cumulant": {"representation": "cumulant", **_PLAIN},
    "default": {},
}


def main(
    methods: Annotated[str, typer.Option(help=f"Comma-separated, of: {', '.join(METHODS)}.")] = ",".join(METHODS),
    ratios: Annotated[str, typer.Option(help="Shares of the middle blocks that are read.")] = "0.05,0.1,0.2,0.3",
    contexts: Annotated[int, typer.Option(help="Texts of each kind.", min=1)] = 4,
    context_tokens: Annotated[
        int, typer.Option(help="Tokens before the first decoded one, where a text goes on; questions have about 3,250.")
    ] = 3072,
    tokens: Annotated[int, typer.Option(help="Teacher-forced tokens per text.")] = 64,
    stride: Annotated[int | None, typer.Option(help="Decode steps per selection; default: the product's.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a figure here (needs matplotlib).")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Quality of ESA on the default model, teacher-forced over natural text, by representation and ratio.

    Texts of two kinds: `question`, twelve documents and a question, answered by the model itself (decoded densely and
    greedily); `next`, documents in a row, of which the last goes on.
    """
    from ucm_ray.bench.report import table, write_json

    names, shares = methods.split(","), [float(ratio) for ratio in ratios.split(",")]
    unknown = sorted(set(names) - METHODS.keys())
    if unknown:
        raise typer.BadParameter(f"methods: found {', '.join(unknown)}, expected some of {', '.join(METHODS)}")
    changes = {} if stride is None else {"retrieval_stride": stride}
    rows = evaluate(names, shares, contexts, context_tokens, tokens, changes)
    table([{column: row[column] for column in COLUMNS} for row in rows])
    write_json(
        json_path,
        {
            "rows": rows,
            "context_tokens": context_tokens,
            "contexts": contexts,
            "tokens": tokens,
            "block_size": BLOCK_SIZE,
            **changes,
        },
    )
    if plot is not None:
        draw(rows, plot)


def evaluate(
    names: list[str], ratios: list[float], contexts: int, context_tokens: int, tokens: int, changes: dict[str, Any]
) -> list[dict[str, Any]]:
    """One row per method and ratio, over all texts."""
    import torch

    with torch.inference_mode():
        decoder = _Decoder()
        measured = {(name, ratio): _Measured() for name in names for ratio in ratios}
        for kind, prompt, rest in texts(decoder.tokenizer, contexts, context_tokens, tokens):
            decoder.prefill(prompt, tokens)
            if rest is None:
                rest = decoder.answer(tokens)
            dense = decoder.decode(rest, None, None)
            for (name, ratio), measure in measured.items():
                sparse = decoder.decode(rest, {**METHODS[name], **changes, "sparse_ratio": ratio}, measure)
                measure.compare(kind, dense, sparse)
    return [{"representation": name, "ratio": ratio, **measure.row()} for (name, ratio), measure in measured.items()]


def texts(tokenizer, contexts: int, context_tokens: int, tokens: int) -> Iterator[tuple[str, Any, Any]]:
    """Kind, prompt and what is decoded after it (None: the model's own answer), token ids of the repository's texts."""
    import torch

    from ucm_ray.bench.data import evaluation_prompts

    for prompt in evaluation_prompts(tokenizer, contexts):
        yield "question", torch.tensor(prompt.token_ids), None
    for ids in _rows_of_documents(tokenizer, contexts, context_tokens + tokens):
        yield "next", ids[:context_tokens], ids[context_tokens:]


def _rows_of_documents(tokenizer, count: int, length: int) -> list:
    """`count` token sequences of `length` tokens out of the documents of the repository, one after the other."""
    import torch

    from ucm_ray.bench.data import load_documents

    joined = "\n\n".join(f"{document.title}\n\n{document.text}" for document in load_documents())
    ids = torch.tensor(tokenizer(joined)["input_ids"])
    if len(ids) < length:
        raise ValueError(f"the documents: found {len(ids)} tokens of text, expected at least {length}")
    step = min(length, (len(ids) - length) // max(1, count - 1)) if count > 1 else 0
    return [ids[index * step : index * step + length] for index in range(count)]


@dataclass
class _Measured:
    """Sums over texts, steps and layers for one method and ratio."""

    mass: list = field(default_factory=list)  # [layers, heads] per step
    read: list = field(default_factory=list)  # share of the blocks, per step
    oracle: list = field(default_factory=list)
    kl: list = field(default_factory=list)
    agreement: list = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)

    def compare(self, kind: str, dense, sparse) -> None:
        """Logits `[tokens, vocabulary]` of one text."""
        self.kinds.append(kind)
        expected, found = dense.double().log_softmax(-1), sparse.double().log_softmax(-1)
        self.kl.append((expected.exp() * (expected - found)).sum(-1))
        self.agreement.append((expected.argmax(-1) == found.argmax(-1)).double())

    def row(self) -> dict[str, float]:
        import torch

        mass, oracle = torch.stack(self.mass), torch.stack(self.oracle)
        kl, agreement = torch.stack(self.kl), torch.stack(self.agreement)
        return {
            "mass": float(mass.mean()),
            "mass_worst_head": float(mass.mean(0).min()),
            "oracle_mass": float(oracle.mean()),
            "mass_of_oracle": float(mass.mean() / oracle.mean()),
            "kl": float(kl.mean()),
            **{f"kl_{kind}": float(kl[[found == kind for found in self.kinds]].mean()) for kind in KINDS},
            "kl_by_text": kl.mean(1).tolist(),
            "read": sum(self.read) / len(self.read),
            "agreement": float(agreement.mean()),
        }


class _Decoder:
    """The default model with attention of our own over one growing sequence, prefilled once per text."""

    def __init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        from ucm_ray.models import default_model

        folder = default_model()
        ALL_ATTENTION_FUNCTIONS.register("ucm_esa_eval", lambda module, *args, **kwargs: self._attend(module, *args))
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="ucm_esa_eval"
        )
        config = self.model.config
        self.layers, self.kv_heads = config.num_hidden_layers, config.num_key_value_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.esa = self.metadata = self.measure = None
        self.tails: list = [None] * self.layers

    def prefill(self, token_ids, tokens: int) -> None:
        """Start a new text, with room for `tokens` more."""
        import torch

        self.prompt = len(token_ids)
        self.token_ids = np.concatenate([token_ids.numpy().astype(np.int32), np.zeros(tokens, np.int32)])
        size = -(-len(self.token_ids) // 128) * 128
        self.keys, self.values = (
            [torch.zeros(self.kv_heads, size, self.head_dim) for _ in range(self.layers)] for _ in "kv"
        )
        self.esa = None
        self.first = self._forward(token_ids, 0)[0].argmax()

    def answer(self, tokens: int):
        """The next `tokens` token ids, decoded densely and greedily."""
        import torch

        found = [self.first]
        while len(found) < tokens:
            found.append(self._forward(found[-1][None], self.prompt + len(found) - 1)[0].argmax())
        return torch.stack(found)

    def decode(self, token_ids, config: dict[str, Any] | None, measure: _Measured | None):
        """Logits `[len(token_ids), vocabulary]` that predict what follows each token; None: dense."""
        import torch

        self.esa = self._make_esa(dict(config)) if config is not None else None
        self.measure = measure
        logits = []
        for index, token in enumerate(token_ids):
            position = self.prompt + index
            self.token_ids[position] = token
            if self.esa is not None:
                self.metadata = self._metadata(position, 1)
                self._masses: list = [None] * self.layers
            logits.append(self._forward(token[None], position)[0])
            if self.esa is not None:
                self.esa.finish_step()
                if measure is not None:
                    measure.read.append(self._read)
                    measure.mass.append(torch.stack([kept for kept, _ in self._masses]))
                    measure.oracle.append(torch.stack([best for _, best in self._masses]))
        if self.esa is not None:
            self.esa.close()
        return torch.stack(logits)

    def _forward(self, token_ids, start: int):
        import torch

        self.start = start
        positions = torch.arange(start, start + len(token_ids))[None]
        hidden = self.model.model(input_ids=token_ids[None], position_ids=positions, use_cache=False).last_hidden_state[
            0
        ]
        return self.model.lm_head(hidden[-1:])

    def _make_esa(self, config: dict[str, Any]):
        """ESA that has just seen the prompt, by its last queries and its keys."""
        self.block_size = config.pop("block_size", BLOCK_SIZE)
        from ucm_ray.sparse import UcmSparseFactory, UcmSparseRole

        esa = UcmSparseFactory.create_sparse_method("ESA", UcmSparseRole.WORKER, config)
        esa.register_kv_caches(
            self.keys,
            read_keys=self._read_keys,
            block_size=self.block_size,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
        )
        tail = len(self.tails[0])
        metadata = self._metadata(self.prompt - tail, tail)
        for layer in range(self.layers):
            esa.attention_begin(layer, self.tails[layer], None, None, metadata)
        esa.finish_step()
        return esa

    def _metadata(self, computed: int, scheduled: int):
        from ucm_ray.sparse import ReqMeta
        from ucm_ray.sparse.esa import EsaMetadata

        blocks = list(range(-(-(computed + scheduled) // self.block_size)))
        meta = ReqMeta(
            "text", 0, scheduled, computed, blocks, num_prompt_tokens=self.prompt,
            token_ids=self.token_ids[: computed + scheduled],
        )
        return EsaMetadata([meta], [0, scheduled])

    def _read_keys(self, layer: int, block_ids):
        blocks = self.keys[layer].view(self.kv_heads, -1, self.block_size, self.head_dim)[:, block_ids]
        return blocks.flatten(1, 2).transpose(1, 2)

    # ---- attention

    def _attend(self, module, query, key, value, *args):
        """transformers' attention interface: `[1, heads, tokens, head_dim]` in, `[1, tokens, heads, head_dim]` out."""
        import torch

        layer, count = module.layer_idx, query.shape[2]
        end = self.start + count
        self.keys[layer][:, self.start : end], self.values[layer][:, self.start : end] = key[0], value[0]
        keys, values = self.keys[layer][:, :end], self.values[layer][:, :end]
        if count > 1:
            from ucm_ray.sparse import EsaConfig

            self.tails[layer] = query[0, :, -EsaConfig.prompt_window :].transpose(0, 1).clone()
            output = torch.nn.functional.scaled_dot_product_attention(
                query, keys[None], values[None], is_causal=True, enable_gqa=True
            )
            return output.transpose(1, 2), None
        grouped = query[0, :, 0].view(self.kv_heads, -1, self.head_dim)
        logits = grouped @ keys.transpose(1, 2) * self.head_dim**-0.5  # [kv_heads, group, tokens]
        if self.esa is not None:
            logits = self._narrow(layer, query[0].transpose(0, 1), logits)
        output = logits.softmax(-1) @ values
        return output.view(1, 1, -1, self.head_dim), None

    def _narrow(self, layer: int, query, logits):
        """Leave out the tokens ESA leaves out, and note how much attention was kept, by it and by the best choice."""
        import torch

        self.esa.attention_begin(layer, query, None, None, self.metadata)
        view, length = self.metadata.view, logits.shape[-1]
        weights = logits.softmax(-1)
        if view is None:
            full = torch.ones(logits.shape[:2]).flatten()
            self._masses[layer], self._read = (full, full), 1.0
            return logits
        num_blocks = -(-length // self.block_size)
        width = -(-int(view.seq_lens[0]) // self.block_size)
        self._read = width / num_blocks
        groups = view.block_table.shape[0]
        chosen = torch.zeros(groups, num_blocks, dtype=torch.bool)
        chosen.scatter_(1, view.block_table[:, :width].long() // groups, True)
        seen = chosen.repeat_interleave(self.block_size, 1)[:, None, :length].expand(self.kv_heads, 1, length)
        kept = (weights * seen).sum(-1).flatten()
        self._masses[layer] = (kept, self._best(weights, width, num_blocks))
        return logits.masked_fill(~seen, float("-inf"))

    def _best(self, weights, width: int, num_blocks: int):
        """Mass of the best `width` blocks for each KV head, the windows among them as for everybody."""
        import torch

        padded = torch.nn.functional.pad(weights, (0, num_blocks * self.block_size - weights.shape[-1]))
        by_block = padded.view(*weights.shape[:2], num_blocks, self.block_size).sum(-1)
        score = by_block.sum(1)
        settings = self.esa.settings
        score[:, : settings.init_window_sz] = score[:, num_blocks - settings.local_window_sz :] = float("inf")
        best = score.topk(width, -1).indices
        return by_block.gather(-1, best[:, None].expand(-1, weights.shape[1], -1)).sum(-1).flatten()


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """KL and attention mass over the ratio, a line per method."""
    try:
        import matplotlib
    except ImportError:
        raise typer.BadParameter("--plot needs matplotlib: pip install 'ucm-ray[plots]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    for name in dict.fromkeys(row["representation"] for row in rows):
        mine = [row for row in rows if row["representation"] == name]
        ratios = [row["ratio"] for row in mine]
        axes[0].plot(ratios, [row["kl"] for row in mine], marker="o", label=name)
        axes[1].plot(ratios, [row["mass"] for row in mine], marker="o", label=name)
    axes[1].plot(ratios, [row["oracle_mass"] for row in mine], color="black", linestyle=":", label="oracle")
    axes[0].set(xlabel="ratio of middle blocks read", ylabel="KL(dense, sparse)", yscale="log")
    axes[1].set(xlabel="ratio of middle blocks read", ylabel="attention mass kept")
    axes[1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
