"""Layer patterns of published hybrids of recurrences and attention, as data."""

from __future__ import annotations

from dataclasses import dataclass

from omniattn.checks.arguments import require_choice, require_int

__all__ = ["HybridLayer", "hybrid_schedule"]

_KINDS = ("jamba", "samba", "zamba", "ratio")


@dataclass(frozen=True)
class HybridLayer:
    """One layer of a hybrid model.

    Args:
        mixer: "mamba", "attention", or "window" for sliding-window attention.
        mlp: "mlp", "experts", or None for no feed-forward layer.
        shared: True if the output of a shared transformer block is added to the mixer's input.
    """

    mixer: str
    mlp: str | None = None
    shared: bool = False


def hybrid_schedule(kind: str, num_layers: int, *, ratio: int = 7) -> tuple[HybridLayer, ...]:
    """Returns the layers of a published hybrid architecture.

    ========  ====================================================================================
    kind      layer i, counted from 0
    ========  ====================================================================================
    "jamba"   attention where i % 8 == 4, else Mamba; experts where i % 2 == 1, else an MLP
    "samba"   alternating Mamba and sliding-window attention, each followed by an MLP
    "zamba"   Mamba only; a shared transformer at layer 2 and at every 6th layer from 7 on
    "ratio"   `ratio` layers of Mamba, then one of attention, each followed by an MLP
    ========  ====================================================================================

    Args:
        kind: see above.
        num_layers: number of layers. Samba's paper counts mixers and MLPs as separate layers.
        ratio: for "ratio": 7 in Jamba, 3 in Kimi Linear and Qwen3-Next.

    Returns:
        The layers. With a dict from these names to configs they become the blocks of a
        `BlocksConfig`; `JambaConfig` and `Zamba2Config` have schedules of their own.

    Raises:
        ValueError: the kind is unknown, num_layers is below 0, or ratio below 1.

    Reference:
        Lieber et al., "Jamba", 2024, arXiv 2403.19887; Ren et al., "Samba", 2024,
        arXiv 2406.07522; Glorioso et al., "Zamba", 2024, arXiv 2405.16712.

    Example:
        >>> [layer.mixer for layer in hybrid_schedule("ratio", 4, ratio=3)]
        ['mamba', 'mamba', 'mamba', 'attention']
    """
    op = "hybrid_schedule"
    require_choice(op, "kind", kind, _KINDS)
    require_int(op, "num_layers", num_layers, 0)
    require_int(op, "ratio", ratio, 1)

    def layer(i: int) -> HybridLayer:
        if kind == "jamba":
            mixer = "attention" if i % 8 == 4 else "mamba"
            return HybridLayer(mixer, "experts" if i % 2 == 1 else "mlp")
        if kind == "samba":
            return HybridLayer("window" if i % 2 == 1 else "mamba", "mlp")
        if kind == "zamba":
            return HybridLayer("mamba", shared=i == 2 or (i > 2 and i % 6 == 1))
        return HybridLayer("attention" if i % (ratio + 1) == ratio else "mamba", "mlp")

    return tuple(map(layer, range(num_layers)))
