"""Layer patterns of published hybrids of recurrences and attention, as data."""

from __future__ import annotations

from dataclasses import dataclass

from omniattn.checks.arguments import require_choice, require_int

__all__ = ["HybridLayer", "hybrid_schedule"]

_KINDS = ("jamba", "samba", "zamba", "ratio")


@dataclass(frozen=True)
class HybridLayer:
    """One layer of a hybrid.

    Args:
        mixer: "mamba", "attention", or "window" for attention to the last tokens.
        mlp: "mlp", "experts", or None for no feed-forward layer.
        shared: whether the input of the mixer has that of a transformer block added which several
            layers share.
    """

    mixer: str
    mlp: str | None = None
    shared: bool = False


def hybrid_schedule(kind: str, num_layers: int, *, ratio: int = 7) -> tuple[HybridLayer, ...]:
    """The layers of a published hybrid.

    ========  ====================================================================================
    kind      layer i, counted from 0
    ========  ====================================================================================
    "jamba"   attention where i % 8 == 4, else Mamba; experts where i % 2 == 1, else an MLP
    "samba"   Mamba and attention to a window in turn, each followed by an MLP
    "zamba"   Mamba alone; a shared transformer at layer 2 and at each 6th from layer 7 on
    "ratio"   `ratio` layers of Mamba, then one of attention, each followed by an MLP
    ========  ====================================================================================

    Args:
        kind: see above.
        num_layers: how many. A layer of Samba's paper is a mixer or an MLP: it counts two for one.
        ratio: of "ratio": 7 of Jamba, 3 of Kimi Linear and Qwen3-Next.

    Returns:
        The layers. A dict from these names to configs makes the blocks of a `BlocksConfig` of them;
        `JambaConfig` has its schedule already, and `Zamba2Config` a list of its own.

    Raises:
        ValueError: an unknown kind, or a number below 0, or a ratio below 1.

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
