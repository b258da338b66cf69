"""The modules named as Liger's against the formulas of the papers, written out on all logits."""

import math

import pytest
import torch
import torch.nn.functional as nnf
from liger_cases import (
    BIAS,
    REF_WEIGHT,
    REF_X,
    TARGET,
    WEIGHT,
    B,
    T,
    V,
    X,
    leaves,
    log_probs,
    tensors,
)

from omniattn import functional
from omniattn.compat import liger
from omniattn.functional.losses.policy import GRPO_LOSSES
from omniattn.functional.losses.preference import DPO_LOSSES


def check(module, expected, *rest):
    """Loss and gradients of a module of pairs, against a function of (x, weight, bias)."""
    weight, x, bias = leaves()
    actual, logged = module(weight, x, TARGET, bias, *rest)
    want = expected(x, weight, bias)
    torch.testing.assert_close(actual, want)
    grads = [torch.autograd.grad(loss, (weight, x, bias)) for loss in (actual, want)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    assert not any(t.requires_grad for t in logged)
    return logged


def sigmoid_losses(margin, e):
    return -(1 - e) * nnf.logsigmoid(margin) - e * nnf.logsigmoid(-margin)


@pytest.mark.parametrize("average", [False, True])
def test_dpo_is_that_of_the_paper(average):
    beta, smoothing, ref = 0.3, 0.1, log_probs(REF_X, REF_WEIGHT, average=average)[1]

    def expected(x, weight, bias):
        tokens, sequences = log_probs(x, weight, bias, average)
        ratio = sequences - ref
        nll = -tokens[:B].sum() / (TARGET[:B] != -100).sum()
        return sigmoid_losses(beta * (ratio[:B] - ratio[B:]), smoothing).mean() + 0.7 * nll

    module = liger.LigerFusedLinearDPOLoss(
        beta=beta,
        alpha=0.7,
        compute_nll_loss=True,
        average_log_prob=average,
        label_smoothing=smoothing,
    )
    logged = check(module, expected, REF_X, REF_WEIGHT)
    tokens, sequences = log_probs(X, WEIGHT, BIAS, average)
    logits = nnf.linear(X, WEIGHT, BIAS)
    ratio = beta * (sequences - ref)
    nll = -tokens[:B].sum() / (TARGET[:B] != -100).sum()
    means = (logits[:B].mean(), logits[B:].mean())
    want = (sequences[:B], sequences[B:], *means, nll, ratio[:B], ratio[B:])
    torch.testing.assert_close(logged, want, rtol=1e-4, atol=1e-5)


def test_cpo_simpo_and_orpo_are_those_of_the_papers():
    def nll(tokens):
        return -tokens[:B].sum() / (TARGET[:B] != -100).sum()

    def cpo(x, weight, bias):
        tokens, log_p = log_probs(x, weight, bias)
        return sigmoid_losses(0.2 * (log_p[:B] - log_p[B:]), 0.1).mean() + 0.5 * nll(tokens)

    def simpo(x, weight, bias):
        tokens, log_p = log_probs(x, weight, bias, average=True)
        return sigmoid_losses(2.0 * (log_p[:B] - log_p[B:]) - 0.3, 0.0).mean() + nll(tokens)

    def orpo(x, weight, bias):
        tokens, log_p = log_probs(x, weight, bias, average=True)
        odds = log_p.exp() / (1 - log_p.exp())
        return 0.4 * -nnf.logsigmoid((odds[:B] / odds[B:]).log()).mean() + nll(tokens)

    check(liger.LigerFusedLinearCPOLoss(beta=0.2, alpha=0.5, label_smoothing=0.1), cpo)
    check(liger.LigerFusedLinearSimPOLoss(beta=2.0, gamma=0.3), simpo)
    check(liger.LigerFusedLinearORPOLoss(beta=0.4), orpo)


def test_orpo_takes_other_targets_for_its_cross_entropy():
    other = TARGET.clamp(min=3)

    def expected(x, weight, bias):
        log_p = log_probs(x, weight, bias, average=True)[1]
        odds = log_p.exp() / (1 - log_p.exp())
        logits = nnf.linear(x[:B], weight, bias).flatten(0, 1)
        nll = nnf.cross_entropy(logits, other[:B].flatten())
        return 0.4 * -nnf.logsigmoid((odds[:B] / odds[B:]).log()).mean() + nll

    check(liger.LigerFusedLinearORPOLoss(beta=0.4), expected, other)


@pytest.mark.parametrize("use_ref_model", [False, True])
def test_kto_is_that_of_the_paper(use_ref_model):
    weight, x, bias = leaves()
    preferred, kl = torch.tensor([True, False, False, True]), torch.tensor(0.2)
    module = liger.LigerFusedLinearKTOLoss(beta=0.3, use_ref_model=use_ref_model)
    ref = log_probs(REF_X, REF_WEIGHT)[1] if use_ref_model else torch.zeros(2 * B)
    rest = (REF_X, REF_WEIGHT, None, kl) if use_ref_model else (None, None, None, kl)
    actual, logged = module(x, weight, TARGET, bias, preferred, *rest)
    log_p = log_probs(x, weight, bias)[1]
    sign = torch.tensor([1.0, -1.0, -1.0, 1.0])
    expected = (1 - torch.sigmoid(0.3 * sign * (log_p - ref - kl))).mean()
    torch.testing.assert_close(actual, expected)
    grads = [torch.autograd.grad(loss, (weight, x, bias)) for loss in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)
    logits = nnf.linear(X, WEIGHT, BIAS).sum((1, 2))
    want = [
        t[p].sum() for t in (log_p, logits, 0.3 * (log_p - ref)) for p in (preferred, ~preferred)
    ]
    torch.testing.assert_close(logged, tuple(t.detach() for t in want), rtol=1e-4, atol=1e-4)


def dpo_of(loss_type, c, r, beta, e=0.0):
    """One pair of log-ratios as numbers, after the papers."""

    def s(x):
        return 1 / (1 + math.exp(-x))

    m = beta * (c - r)
    return {
        "sigmoid": -(1 - e) * math.log(s(m)) - e * math.log(s(-m)),
        "robust": (-(1 - e) * math.log(s(m)) + e * math.log(s(-m))) / (1 - 2 * e),
        "hinge": max(0.0, 1 - m),
        "ipo": (c - r - 1 / (2 * beta)) ** 2,
        "exo_pair": s(m) * math.log(s(m) / (1 - e)) + s(-m) * math.log(s(-m) / e) if e else None,
        "nca_pair": -math.log(s(beta * c))
        - 0.5 * math.log(s(-beta * c))
        - 0.5 * math.log(s(-beta * r)),
        "bco_pair": -math.log(s(beta * c)) - math.log(s(-beta * r)),
        "sppo_hard": (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2,
        "apo_zero": 1 - s(beta * c) + s(beta * r),
        "apo_down": s(beta * c) + 1 - s(m),
        "discopop": -math.log(s(m)) * (1 - s(m / 0.05)) + math.exp(-m) * s(m / 0.05),
    }[loss_type]


@pytest.mark.parametrize("loss_type", DPO_LOSSES)
def test_kinds_of_dpo(loss_type):
    e = 0.1 if loss_type in ("robust", "exo_pair", "sigmoid") else 0.0
    chosen, rejected = torch.tensor([-1.0, -2.5]), torch.tensor([-1.5, -0.5])
    refs = torch.tensor([-1.2, -2.0]), torch.tensor([-1.0, -1.0])
    options = {"beta": 0.4, "loss_type": loss_type, "label_smoothing": e}
    actual = functional.dpo_loss(chosen, rejected, *refs, **options)
    pairs = zip((chosen - refs[0]).tolist(), (rejected - refs[1]).tolist(), strict=True)
    torch.testing.assert_close(actual, torch.tensor([dpo_of(loss_type, *p, 0.4, e) for p in pairs]))


ADVANTAGES = torch.tensor([1.5, -0.5, 0.7, -2.0])
MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])
IDS = TARGET.clamp(min=0)


