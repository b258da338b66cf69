"""Published sizes of decoders of the Llama family."""

from __future__ import annotations

from dataclasses import replace

from omniattn.models.decoders.llama import LlamaConfig
from omniattn.models.families.gemma import Gemma2Config
from omniattn.models.families.mistral import MistralConfig
from omniattn.models.families.qwen import Qwen2Config, Qwen3Config
from omniattn.models.model import ModelConfig
from omniattn.reference import Llama3Scaling

_LLAMA2 = LlamaConfig(
    vocab_size=32000,
    dim=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    hidden_dim=11008,
    max_positions=4096,
)
_LLAMA3 = replace(
    _LLAMA2,
    vocab_size=128256,
    num_kv_heads=8,
    hidden_dim=14336,
    max_positions=8192,
    rope_base=5e5,
)
_LLAMA3_70B = replace(_LLAMA3, dim=8192, num_layers=80, num_heads=64, hidden_dim=28672)
_LLAMA32 = replace(
    _LLAMA3,
    dim=2048,
    num_layers=16,
    hidden_dim=8192,
    max_positions=131072,
    rope_scaling=Llama3Scaling(32.0),
    tie_embeddings=True,
)
_MISTRAL = MistralConfig(
    vocab_size=32000,
    dim=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    hidden_dim=14336,
    max_positions=32768,
)
_QWEN25 = Qwen2Config(
    vocab_size=152064,
    dim=3584,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    hidden_dim=18944,
    max_positions=131072,
    rope_base=1e6,
)
_QWEN25_TIED = replace(
    _QWEN25, vocab_size=151936, num_kv_heads=2, max_positions=32768, tie_embeddings=True
)
_QWEN3 = Qwen3Config(
    vocab_size=151936,
    dim=4096,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_dim=12288,
    max_positions=40960,
    rope_base=1e6,
)
_QWEN3_TIED = replace(_QWEN3, num_layers=28, num_heads=16, tie_embeddings=True)
_GEMMA2 = Gemma2Config(
    vocab_size=256000,
    dim=2304,
    num_layers=26,
    num_heads=8,
    num_kv_heads=4,
    head_dim=256,
    hidden_dim=9216,
    max_positions=8192,
)

DENSE: dict[str, ModelConfig] = {
    # For tests: odd sizes, so that every tail path of the kernels runs.
    "llama-test": LlamaConfig(
        vocab_size=97, dim=48, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=96
    ),
    "llama-2-7b": _LLAMA2,
    "llama-2-13b": replace(
        _LLAMA2, dim=5120, num_layers=40, num_heads=40, num_kv_heads=40, hidden_dim=13824
    ),
    "llama-2-70b": replace(
        _LLAMA2, dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, hidden_dim=28672
    ),
    "llama-3-8b": _LLAMA3,
    "llama-3-70b": _LLAMA3_70B,
    "llama-3.1-8b": replace(_LLAMA3, max_positions=131072, rope_scaling=Llama3Scaling()),
    "llama-3.1-70b": replace(_LLAMA3_70B, max_positions=131072, rope_scaling=Llama3Scaling()),
    "llama-3.2-1b": _LLAMA32,
    "llama-3.2-3b": replace(_LLAMA32, dim=3072, num_layers=28, num_heads=24),
    "mistral-7b": _MISTRAL,
    "mistral-7b-v0.3": replace(_MISTRAL, vocab_size=32768, rope_base=1e6, window=None),
    "qwen2.5-0.5b": replace(_QWEN25_TIED, dim=896, num_layers=24, num_heads=14, hidden_dim=4864),
    "qwen2.5-1.5b": replace(
        _QWEN25_TIED, dim=1536, num_heads=12, hidden_dim=8960, max_positions=131072
    ),
    "qwen2.5-3b": replace(_QWEN25_TIED, dim=2048, num_layers=36, num_heads=16, hidden_dim=11008),
    "qwen2.5-7b": _QWEN25,
    "qwen2.5-14b": replace(
        _QWEN25, dim=5120, num_layers=48, num_heads=40, num_kv_heads=8, hidden_dim=13824
    ),
    "qwen2.5-32b": replace(
        _QWEN25, dim=5120, num_layers=64, num_heads=40, num_kv_heads=8, hidden_dim=27648
    ),
    "qwen2.5-72b": replace(
        _QWEN25, dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, hidden_dim=29568
    ),
    "qwen3-0.6b": replace(_QWEN3_TIED, dim=1024, hidden_dim=3072),
    "qwen3-1.7b": replace(_QWEN3_TIED, dim=2048, hidden_dim=6144),
    "qwen3-4b": replace(_QWEN3, dim=2560, hidden_dim=9728, tie_embeddings=True),
    "qwen3-8b": _QWEN3,
    "qwen3-14b": replace(_QWEN3, dim=5120, num_layers=40, num_heads=40, hidden_dim=17408),
    "qwen3-32b": replace(_QWEN3, dim=5120, num_layers=64, num_heads=64, hidden_dim=25600),
    "gemma-2-2b": _GEMMA2,
    "gemma-2-9b": replace(
        _GEMMA2, dim=3584, num_layers=42, num_heads=16, num_kv_heads=8, hidden_dim=14336
    ),
    "gemma-2-27b": replace(
        _GEMMA2,
        dim=4608,
        num_layers=46,
        num_heads=32,
        num_kv_heads=16,
        head_dim=128,
        hidden_dim=36864,
        query_scalar=144,
    ),
}
