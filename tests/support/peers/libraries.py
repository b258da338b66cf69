"""Plain torch versions of functions of libraries that need a GPU, from their documentation: the
left sides of docs/migration.md."""

import math
from types import ModuleType

import libraries_fla
import libraries_mamba
import libraries_sparse
import torch


def _attend(q, k, v, logits_of=lambda s: s, seen=None, scale=None, sink=None):
    """O (B, Tq, Hq, D) and lse; `logits_of` the scaled scores, of the pairs in `seen`."""
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], 2) for t in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = logits_of(s)
    if seen is not None:
        s = s.masked_fill(~seen, -torch.inf)
    lse = s.logsumexp(-1)
    if sink is not None:
        lse = torch.logaddexp(lse, sink[:, None])
    p = (s - lse[..., None]).exp().nan_to_num(0.0)
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


# flash-attn


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    attention_chunk=0,  # of version 3
    learnable_sink=None,  # of version 4
):
    tq, tk = q.shape[1], k.shape[1]
    i, j = torch.arange(tq)[:, None] + tk - tq, torch.arange(tk)
    left, right = window_size
    right = 0 if causal else right
    seen = torch.ones(tq, tk, dtype=torch.bool)
    seen &= (j >= i - left) | (left < 0)
    seen &= (j <= i + right) | (right < 0)
    if attention_chunk:
        seen &= i // attention_chunk == j // attention_chunk

    def logits(s):
        s = softcap * torch.tanh(s / softcap) if softcap else s
        if alibi_slopes is not None:
            s = s - alibi_slopes[..., None, None] * (i - j).abs()
        return s

    out, lse = _attend(q, k, v, logits, seen, softmax_scale, learnable_sink)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_qkvpacked_func(qkv, **options):
    return flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], **options)


def flash_attn_kvpacked_func(q, kv, **options):
    return flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], **options)


def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, **options):
    parts = []
    for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        parts.append(flash_attn_func(q[None, a:b], k[None, c:d], v[None, c:d], **options)[0])
    return torch.cat(parts)


def flash_attn_varlen_qkvpacked_func(qkv, cu, longest, **options):
    q, k, v = qkv[:, 0], qkv[:, 1], qkv[:, 2]
    return flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, **options)


def flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, max_q, max_k, **options):
    return flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], cu_q, cu_k, max_q, max_k, **options)


def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False):
    """torch.nn.attention.varlen, on GPUs alone."""
    return flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, window_size=window_size)


def apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0):
    offsets = torch.as_tensor(seqlen_offsets).reshape(-1, 1).expand(len(x), 1)
    rows = offsets + torch.arange(x.shape[1])
    cos, sin = cos[rows][:, :, None], sin[rows][:, :, None]
    dim = 2 * cos.shape[-1]
    turned, rest = x[..., :dim], x[..., dim:]
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    return torch.cat([turned, rest], -1)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    block_table=None,
    causal=False,
    window_size=(-1, -1),
    rotary_interleaved=True,
):
    """The rotary part for causal and local attention, where queries have positions too."""
    out = []
    if rotary_cos is not None:
        tables = (rotary_cos, rotary_sin, rotary_interleaved)
        q, k = (apply_rotary_emb(t, *tables, seqlen_offsets=cache_seqlens) for t in (q, k))
    for b, n in enumerate(cache_seqlens.tolist()):
        if block_table is None:
            keys, values = k_cache[b], v_cache[b]
        else:
            keys, values = (t[block_table[b].long()].flatten(0, 1) for t in (k_cache, v_cache))
        if k is not None:
            end = n + k.shape[1]
            keys[n:end], values[n:end] = k[b], v[b]
            n = end
        options = {"causal": causal, "window_size": window_size}
        out.append(flash_attn_func(q[b : b + 1], keys[None, :n], values[None, :n], **options))
    return torch.cat(out)


def cross_entropy_loss(logits, labels, label_smoothing=0.0, lse_square_scale=0.0):
    """flash_attn.ops.triton.cross_entropy: losses and z-losses (N,)."""
    logp, z = logits.log_softmax(-1), lse_square_scale * logits.logsumexp(-1) ** 2
    picked = logp.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    losses = -(1 - label_smoothing) * picked - label_smoothing * logp.mean(-1) + z
    return losses.masked_fill(labels < 0, 0), z.masked_fill(labels < 0, 0)


# xformers


class LowerTriangularMask:
    shift = False

    def __init__(self, window=None):
        self.window = window

    def make_local_attention(self, window_size):
        return type(self)(window_size)

    def seen(self, tq, tk):
        i, j = torch.arange(tq)[:, None] + (tk - tq) * self.shift, torch.arange(tk)
        seen = j <= i
        return seen if self.window is None else seen & (j > i - self.window)


class LowerTriangularFromBottomRightMask(LowerTriangularMask):
    shift = True


