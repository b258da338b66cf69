"""Folders of transformers: memory while their weights are read, and independence of their files."""

import gc
import sys
import threading
from pathlib import Path

import pytest
import torch

from omniattn.models import Llama4Config, from_hf

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