def grpo_of(log_p, old, ref, loss_type, beta):
    """Token by token, after the papers."""
    kept = MASK.bool()
    total = []
    for i, advantage in enumerate(ADVANTAGES):
        ratio = (log_p[i] - old[i]).exp()
        d = ref[i] - log_p[i]
        if loss_type == "cispo":
            gain = ratio.clamp(max=0.2).detach() * advantage * log_p[i]
        elif loss_type == "sapo":
            t = 1.0 if advantage > 0 else 1.05
            gain = advantage * torch.sigmoid(t * (ratio - 1)) * 4 / t
        elif loss_type == "vespo":
            w = (log_p[i] - old[i])[kept[i]].sum().exp().detach()
            k, rate = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
            gain = w**k * torch.exp(rate * (1 - w)) * advantage * log_p[i]
        else:
            gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        total.append(-gain + beta * (d.exp() - d - 1))
    losses = torch.stack(total)
    if loss_type == "luspo":
        return (losses * kept.sum(-1, keepdim=True)).mean()
    if loss_type in ("grpo", "sapo"):
        return torch.stack(
            [row[keep].mean() for row, keep in zip(losses, kept, strict=True)]
        ).mean()
    return losses[kept].sum() / (4 * 7 if loss_type == "dr_grpo" else kept.sum())


