"""The layers and functions of Liger-Kernel, as its tests call them, by ours."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from omniattn import functional as F
from omniattn.compat import liger


def _casting(casting_mode: str) -> str:
    if casting_mode == "none":
        pytest.skip("casting_mode none has no counterpart")
    return "llama" if casting_mode == "llama" else "fp32"


class LigerRMSNorm(nn.Module):
    def __init__(
        self,
        hidden_size,
        eps=1e-6,
        offset=0.0,
        casting_mode="llama",
        init_fn="ones",
        in_place=True,
        row_mode=None,
        elementwise_affine=True,
    ):
        super().__init__()
        self.weight = (
            nn.Parameter(getattr(torch, init_fn)(hidden_size)) if elementwise_affine else None
        )
        self.options = {"eps": eps, "offset": offset if elementwise_affine else 0.0}
        self.options["casting"] = _casting(casting_mode)

    def forward(self, hidden_states):
        return F.rms_norm(hidden_states, self.weight, **self.options)


class LigerFusedAddRMSNorm(LigerRMSNorm):
    def forward(self, hidden_states, residual):
        return F.rms_norm(hidden_states, self.weight, residual=residual, **self.options)


def liger_rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    return F.rms_norm(X, W, eps=eps, offset=offset, casting=_casting(casting_mode))


class LigerLayerNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6, bias=False, init_fn="ones"):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(getattr(torch, init_fn)(hidden_size))
        self.bias = nn.Parameter(torch.randn(hidden_size) if bias else torch.zeros(hidden_size))

    def forward(self, hidden_states):
        return F.layer_norm(hidden_states, self.weight, self.bias, eps=self.eps)


def liger_layer_norm(X, W, B, eps):
    return F.layer_norm(X, W, B, eps=eps)


def liger_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    half = cos.shape[-1] // 2
    cos, sin = (t[..., :half] for t in (cos, sin))
    cos, sin = (t[0] if t.dim() == 3 and len(t) == 1 else t for t in (cos, sin))
    rotated = F.apply_rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return tuple(t.transpose(1, 2) for t in rotated)


def liger_multimodal_rotary_pos_emb(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    axes = F.mrope_axes(mrope_section)
    picked = (torch.stack([t[a, ..., i] for i, a in enumerate(axes)], -1) for t in (cos, sin))
    return liger_rotary_pos_emb(q, k, *(torch.cat([t, t], -1) for t in picked))


class _GLU(nn.Module):
    """A gated MLP with the weights under the names of the peer."""

    activation, names = "silu", ("gate_proj", "up_proj", "down_proj")

    def __init__(self, config, **_):
        super().__init__()
        sizes = config.hidden_size, config.intermediate_size
        if config.hidden_act not in ("silu", "swish") and self.activation == "silu":
            raise ValueError(f"Activation function {config.hidden_act} not supported.")
        for name, down in zip(self.names, (False, False, True), strict=True):
            n_in, n_out = reversed(sizes) if down else sizes
            setattr(self, name, nn.Linear(n_in, n_out, bias=False))

    def forward(self, x):
        weights = (getattr(self, name).weight for name in self.names)
        return F.glu_mlp(x, *weights, activation=self.activation)


class LigerGEGLUMLP(_GLU):
    activation = "gelu_tanh"


class LigerBlockSparseTop2MLP(_GLU):
    names = ("w1", "w3", "w2")


class LigerPhi3SwiGLUMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return F.glu_mlp(x, *self.gate_up_proj.weight.chunk(2), self.down_proj.weight)


class LigerExperts(nn.Module):
    def __init__(self, config):
        super().__init__()
        count = config.num_local_experts
        sizes = config.intermediate_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * sizes[0], sizes[1]))
        self.down_proj = nn.Parameter(torch.empty(count, sizes[1], sizes[0]))

    def forward(self, x, top_k_index, top_k_weights):
        rows = x.reshape(-1, x.shape[-1])
        weights = top_k_weights.to(rows.dtype).view(len(rows), -1)
        experts = top_k_index.view(len(rows), -1)
        return F.moe_experts(rows, experts, weights, self.gate_up_proj, self.down_proj).view_as(x)


class LigerReLUSquared(nn.Module):
    def forward(self, x):
        return F.reglu(x, x)  # relu(x) x = relu(x)^2


def liger_swiglu(a, b, gate_multiplier=1.0, down_multiplier=1.0):
    return F.swiglu(a * gate_multiplier, b) * down_multiplier


def liger_geglu(a, b):
    return F.geglu(a, b, approximate="tanh")


def liger_cross_entropy(input, target, weight=None, size_average=None, reduce=None, **options):
    return liger.LigerCrossEntropyLoss(weight, **options)(input, target)


def liger_fused_linear_cross_entropy(input, weight, target, bias=None, ce_weight=None, **options):
    loss = liger.LigerFusedLinearCrossEntropyLoss(ce_weight, **options)
    return loss(weight, input, target, bias)


def liger_jsd(input, target, shift_labels=None, beta=0.5, ignore_index=-100):
    return liger.LigerJSD(beta, ignore_index)(input, target, shift_labels)


def liger_fused_linear_jsd(
    student_input,
    student_weight,
    teacher_input,
    teacher_weight,
    shift_labels=None,
    *rest,
    **options,
):
    if rest:
        pytest.skip("the function of liger_kernel.chunked_loss has no counterpart")
    loss = liger.LigerFusedLinearJSD(**options)
    return loss(student_input, student_weight, teacher_input, teacher_weight, shift_labels)


def liger_relu_squared(x):
    return F.reglu(x, x)


def transformers_version_dispatch(_, before, after, before_args=(), after_args=(), **options):
    given = options.get("after_kwargs") or {}
    return after(*after_args, **{k: v for k, v in given.items() if k != "device"})


NAMES = {
    "CrossEntropyOutput": liger.CrossEntropyOutput,
    "infer_device": lambda: "cpu",
    "infer_comm_backend": lambda: "gloo",
    "transformers_version_dispatch": transformers_version_dispatch,
    **{n: v for n, v in vars(liger).items() if n.startswith("Liger")},
    **{n: v for n, v in globals().items() if n.lower().startswith("liger")},
    "LigerSwiGLUMLP": _GLU,
    "LigerMLP": _GLU,
    "liger_rope": liger_rotary_pos_emb,
    # Functions that tests compare with another form of the same.
    "LigerRMSNormFunction": SimpleNamespace(apply=liger_rms_norm),
    "LigerLayerNormFunction": SimpleNamespace(apply=liger_layer_norm),
    "LigerRopeFunction": SimpleNamespace(apply=liger_rotary_pos_emb),
    "LigerSiLUMulFunction": SimpleNamespace(apply=liger_swiglu),
    "LigerGELUMulFunction": SimpleNamespace(apply=liger_geglu),
}
