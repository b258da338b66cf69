"""Rows of goals.py for forward and backward of a model of each family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from goal_rows.goal import Provider, Row
from omniattn.models import (
    PRESETS,
    BigBirdConfig,
    BloomConfig,
    DeepSeekConfig,
    DeepSeekV2Config,
    DeepSeekV32Config,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    ImageToTextConfig,
    JambaConfig,
    KimiLinearConfig,
    Llama4Config,
    LlamaConfig,
    LongformerConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    ModelConfig,
    MPTConfig,
    PVTConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    RWKV4Config,
    RWKV7Config,
    SwitchTransformerConfig,
    TransformerXLConfig,
    ViTConfig,
    Zamba2Config,
)
from omniattn.training import recipe_of

BATCH, LENGTH = 4, 512
_PLAIN: dict[str, Any] = {"vocab_size": 4096, "dim": 512, "num_layers": 4}
_HEADS = {**_PLAIN, "num_heads": 8}
_GROUPED = {**_HEADS, "num_kv_heads": 4, "hidden_dim": 1408}
_EXPERTS = {**_GROUPED, "experts": 8, "top_k": 2, "expert_dim": 352}
_LATENT = {
    **{**_HEADS, "hidden_dim": 1408, "experts": 8, "top_k": 2, "expert_dim": 352},
    **{"kv_lora_rank": 128, "qk_nope_dim": 64, "qk_rope_dim": 32, "v_dim": 64},
}
#: Decoders of four layers of width 512, whose yardstick is the same model of transformers.
DECODERS: dict[str, ModelConfig] = {
    "gpt2": GPT2Config(**_HEADS),
    "llama": LlamaConfig(**_GROUPED),
    "mistral": MistralConfig(**_GROUPED, window=256),
    "mixtral": MixtralConfig(**_GROUPED | {"hidden_dim": 352}),
    "gemma2": Gemma2Config(**_GROUPED, window=256),
    "qwen2": Qwen2Config(**_GROUPED),
    "qwen3": Qwen3Config(**_GROUPED),
    "qwen3-next": Qwen3NextConfig(**_EXPERTS, linear_head_dim=64, linear_v_head_dim=64),
    "qwen2-moe": Qwen2MoeConfig(**_EXPERTS),
    "qwen3-moe": Qwen3MoeConfig(**_EXPERTS),
    "deepseek-v2": DeepSeekV2Config(**_LATENT),
    "deepseek-v3": DeepSeekConfig(**_LATENT, norm_eps=1e-6),
    "deepseek-v3.2": DeepSeekV32Config(**_LATENT, index_topk=128),
    "jamba": JambaConfig(
        **_GROUPED | {"hidden_dim": 352}, experts=8, attention_period=4, attention_offset=2
    ),
    "mamba": MambaConfig(**_PLAIN),
    "mamba2": Mamba2Config(**_PLAIN),
    "rwkv4": RWKV4Config(**_PLAIN),
    "bloom": BloomConfig(**_HEADS),
    "mpt": MPTConfig(**_HEADS),
    "falcon": FalconConfig(**_HEADS, hidden_dim=2048),
    "llama4": Llama4Config(**_EXPERTS | {"top_k": 1}, chunk_size=256),
    "kimi-linear": KimiLinearConfig(**_LATENT, linear_heads=8),
    "zamba2": Zamba2Config(**_HEADS, num_kv_heads=8, headdim=64),
}
_IMAGE = ViTConfig(classes=0, channels=3, image=32, patch=8, dim=160, num_layers=3, num_heads=5)
#: Other models. Their yardstick is the model on the definitions in plain torch, "reference".
OTHERS: dict[str, ModelConfig] = {
    "rwkv7": RWKV7Config(),
    "transformer-xl": TransformerXLConfig(),
    "switch": SwitchTransformerConfig(),
    "longformer": LongformerConfig(window=64),
    "bigbird": BigBirdConfig(block=16, n_random=1),
    "pvt": PVTConfig(),
    "image-to-text": ImageToTextConfig(vision=_IMAGE),
    **{
        name: PRESETS[name]
        for name in (
            *("bert", "electra", "deberta", "t5", "transformer", "vit", "deit", "swin", "mae"),
            *("clip", "dino", "retnet", "xlstm", "differential", "s4d", "samba"),
        )
    },
}


def _loss(model: nn.Module, call: Callable[[], Tensor]) -> Provider:
    def run() -> Tensor:
        torch.manual_seed(0)  # patches that are hidden
        model.zero_grad()
        loss = call()
        loss.backward()
        return loss.detach()

    return run


def _decoder(name: str) -> Iterator[Row]:
    torch.manual_seed(0)
    ours = DECODERS[name].build()
    theirs = ours.to_hf()
    tokens = torch.randint(4096, (BATCH, LENGTH + 1))

    def hf() -> Tensor:
        found: Tensor = theirs(input_ids=tokens, labels=tokens, use_cache=False).loss
        return found

    yield Row(
        f"{name} model B{BATCH}T{LENGTH}",
        "forward+backward",
        _loss(ours, lambda: ours(tokens[:, :-1], tokens[:, 1:])),
        _loss(theirs, hf),
        "transformers",
        1 / 1.3,
        same=True,
    )


def _other(name: str) -> Iterator[Row]:
    config = OTHERS[name]
    models = []
    for backend in (None, "reference"):
        torch.manual_seed(0)
        models.append(replace(config, backend=backend).build())
    models[1].load_state_dict(models[0].state_dict())
    if isinstance(config, ImageToTextConfig):
        tokens = torch.randint(config.vocab_size, (8, 65))
        batch = (torch.randn(8, 3, 32, 32), tokens[:, :-1], tokens[:, 1:])
    else:
        batch = recipe_of(config).task.load(None, 256).batch(8, 0, 0)

    def run(model: nn.Module) -> Provider:
        def call() -> Tensor:
            found = model(*batch)
            return found[0] if isinstance(found, tuple) else found

        return _loss(model, call)

    ours, theirs = map(run, models)
    goal = 1 / 1.3
    yield Row(f"{name} model B8", "forward+backward", ours, theirs, "reference", goal, same=True)


def model_groups() -> dict[str, Callable[[], Iterator[Row]]]:
    """Returns a group for each model."""

    def group(make: Callable[[str], Iterator[Row]], name: str) -> Callable[[], Iterator[Row]]:
        return lambda: make(name)

    return {
        f"model-{name}": group(make, name)
        for make, names in ((_decoder, DECODERS), (_other, OTHERS))
        for name in names
    }
