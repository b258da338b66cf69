"""Key and value heads averaged by groups."""

import pytest
import torch

from omniattn.models import GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, pool_kv_heads

KINDS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config}


def model_of(kind, **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 37, "dim": 48, "num_layers": 2, "num_heads": 6, "hidden_dim": 64}
    model = KINDS[kind](**sizes | {"num_kv_heads": 6} | options).build(dtype=torch.float64)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p)
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 6])
@torch.no_grad()
def test_equal_heads_of_a_group_give_the_same_model(kind, count):
    model, tokens = model_of(kind), torch.randint(37, (2, 9))
    for layer in model.layers:
        for p in (*layer.mixer.k_proj.parameters(), *layer.mixer.v_proj.parameters()):
            heads = p.unflatten(0, (count, 6 // count, -1))
            heads.copy_(heads[:, :1].clone().expand_as(heads))
    pooled = pool_kv_heads(model, count)
    assert pooled.config.num_kv_heads == count and pooled.training
    torch.testing.assert_close(pooled(tokens), model(tokens))


def test_heads_are_means_of_neighbours():
    model = model_of("qwen2").eval()
    pooled = pool_kv_heads(model, 3)
    assert not pooled.training
    for ours, theirs in zip(pooled.layers, model.layers, strict=True):
        k, both = ours.mixer.k_proj.weight[8:16], theirs.mixer.k_proj.weight[16:32]
        torch.testing.assert_close(k, (both[:8] + both[8:]) / 2)
        b, both = ours.mixer.v_proj.bias[16:], theirs.mixer.v_proj.bias[32:]
        torch.testing.assert_close(b, (both[:8] + both[8:]) / 2)
        assert ours.mixer.q_proj.weight.equal(theirs.mixer.q_proj.weight)
        assert ours.mixer.q_proj.weight is not theirs.mixer.q_proj.weight
    pooled.train()(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
    assert all(p.grad is not None for p in pooled.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_errors():
    model = model_of("llama")
    with pytest.raises(ValueError, match="must divide the model's 6, got num_kv_heads=4"):
        pool_kv_heads(model, 4)
    with pytest.raises(ValueError, match="num_kv_heads must be an int >= 1"):
        pool_kv_heads(model, 0)
    with pytest.raises(NotImplementedError, match="got a Decoder with num_kv_heads=None"):
        pool_kv_heads(GPT2Config(dim=32, num_heads=2, num_layers=1).build(), 1)
