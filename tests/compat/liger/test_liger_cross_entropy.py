"""Cross-entropies and divergences of Liger's names, against torch's on all logits."""

import pytest
import torch
import torch.nn.functional as nnf
from liger_cases import BIAS, TARGET, WEIGHT, K, V, X, leaves, log_probs, tensors

from omniattn.compat import liger
from omniattn.compat.liger import cross_entropy as liger_cross_entropy


def test_cross_entropies_take_their_options():
    logits, target = X.flatten(0, 1) * 3, TARGET.flatten() % K
    weight = torch.rand(K, generator=torch.Generator().manual_seed(0))
    expected = nnf.cross_entropy(logits, target, weight, label_smoothing=0.1)
    actual = liger.LigerCrossEntropyLoss(weight, label_smoothing=0.1)(logits, target)
    torch.testing.assert_close(actual, expected)
    capped = 2 * torch.tanh(nnf.linear(logits, WEIGHT, BIAS) / 2)
    module = liger.LigerFusedLinearCrossEntropyLoss(
        lse_square_scale=0.1, softcap=2.0, reduction="sum"
    )
    expected = nnf.cross_entropy(capped, target, reduction="sum")
    expected = expected + 0.1 * capped.logsumexp(-1).square().sum()
    torch.testing.assert_close(module(WEIGHT, logits, target, BIAS), expected)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_losses_times_the_probabilities_of_their_targets(reduction, weighted):
    weight, x, bias = leaves()
    kept, class_weight = TARGET != -100, torch.arange(1.0, V + 1) if weighted else None
    options = {"reduction": reduction, "use_token_scaling": True}
    arguments = (weight, x.flatten(0, 1), TARGET.flatten(), bias)
    actual = liger.LigerFusedLinearCrossEntropyLoss(class_weight, **options)(*arguments)
    tokens = log_probs(x, weight, bias)[0]
    factors = kept.float() if class_weight is None else class_weight[TARGET.clamp(min=0)] * kept
    expected = -(tokens * tokens.detach().exp() * factors).flatten()
    if reduction != "none":
        expected = expected.sum() / (factors.sum() if reduction == "mean" else 1)
    torch.testing.assert_close(actual, expected)
    grads = [torch.autograd.grad(t.square().sum(), (weight, x, bias)) for t in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    options |= {"lse_square_scale": 0.1, "return_z_loss": True}
    found = liger.LigerFusedLinearCrossEntropyLoss(**options)(*arguments)
    options["lse_square_scale"] = 0.0
    without = liger.LigerFusedLinearCrossEntropyLoss(**options)(*arguments)
    torch.testing.assert_close(found.loss - without.loss, found.z_loss)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_cross_entropies_return_with_the_loss(monkeypatch, reduction, softcap, dtype):
    monkeypatch.setattr(liger_cross_entropy, "_BLOCK_LOGITS", 4 * TARGET.numel())
    weight, x, bias = (t.to(dtype).requires_grad_() for t in (WEIGHT, X.flatten(0, 1), BIAS))
    target = TARGET.flatten()
    kept = target != -100
    options = {"reduction": reduction, "softcap": softcap, "lse_square_scale": 0.1}
    asked = dict.fromkeys(
        ("return_z_loss", "return_token_accuracy", "return_predicted_tokens"), True
    )
    logits = nnf.linear(x.double(), weight.double(), bias.double())
    capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    predicted = logits.argmax(-1).where(kept, -1)
    hits, z_loss = (predicted == target).float(), 0.1 * capped.logsumexp(-1).square() * kept
    if reduction != "none":
        hits = hits.sum() / kept.sum()
        z_loss = z_loss.sum() / (kept.sum() if reduction == "mean" else 1)
    narrow = logits.to(dtype)
    for name, arguments in (
        ("LigerCrossEntropyLoss", (narrow, target)),
        ("LigerFusedLinearCrossEntropyLoss", (weight, x, target, bias)),
    ):
        found = getattr(liger, name)(**options, **asked)(*arguments)
        plain = getattr(liger, name)(**options)(*arguments)
        torch.testing.assert_close(found.loss, plain)
        assert found.loss.requires_grad and not found.z_loss.requires_grad
        assert found.z_loss.dtype == dtype
        tolerance = 1e-9 if dtype == torch.float64 else 1e-2
        torch.testing.assert_close(found.z_loss.double(), z_loss, rtol=tolerance, atol=tolerance)
        if dtype == torch.float64 or arguments[0] is not narrow:
            torch.testing.assert_close(found.token_accuracy, hits)
            assert torch.equal(found.predicted_tokens, predicted)
    only = liger.LigerCrossEntropyLoss(return_predicted_tokens=True)(narrow, target)
    assert only.z_loss is None and only.token_accuracy is None


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
@pytest.mark.parametrize("log_target", [False, True])
def test_kl_divergences_of_log_probabilities(reduction, log_target):
    log_q, log_p = (t.log_softmax(-1) for t in tensors((6, V), (6, V)))
    target = log_p if log_target else log_p.exp()
    options = {"reduction": reduction, "log_target": log_target}
    actual = liger.LigerKLDIVLoss(**options)(log_q, target)
    torch.testing.assert_close(actual, nnf.kl_div(log_q, target, **options))
    jsd = liger.LigerJSD(beta=0.0)(log_q, log_p)
    torch.testing.assert_close(
        jsd, nnf.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
    )


def test_losses_have_the_dtype_of_the_logits():
    """As Liger's, where no linear layer is part of the loss."""
    logits = torch.randn(4, V).bfloat16()
    target = torch.tensor([1, 2, -100, 3])
    for reduction in ("mean", "none"):
        loss = liger.LigerCrossEntropyLoss(reduction=reduction)(logits, target)
        assert loss.dtype == torch.bfloat16
    assert liger.LigerJSD()(logits.log_softmax(-1), logits.log_softmax(-1)).dtype == logits.dtype
