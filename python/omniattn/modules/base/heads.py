"""Head sizes of attention layers."""

from dataclasses import dataclass

from omniattn.modules.base.fields import Size
from omniattn.modules.base.layer import LayerConfig


@dataclass(frozen=True)
class HeadsConfig(LayerConfig):
    """Numbers and sizes of the heads of queries, keys and values."""

    dim: Size
    num_heads: Size
    num_kv_heads: Size | None = None
    head_dim: Size | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        op = type(self).__qualname__.removesuffix(".Config")
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"{op}: num_heads must be a multiple of num_kv_heads, "
                f"got num_heads={self.num_heads}, num_kv_heads={self.kv_heads}"
            )
        if self.head_dim is None and self.dim % self.num_heads:
            raise ValueError(
                f"{op}: dim must be a multiple of num_heads unless head_dim is given, "
                f"got dim={self.dim}, num_heads={self.num_heads}"
            )

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """Size of one head."""
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a head that rotary embeddings rotate."""
        return self.head_size