@pytest.mark.parametrize("loss_type", GRPO_LOSSES)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_kinds_of_grpo(loss_type, beta):
    weight, x, bias = leaves()
    old, ref = (0.1 * t - 2 for t in tensors((2 * B, T), (2 * B, T)))
    module = liger.LigerFusedLinearGRPOLoss(
        beta=beta, loss_type=loss_type, max_completion_length=7, temperature=1.5
    )
    actual, logged = module(x, weight, IDS, MASK, ADVANTAGES, bias, ref, old)
    logits = nnf.linear(x, weight, bias) / 1.5
    log_p = logits.log_softmax(-1).gather(-1, IDS[..., None])[..., 0]
    expected = grpo_of(log_p, old, ref, loss_type, beta)
    torch.testing.assert_close(actual, expected)
    grads = [torch.autograd.grad(loss, (weight, x, bias)) for loss in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    assert len(logged) == 1 + (beta != 0)
    if beta:
        d = (ref - log_p).detach()
        torch.testing.assert_close(logged[0], (d.exp() - d - 1)[MASK.bool()].mean())


def test_grpo_of_sequences_uses_their_mean_ratio():
    log_p, old = (0.1 * t - 2 for t in tensors((2 * B, T), (2 * B, T)))
    kept = MASK.float()
    ratio = (((log_p - old) * kept).sum(-1) / kept.sum(-1)).exp()
    expected = -torch.min(ratio * ADVANTAGES, ratio.clamp(0.8, 1.2) * ADVANTAGES).mean()
    actual = functional.grpo_loss(
        *(log_p, ADVANTAGES, MASK),
        old_log_prob=old,
        beta=0.0,
        loss_type="grpo",
        importance_sampling_level="sequence",
    )
    torch.testing.assert_close(actual.loss, expected)


def test_options_of_grpo():
    """Two-sided clipping, the sampler's ratio, the corrected penalty, a given normalizer."""
    log_p, old, ref = (0.5 * t - 2 for t in tensors((2 * B, T), (2 * B, T), (2 * B, T)))
    sampler = torch.tensor([0.5, 1.0, 1.5, 2.0])
    ratio, advantage, d = (log_p - old).exp(), ADVANTAGES[:, None], ref - log_p
    gain = torch.min(ratio.clamp(max=1.1) * advantage, ratio.clamp(0.9, 1.3) * advantage)
    losses = -gain * sampler[:, None] + 0.2 * (d.exp() - d - 1) * ratio
    actual = functional.grpo_loss(
        *(log_p, ADVANTAGES, MASK),
        old_log_prob=old,
        ref_log_prob=ref,
        beta=0.2,
        epsilon_low=0.1,
        epsilon_high=0.3,
        delta=1.1,
        use_bias_correction_kl=True,
        importance_ratio=sampler,
        normalizer=20.0,
    )
    torch.testing.assert_close(actual.loss, (losses * MASK).sum() / 20)
    outside = ((ratio < 0.9) & (advantage < 0)) | ((ratio > 1.3) & (advantage > 0))
    torch.testing.assert_close(actual.clipped, outside[MASK.bool()].float().mean())


def test_distillation_weighs_hard_and_soft_losses():
    weight, x, bias = leaves()
    teacher_x, target = REF_X.flatten(0, 1), TARGET.flatten()
    module = liger.LigerFusedLinearJSDLoss(
        0.3, 0.7, beta=0.2, temperature=2.0, return_soft_hard_loss=True
    )
    rows = x.flatten(0, 1)
    total, soft, hard = module(rows, weight, teacher_x, REF_WEIGHT, target, bias)
    logits, kept = nnf.linear(rows, weight, bias), target != -100
    q, p = (logits / 2).softmax(-1), (nnf.linear(teacher_x, REF_WEIGHT) / 2).softmax(-1)
    mixture = 0.2 * p + 0.8 * q
    kl = [(a * (a / mixture).log()).sum(-1)[kept].mean() for a in (p, q)]
    torch.testing.assert_close(soft, (0.2 * kl[0] + 0.8 * kl[1]).detach())
    torch.testing.assert_close(hard, nnf.cross_entropy(logits, target).detach())
    torch.testing.assert_close(total, 0.3 * hard + 0.7 * soft)
    assert total.requires_grad and not soft.requires_grad
    plain = liger.LigerFusedLinearJSD(0.2, temperature=2.0)
    teacher = REF_WEIGHT.clone().requires_grad_()  # detached, as in Liger
    found = plain(rows, weight, teacher_x, teacher, target)
    wanted = functional.linear_jsd(
        rows, weight, teacher_x, REF_WEIGHT, target, beta=0.2, temperature=2.0
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("chunk_size", [3, 1024])
def test_cosine_distillation(chunk_size):
    """The teacher knows more tokens, and all tokens count in the distance."""
    weight, x, bias = leaves()
    teacher_x, target, rows = REF_X.flatten(0, 1), TARGET.flatten(), x.flatten(0, 1)
    more = torch.cat((REF_WEIGHT, REF_WEIGHT[:2]))
    given = rows, weight, teacher_x, more, target, bias, None
    total, soft, hard = liger.liger_fused_linear_cosine(
        *given, 0.3, 0.7, 0.2, chunk_size=chunk_size, return_soft_hard_loss=True
    )
    logits, count = nnf.linear(rows, weight, bias), (target != -100).sum()
    padded = nnf.pad(logits, (0, 2))
    wanted = 0.2 * (1 - nnf.cosine_similarity(padded, nnf.linear(teacher_x, more))).sum() / count
    torch.testing.assert_close(soft, wanted.detach())
    torch.testing.assert_close(hard, nnf.cross_entropy(logits, target).detach())
    expected = 0.3 * nnf.cross_entropy(logits, target) + 0.7 * wanted
    torch.testing.assert_close(total, expected)
    grads = [torch.autograd.grad(loss, (weight, x, bias)) for loss in (total, expected)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_parts_of_policy_losses():
    p, q, ratio = *tensors((2, 5), (2, 5)), tensors((2, 5))[0].exp()
    torch.testing.assert_close(liger.k3_loss_fn(p, q), (p - q).exp() - (p - q) - 1)
    torch.testing.assert_close(liger.sapo_loss_fn(ratio, 2.0), 2 * (2 * (ratio - 1)).sigmoid())
    with pytest.raises(ValueError, match="sapo_loss_fn: temperature must be > 0"):
        liger.sapo_loss_fn(ratio, 0.0)
    bounded, low, high = liger.clip_coef_fn(ratio, 0.1, 0.3, "grpo")
    torch.testing.assert_close(bounded, ratio.clamp(0.9, 1.3))
    assert torch.equal(low, ratio < 0.9) and torch.equal(high, ratio > 1.3)
    bounded, low, high = liger.clip_coef_fn(ratio.requires_grad_(), 0.1, 1.3, "cispo")
    assert not (low.any() or bounded.requires_grad) and torch.equal(high, ratio > 1.3)
    assert liger.clip_coef_fn(ratio, 0.1, 0.3, "vespo")[0] is None
    with pytest.raises(ValueError, match="clip_coef_fn: loss_type must be"):
        liger.clip_coef_fn(ratio, 0.1, 0.3, "ppo")


def test_gamma_weights():
    ratios, mask = tensors((2, 5))[0] / 4, torch.ones(2, 5)
    mask[0, 3:] = 0
    w = (ratios * mask).sum(-1, keepdim=True).exp()
    k, rate = torch.tensor([[2.0], [3.0]]), torch.tensor([[3.0], [2.0]])
    found = liger.get_gamma_weights(torch.tensor([0.0, -1.0]), ratios, mask)
    torch.testing.assert_close(found, rate.exp() * w**k * (-rate * w).exp())
    given = torch.tensor([0.0, -1.0]), ratios, mask, torch.tensor([[2.0], [0.5]])
    w = w * given[3]
    torch.testing.assert_close(
        liger.get_gamma_weights(*given), rate.exp() * w**k * (-rate * w).exp()
    )


def test_log_probabilities_of_chosen_tokens():
    logits, ids = tensors((2, 6, V))[0], TARGET[:2].clamp(min=0).repeat(1, 2)
    mask = torch.ones(2, 10)
    mask[0, -2] = 0
    found = liger.fused_selective_log_softmax(logits, ids, 0.7, mask)
    wanted = (logits[:, :-1] / 0.7).log_softmax(-1).gather(-1, ids[:, -5:, None])[..., 0]
    torch.testing.assert_close(found, wanted * mask[:, -5:])
    with pytest.raises(ValueError, match="fused_selective_log_softmax: input_ids must have shape"):
        liger.fused_selective_log_softmax(logits, ids[:, :4])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: liger.LigerFusedLinearCrossEntropyLoss(torch.ones(2), lse_square_scale=1e-4),
            NotImplementedError,
            "lse_square_scale must be 0 with class weights .* got lse_square_scale=0.0001",
        ),
        (
            lambda: liger.LigerFusedLinearDPOLoss()(WEIGHT, X, TARGET),
            ValueError,
            "LigerFusedLinearDPOLoss: ref_input must be given",
        ),
        (
            lambda: liger.LigerFusedLinearORPOLoss()(WEIGHT, X[:3], TARGET[:3]),
            ValueError,
            r"target must have an even batch, .* got target.shape=\(3, 5\)",
        ),
        (
            lambda: liger.LigerFusedLinearKTOLoss()(X, WEIGHT, TARGET),
            ValueError,
            "preference_labels must be given",
        ),
        (
            lambda: functional.dpo_loss(BIAS, BIAS, loss_type="robust", label_smoothing=0.5),
            ValueError,
            "dpo_loss: label_smoothing must be < 0.5 for robust, got label_smoothing=0.5",
        ),
        (
            lambda: functional.dpo_loss(BIAS, BIAS, loss_type="ppo"),
            ValueError,
            "dpo_loss: loss_type must be one of .*, got loss_type='ppo'",
        ),
        (
            lambda: functional.simpo_loss(BIAS, BIAS[:2]),
            ValueError,
            r"simpo_loss: rejected must have shape \(11,\)",
        ),
        (
            lambda: functional.kto_loss(BIAS, BIAS),
            TypeError,
            "kto_loss: preferred must be bool, got preferred.dtype=torch.float32",
        ),
        (
            lambda: functional.sequence_log_prob(BIAS, TARGET),
            ValueError,
            r"sequence_log_prob: target must have shape \(11,\)",
        ),
        (
            lambda: functional.grpo_loss(WEIGHT, BIAS[:3], WEIGHT),
            ValueError,
            r"grpo_loss: advantages must have shape \(11,\)",
        ),
        (
            lambda: functional.grpo_loss(WEIGHT, BIAS, WEIGHT, loss_type="dr_grpo"),
            TypeError,
            "grpo_loss: max_completion_length must be an int >= 1, got max_completion_length=None",
        ),
        (
            lambda: functional.grpo_loss(
                WEIGHT, BIAS, WEIGHT, loss_type="sapo", importance_sampling_level="sequence"
            ),
            ValueError,
            "importance_sampling_level must be .* got importance_sampling_level='sequence'",
        ),
        (
            lambda: functional.grpo_loss(WEIGHT, BIAS, WEIGHT, importance_ratio=BIAS[:2]),
            ValueError,
            r"importance_ratio must have shape .* got importance_ratio.shape=\(2,\), B=11, T=4",
        ),
    ],
)
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("shape", [(6, 1), (6, 6), (5,), (0,), (1, 6)])
def test_kl_of_kto_does_not_enlarge_the_losses(shape):
    log_prob, preferred = torch.zeros(6), torch.ones(6, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"kto_loss: kl must have shape \(\), \(1,\) or \(6,\)"):
        functional.kto_loss(log_prob, preferred, kl=torch.zeros(shape))