class LocalAttentionFromBottomRightMask:
    def __init__(self, window_left, window_right):
        self.window = window_left, window_right

    def seen(self, tq, tk):
        i, j = torch.arange(tq)[:, None] + tk - tq, torch.arange(tk)
        return (i - self.window[0] <= j) & (j <= i + self.window[1])


class BlockDiagonalMask:
    block = None

    def __init__(self, q_seqlen, kv_seqlen):
        self.lengths = q_seqlen, kv_seqlen

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen=None):
        return cls(q_seqlen, q_seqlen if kv_seqlen is None else kv_seqlen)

    def make_causal(self):
        return BlockDiagonalCausalMask(*self.lengths)

    def make_causal_from_bottomright(self):
        return BlockDiagonalCausalFromBottomRightMask(*self.lengths)

    def seen(self, tq, tk):
        full = [(q, k) for q, k in zip(*self.lengths, strict=True)]
        blocks = [self.block().seen(*s) if self.block else torch.ones(s).bool() for s in full]
        return torch.block_diag(*blocks).bool()


class BlockDiagonalCausalMask(BlockDiagonalMask):
    block = LowerTriangularMask


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    block = LowerTriangularFromBottomRightMask


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None):
    if query.dim() == 5:  # (B, M, G, H, K)
        parts = (t.flatten(2, 3) for t in (query, key, value))
        return memory_efficient_attention(*parts, attn_bias, p, scale).view(query.shape)
    if isinstance(attn_bias, torch.Tensor):
        return _attend(query, key, value, lambda s: s + attn_bias, scale=scale)[0]
    seen = None if attn_bias is None else attn_bias.seen(query.shape[1], key.shape[1])
    return _attend(query, key, value, seen=seen, scale=scale)[0]


# x-transformers


class Attend:
    def __init__(self, *, causal=False):
        self.causal = causal

    def __call__(self, q, k, v):
        """(B, H, T, D); output and intermediates."""
        k, v = (t.repeat(1, q.shape[1] // k.shape[1], 1, 1) for t in (k, v))
        tq, tk = q.shape[2], k.shape[2]
        seen = torch.ones(tq, tk).tril(tk - tq if self.causal else tk).bool()
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return _attend(q, k, v, seen=seen)[0].transpose(1, 2), None


# Liger


def liger_rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    return libraries_fla.normalised(X, W + offset, None, None, eps, False, True)


def liger_fused_add_rms_norm(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    return libraries_fla.normalised(X, W + offset, None, R, eps, True, True)


def liger_layer_norm(X, W, B, eps):
    return libraries_fla.normalised(X, W, B, None, eps, False, False)


def liger_swiglu(a, b):
    return a * a.sigmoid() * b


def liger_geglu(a, b):
    return 0.5 * a * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (a + 0.044715 * a**3))) * b


def liger_rope(q, k, cos, sin):
    def turn(x):
        a, b = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]

    return turn(q), turn(k)


def liger_cross_entropy(
    input,
    target,
    ignore_index=-100,
    label_smoothing=0.0,
    lse_square_scale=0.0,
    reduction="mean",
    softcap=None,
    weight=None,
):
    kept = target != ignore_index
    if weight is not None:
        log_p = input[kept].log_softmax(-1).gather(-1, target[kept][:, None])[:, 0]
        return -(weight[target[kept]] * log_p).sum() / weight[target[kept]].sum()
    if softcap is not None:
        input = softcap * torch.tanh(input / softcap)
    losses, _ = cross_entropy_loss(
        input, target.masked_fill(~kept, -1), label_smoothing, lse_square_scale
    )
    return losses.sum() / (kept.sum() if reduction == "mean" else 1)


def liger_fused_linear_cross_entropy(input, weight, target, bias=None, **options):
    logits = torch.nn.functional.linear(input, weight, bias)
    return liger_cross_entropy(logits, target, **options)


def liger_jsd(input, target, shift_labels=None, beta=0.5, ignore_index=-100):
    mixture = torch.logaddexp(target + math.log(beta), input + math.log(1 - beta))
    teacher, student = ((p.exp() * (p - mixture)).sum() for p in (target, input))
    return (beta * teacher + (1 - beta) * student) / len(input)


def liger_fused_linear_jsd(student_input, student_weight, teacher_input, teacher_weight, **options):
    temperature = options.pop("temperature", 1.0)
    pairs = ((student_input, student_weight), (teacher_input, teacher_weight))
    log_q, log_p = ((x @ w.T / temperature).log_softmax(-1) for x, w in pairs)
    return liger_jsd(log_q, log_p, **options)


#: By the name under which the page calls them.
NAMES = {
    name: f
    for name, f in {
        **vars(libraries_fla),
        **vars(libraries_mamba),
        **vars(libraries_sparse),
        **globals(),
    }.items()
    if not name.startswith("_") and not isinstance(f, ModuleType)
} | {"fla": libraries_fla.FLA}
