"""Folders of transformers: memory while they are read, and independence of files; RWKV's files."""

import gc
import re
import sys
import threading
from pathlib import Path

import pytest
import torch

from omniattn.models import (
    CheckpointError,
    Llama4Config,
    RWKV4Config,
    RWKV5Config,
    RWKV6Config,
    RWKV7Config,
    from_hf,
    from_rwkv,
)

#: Most weights are transposed in transformers, so that they are copied in any case.
SIZES = {"vocab_size": 64, "dim": 256, "num_layers": 4, "num_heads": 2, "num_kv_heads": 1}
CONFIG = Llama4Config(**SIZES, hidden_dim=256, expert_dim=256, experts=10)


def anonymous():
    """Returns the bytes of memory that belong to no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


class Peak(threading.Thread):
    """Samples the memory until `done` is set."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most, self.done = 0, threading.Event()

    def run(self):
        while not self.done.wait(0.001):
            self.most = max(self.most, anonymous())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_folders_are_read_weight_by_weight_and_then_let_go(tmp_path):
    CONFIG.build().to_hf().save_pretrained(tmp_path, max_shard_size="15MB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    from_hf(tmp_path)  # imports and starts threads
    gc.collect()
    before, peak = anonymous(), Peak()
    peak.start()
    model = from_hf(tmp_path)
    peak.done.set()
    peak.join()
    sizes = [weight.nbytes for weight in model.state_dict().values()]
    assert sum(sizes) > 35e6
    assert peak.most - before < sum(sizes) + max(sizes) + 8e6
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    for shard in shards:
        shard.write_bytes(bytes(shard.stat().st_size))
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)


RWKV = {"vocab_size": 30, "dim": 16, "num_layers": 2}
OF_RWKV = {
    "4": RWKV4Config(**RWKV),
    "5": RWKV5Config(**RWKV, hidden_dim=56, head_dim=8),
    "6": RWKV6Config(**RWKV, hidden_dim=56, head_dim=8, mix_rank=3, decay_rank=5),
    "7": RWKV7Config(**RWKV, head_dim=8, decay_rank=4, a_rank=5, v_rank=6, gate_rank=7),
}
WORDS = {"embed_tokens": "emb", "embed_norm": "blocks.0.ln0", "norm": "ln_out", "lm_head": "head"}
PARTS = {"mixer": "att", "mlp": "ffn", "input_layernorm": "ln1", "post_attention_layernorm": "ln2"}


def rwkv_weights(model, version):
    """Returns the weights as RWKV-LM saves them."""
    found = {}
    for name, weight in model.state_dict().items():
        first, *rest = name.split(".")
        if first == "layers":
            name = ".".join(["blocks", rest[0], PARTS[rest[1]], *rest[2:]])
        else:
            name = ".".join([WORDS[first], *rest])
        if version in "45" and re.search(r"\.(x|time_maa)_.$", name):
            name, weight = f"{name.rpartition('.')[0]}.time_mix_{name[-1]}", 1 - weight
        found[name] = weight
    if version == "7":
        found |= {f"blocks.0.att.{name}": torch.ones(1, 1, 16) for name in ("v0", "v1", "v2")}
    return found


@pytest.mark.parametrize("version", OF_RWKV)
@torch.no_grad()
def test_files_of_rwkv_become_models(version, tmp_path):
    torch.manual_seed(0)
    model = OF_RWKV[version].build().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    weights, path = rwkv_weights(model, version), tmp_path / "model.pth"
    torch.save(weights, path)
    found, tokens = from_rwkv(path), torch.randint(30, (2, 7))
    assert found.config == model.config and not found.training
    torch.testing.assert_close(found(tokens), model(tokens), rtol=1e-5, atol=1e-5)
    torch.save({name: weight.bfloat16() for name, weight in weights.items()}, path)
    half = from_rwkv(str(path), backend="reference")
    assert half.config.backend == "reference"
    like = half.config.build(dtype=torch.bfloat16).state_dict()
    assert {n: t.dtype for n, t in half.state_dict().items()} == {
        n: t.dtype for n, t in like.items()
    }
    torch.testing.assert_close(half(tokens).float(), model(tokens), rtol=0.1, atol=0.3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks.1.ln2.bias": None}, "1 weights in .* are missing: blocks.1.ln2.bias"),
        ({"blocks.1.more": torch.ones(2)}, "1 weights in .* are unknown: blocks.1.more"),
        ({"blocks.1.ln2.bias": torch.ones(2)}, "size mismatch for blocks.1.ln2.bias: .*16"),
        ({"blocks.0.att.r_k": None}, r"must have the weights of RWKV-4, 5.2, 6 or 7 by the names"),
        ({"emb.weight": None}, r"must have the weights of RWKV-4, 5.2, 6 or 7 by the names"),
        ({"emb.weight": "text"}, "must hold tensors by name"),
        ({"emb.weight": threading.Event}, "is damaged or no checkpoint"),
    ],
)
def test_files_that_are_not_those_of_rwkv_are_refused(tmp_path, change, message):
    weights = rwkv_weights(OF_RWKV["7"].build(), "7") | change
    torch.save({n: t for n, t in weights.items() if t is not None}, tmp_path / "model.pth")
    with pytest.raises(CheckpointError, match=message):
        from_rwkv(tmp_path / "model.pth")
    with pytest.raises(FileNotFoundError):
        from_rwkv(tmp_path / "none.pth")