def test_kl_of_kto_is_a_number_or_a_tensor():
    log_prob, preferred = torch.zeros(6), torch.ones(6, dtype=torch.bool)
    with pytest.raises(TypeError, match="kto_loss: kl must be a finite number, got kl='x'"):
        functional.kto_loss(log_prob, preferred, kl="x")
    wanted = functional.kto_loss(log_prob, preferred, kl=torch.full((6,), 0.5))
    for kl in (0.5, torch.tensor(0.5), torch.tensor([0.5])):
        assert functional.kto_loss(log_prob, preferred, kl=kl).equal(wanted)


@pytest.mark.parametrize("reduction", ["foo", None])
@pytest.mark.parametrize(
    "name", ["LigerKLDIVLoss", "LigerCrossEntropyLoss", "LigerFusedLinearCrossEntropyLoss"]
)
def test_wrong_reductions_are_refused_when_the_module_is_made(name, reduction):
    with pytest.raises(ValueError, match=f"{name}: reduction must be one of .* got reduction="):
        getattr(liger, name)(reduction=reduction)


def test_wrong_options_of_grpo_are_refused_when_the_module_is_made():
    with pytest.raises(ValueError, match="LigerFusedLinearGRPOLoss: loss_type must be one of"):
        liger.LigerFusedLinearGRPOLoss(loss_type="foo")


def test_wrong_options_of_dpo_are_refused_when_the_module_is_made():
    with pytest.raises(ValueError, match="LigerFusedLinearDPOLoss: loss_type must be one of"):
        liger.LigerFusedLinearDPOLoss(loss_type="dpo")
    with pytest.raises(ValueError, match="label_smoothing must be > 0 and < 1 for exo_pair"):
        liger.LigerFusedLinearDPOLoss(loss_type="exo_pair")
