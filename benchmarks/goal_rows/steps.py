"""Rows of goals.py for training steps of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from goal_rows.goal import BF16, F32, Provider, Row
from omniattn.testing.spec import SHORT_DTYPE


def llama_rows(dtype: torch.dtype, compiled: bool, batch: int, length: int) -> Iterator[Row]:
    """A training step of a patched Hugging Face Llama against the model on sdpa."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import omniattn.hf

    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=4096,
        attn_implementation="sdpa",
    )
    tokens = torch.randint(4096, (batch, length))

    def step(patched: bool) -> Provider:
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(dtype).train()
        if patched:
            omniattn.hf.register()
            omniattn.hf.patch(model)
        forward = torch.compile(model) if compiled and not patched else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

        def run() -> None:
            optimizer.zero_grad()
            forward(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer.step()

        return run

    goals = {(F32, False): 2.0, (F32, True): 1.5, (BF16, False): 1.4, (BF16, True): 1.1}
    weights = sum(p.numel() for p in LlamaForCausalLM(config).parameters()) - 4096 * 512
    products = 8 * length * length / 2 * 64 * 2 * 2 * 3.5 * 4
    yield Row(
        f"HF Llama step B{batch}T{length}",
        "forward+backward",
        step(True),
        step(False),
        "compiled sdpa" if compiled else "sdpa",
        1 / goals[dtype, compiled],
        dtype=dtype,
        flops=batch * (6.0 * weights * length + products),
    )


def llama_groups() -> dict[str, Callable[[], Iterator[Row]]]:
    """Returns a group for each row, since a step takes seconds."""

    def group(*arguments):
        return lambda: llama_rows(*arguments)

    return {
        f"llama-{SHORT_DTYPE[dtype]}{'-compiled' * compiled}-B{batch}": group(
            dtype, compiled, batch, length
        )
        for dtype in (F32, BF16)
        for compiled in (False, True)
        for batch, length in ((4, 512), (1, 2048))
    }
