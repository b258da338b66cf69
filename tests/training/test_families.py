"""Each model of `python -m omniattn train` learns, as its reference does; checkpoints are exact."""

import copy
from dataclasses import replace

import pytest
import torch

from omniattn.models import Routers, load_model
from omniattn.models.decoders.zamba2 import HybridBlock
from omniattn.models.presets import TRAINED
from omniattn.modules import DecoderBlock
from omniattn.training import Digits, TextTask, TrainConfig, Trainer, recipe_of
from omniattn.training.trainer import loss_of

pytestmark = pytest.mark.usefixtures("one_thread")
MODELS = [name for name in TRAINED if name not in ("llama-tiny", "llama-medium")]
EXPERTS = ["mixtral", "switch", "deepseek-moe"]
#: Models whose loss falls later; tests/training/test_images.py trains them longer.
SLOW_TO_START = ("clip", "dino")
DEPTHS = 2
TEXT = b"".join(b"%d * %d = %d\n" % (a, b, a * b) for a in range(40) for b in range(20))


def trainer(model: str, backend: str | None = None, dtype: str = "float32") -> Trainer:
    config = TRAINED[model]
    kind = recipe_of(config).task
    if issubclass(kind, TextTask):
        task = kind(TEXT, 65)
    else:
        if issubclass(kind, Digits):
            pytest.importorskip("sklearn")
        task = kind()
    batch = recipe_of(config).options.get("batch", 2)
    run = TrainConfig(model, 8, batch, 65, dtype, warmup=2, lr=5e-3)
    return Trainer(run, task, backend=backend)


@pytest.mark.parametrize("model", MODELS)
def test_learns_and_the_reference_learns_the_same(model):
    ours = trainer(model)
    before = ours.evaluate()
    for _ in range(8):
        ours.train_step()
    after = ours.evaluate()
    if model not in SLOW_TO_START:
        assert after < before - 0.1
    reference = trainer(model, "reference")  # which seeds torch again
    for _ in range(3):
        reference.train_step()
    assert reference.losses == pytest.approx(ours.losses[:3], rel=1e-4)


def adds_residuals(config):
    """True if the blocks add to a stream whose dtype is an option."""
    streams = [getattr(block, "streams", None) for block in getattr(config, "blocks", ())]
    return hasattr(config, "residual_in_fp32") and not any(streams)


@pytest.mark.parametrize("model", [n for n in MODELS if adds_residuals(TRAINED[n])])
def test_half_layers_on_a_residual_in_fp32(model):
    config = replace(TRAINED[model], residual_in_fp32=True)
    torch.manual_seed(0)
    half = config.build(dtype=torch.bfloat16)
    streams = []
    for module in half.modules():
        if isinstance(module, DecoderBlock | HybridBlock):
            module.register_forward_hook(lambda *call: streams.append(call[-1][1].dtype))
    x = torch.randint(config.vocab_size, (2, 33))
    inputs = (x, x) if config.architecture == "t5" else (x,)
    loss = half(*inputs, x)
    loss.backward()
    assert set(streams) == {torch.float32} and len(streams) >= config.num_layers
    assert half(*inputs).dtype == torch.bfloat16
    assert all(p.grad.isfinite().all() for p in half.parameters() if p.grad is not None)


def test_experts_train_in_bf16_with_either_backend():
    losses = []
    for backend in (None, "reference"):
        run = trainer("mixtral", backend, dtype="bfloat16")
        run.train_step()
        losses += run.losses
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


@pytest.mark.parametrize("model", MODELS)
def test_saved_and_resumed_changes_no_bit(model, tmp_path):
    straight = trainer(model)
    for _ in range(2):
        straight.train_step()
    straight.save(tmp_path / "c")
    random = torch.get_rng_state()
    batch = straight.task.held_out_batch(2)
    with torch.no_grad():
        loss = loss_of(load_model(tmp_path / "c")(*batch))
        assert torch.equal(loss, loss_of(straight.model.eval()(*batch)))
    straight.model.train()
    resumed = trainer(model)
    torch.manual_seed(99)
    resumed.load(tmp_path / "c")
    resumed.train_step()
    torch.set_rng_state(random)
    straight.train_step()
    assert resumed.losses == straight.losses
    theirs = straight.model.state_dict()
    for name, tensor in resumed.model.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name
    for name, tensor in resumed.routers.history().items():
        assert torch.equal(tensor, straight.routers.history()[name]), name


