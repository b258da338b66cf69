"""Conversion of multi-head attention to grouped queries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from omniattn.checks.arguments import require_int
from omniattn.models.model import Model
from omniattn.modules import Attention


def pool_kv_heads(model: Model, num_kv_heads: int) -> Model:
    """Averages groups of key and value heads: the start of uptraining to grouped queries.

    New head g is the mean of the heads [g n, (g + 1) n), n = Hkv / num_kv_heads: the projections of
    the heads whose queries then share g.

    Args:
        model: a model whose config has `num_kv_heads`; it keeps its weights.
        num_kv_heads: number of key and value heads of the result, a divisor of the model's number;
            1 for multi-query attention.

    Returns:
        A model of the same dtype, on the same device and in the same mode, with copies of the
        weights.

    Raises:
        ValueError: `num_kv_heads` does not divide the number of heads.
        NotImplementedError: the model has no `num_kv_heads`, or norms over all heads together.

    Reference:
        Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head
        Checkpoints", 2023, arXiv 2305.13245.

    Example:
        >>> from omniattn.models import LlamaConfig
        >>> model = LlamaConfig(dim=48, num_heads=4, num_kv_heads=4, num_layers=1).build()
        >>> pool_kv_heads(model, 1).layers[0].mixer.k_proj.weight.shape
        torch.Size([12, 48])
    """
    op, config = "pool_kv_heads", model.config
    require_int(op, "num_kv_heads", num_kv_heads, 1)
    old: int | None = getattr(config, "num_kv_heads", None)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Attention)}
    if old is None or not layers or any(m.config.kv_heads != old for m in layers.values()):
        raise NotImplementedError(
            f"{op}: model must have layers of Attention with its config's num_kv_heads, "
            f"got a {type(model).__name__} with num_kv_heads={old}"
        )
    if old % num_kv_heads != 0:
        raise ValueError(
            f"{op}: num_kv_heads must divide the model's {old}, got num_kv_heads={num_kv_heads}"
        )
    if any(m.config.qk_norm == "rms_full" for m in layers.values()):
        raise NotImplementedError(
            f"{op}: model must not norm the keys of all heads together, got qk_norm='rms_full'"
        )
    state = model.state_dict()
    for name in layers:
        for part in ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"):
            if (weight := state.get(f"{name}.{part}")) is not None:
                heads = weight.unflatten(0, (num_kv_heads, old // num_kv_heads, -1))
                state[f"{name}.{part}"] = heads.mean(1).flatten(0, 1)
    changed: Any = config
    pooled = replace(changed, num_kv_heads=num_kv_heads).build(device="meta")
    pooled.load_state_dict({name: t.clone() for name, t in state.items()}, assign=True)
    return pooled.train(model.training)