@pytest.mark.parametrize("model", EXPERTS)
def test_routers_are_trained_balanced_and_recorded(model):
    run = trainer(model)
    for _ in range(2):
        run.train_step()
    layers, experts = len(run.routers.layers), run.model.config.experts
    assert [tuple(load.shape) for load in run.routers.loads] == [(layers, experts)] * 2
    assignments = 2 * 65 * run.routers.layers[0].config.gate.top_k
    assert (run.routers.loads[0].sum(-1) == assignments).all()
    assert all(value > 0 for value in run.routers.losses)
    total = Routers(run.model, sum_layers=True).loss()
    torch.testing.assert_close(total, layers * run.routers.loss())
    assert (run.routers.dropped[-1].sum() > 0) == (model == "switch")
    assert run.routers.status().startswith("busiest expert ")
    moves = [(load.double().mean(-1, keepdim=True) - load).sign() for load in run.routers.loads]
    for layer, router in enumerate(run.routers.layers):
        assert router.gate.weight.grad.abs().max() > 0
        bias = router.gate.e_score_correction_bias
        assert (bias is None) == (model != "deepseek-moe")
        if bias is not None:
            expected = router.config.gate.bias_rate * sum(moves)[layer]
            torch.testing.assert_close(bias.double(), expected, rtol=1e-5, atol=1e-9)


def test_the_balance_loss_reaches_the_gradient_and_not_the_reported_loss():
    run, free = trainer("mixtral"), trainer("mixtral")
    for layer in free.routers.layers:
        layer.config = replace(layer.config, balance_coefficient=0.0)
    run.train_step()
    free.train_step()
    assert run.losses == free.losses
    gradients = [r.routers.layers[0].gate.weight.grad for r in (run, free)]
    assert not torch.allclose(*gradients, rtol=1e-2, atol=0)


def test_further_tokens_are_predicted_as_in_the_paper():
    """Loss of depth d at position i is that of token i + d + 1, through the head of the trunk."""
    config = replace(TRAINED["deepseek-moe-mtp"], mtp_depths=DEPTHS, mtp_weight=0.1)
    torch.manual_seed(0)
    model, tokens = config.build(), torch.randint(256, (2, 20))
    targets = torch.cat([tokens[:, 1:], torch.randint(256, (2, 1))], 1)
    targets[0, 15:] = -100
    loss = model(tokens, targets)
    auxiliary = model.auxiliary_loss()
    hidden, total = model.hidden(tokens), 0.0
    for d, depth in enumerate(model.predictor.depths, 1):
        pair = [
            depth["hidden_norm"](hidden[:, :-1]),
            depth["embedding_norm"](model.embed_tokens(tokens[:, d:])),
        ]
        rope = model.rotary(torch.arange(20 - d))
        y, residual = depth["block"](depth["proj"](torch.cat(pair, -1)), rope=rope)
        hidden = depth["norm"](y + residual)
        logits = model.head(hidden)
        total += torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets[:, d:].flatten(), ignore_index=-100
        )
    torch.testing.assert_close(auxiliary, 0.1 / DEPTHS * total)
    gradients = torch.autograd.grad(auxiliary, [*model.predictor.parameters()], allow_unused=True)
    assert sum(g is not None and bool(g.any()) for g in gradients) > 0.9 * len(gradients)
    plain = replace(config, mtp_depths=0).build()
    plain.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(plain(tokens, targets), loss) and plain.auxiliary_loss() == 0.0
    model(tokens, targets)  # a copy has seen no forward
    assert model.auxiliary_loss() > 0 and copy.deepcopy(model).auxiliary_loss() == 0.0


def test_further_tokens_reach_the_gradient_and_not_the_reported_loss():
    run, free = trainer("deepseek-moe-mtp"), trainer("deepseek-moe-mtp")
    free.model.config = replace(free.model.config, mtp_weight=0.0)
    run.train_step()
    free.train_step()
    assert run.losses == free.losses and run.further == free.further
    assert run.further["mtp"] == [pytest.approx(run.model.auxiliary_loss().item() / 0.3)]
    gradients = [r.model.embed_tokens.weight.grad for r in (run, free)]
    assert not torch.allclose(*gradients, rtol=1e-2, atol=0)
