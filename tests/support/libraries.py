"""What functions of libraries that need a GPU compute, in plain torch, from their documentation:
the left sides of docs/migration.md."""

import math
from types import SimpleNamespace

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


# fla, mamba-ssm


def _norm(x, weight, bias, residual, eps, prenorm, rms, groups=1):
    h = x if residual is None else x + residual
    parts = h.unflatten(-1, (groups, -1))
    parts = parts if rms else parts - parts.mean(-1, keepdim=True)
    y = (parts * (parts.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(-2) * weight
    y = y if bias is None else y + bias
    return (y, h) if prenorm else y


def _state_of(q, k, v, g=None, beta=None, scale=None, initial_state=None):
    """o_t = scale S_t^T q_t of S_t = e^g_t S_{t-1} + k_t u_t^T; u = v, or the delta rule's."""
    b, steps, h, d = k.shape
    s = torch.zeros(b, h, d, v.shape[-1]) if initial_state is None else initial_state
    out = []
    for t in range(steps):
        s = s if g is None else s * g[:, t].reshape(b, h, -1, 1).exp()
        u = v[:, t]
        if beta is not None:
            u = beta[:, t, :, None] * (u - (k[:, t, :, None] @ s)[:, :, 0])
        s = s + k[:, t, :, :, None] * u[:, :, None]
        out.append((q[:, t, :, None] @ s)[:, :, 0] * (d**-0.5 if scale is None else scale))
    return torch.stack(out, 1), s


def _fla(forget, delta):
    """A function of fla with its order of arguments: q, k, v, then g and beta where it has them."""

    def run(
        q,
        k,
        v,
        *gates,
        scale=None,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
    ):
        if use_qk_l2norm_in_kernel:
            q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        gates = list(gates)
        g = forget(gates.pop(0) if forget is _given else k)
        o, s = _state_of(q, k, v, g, gates[0] if delta else None, scale, initial_state)
        return o, s if output_final_state else None

    return run


def fla_rwkv6(r, k, v, w, u, scale=None):
    o, s = [], torch.zeros(*v.shape[:1], *k.shape[2:], v.shape[-1])
    for x, key, value, decay in zip(*(t.unbind(1) for t in (r, k, v, w)), strict=True):
        now = key[..., None] * value[..., None, :]
        o.append(torch.einsum("bhk,bhkv->bhv", x, s + u[..., None] * now))
        s = decay.exp()[..., None] * s + now
    return torch.stack(o, 1) * (r.shape[-1] ** -0.5 if scale is None else scale), s


def fla_dplr(q, k, v, a, b, gk, scale=None):
    o, s = [], torch.zeros(*v.shape[:1], *k.shape[2:], v.shape[-1])
    for x, key, value, ask, tell, g in zip(
        *(t.unbind(1) for t in (q, k, v, a, b, gk)), strict=True
    ):
        told = tell[..., None] * (ask[..., None] * s).sum(-2, keepdim=True)
        s = g.exp()[..., None] * s + told + key[..., None] * value[..., None, :]
        o.append(torch.einsum("bhk,bhkv->bhv", x, s))
    return torch.stack(o, 1) * (q.shape[-1] ** -0.5 if scale is None else scale), s


def _given(g):
    return g


def _retained(k):
    heads = torch.arange(k.shape[2])
    return (1 - 2.0 ** (-5 - heads)).log().expand(k.shape[:3])


def _rwkv4(w, u, k, v, state):
    num, den, top = state[:, :, 0].unbind(1)
    out = []
    for kt, vt in zip(k.unbind(1), v.unbind(1), strict=True):
        weights = torch.stack((top, u + kt)).softmax(0)  # of the sums so far, which den has, and vt
        out.append((weights[0] * num + weights[1] * vt) / (weights[0] * den + weights[1]))
        new = torch.maximum(top - w.exp(), kt)
        past, now = (top - w.exp() - new).exp(), (kt - new).exp()
        num, den, top = past * num + now * vt, past * den + now, new
    return torch.stack(out, 1), torch.stack((num, den, top), 1)[:, :, None]


def mlstm_chunkwise__xl_chunk(q, k, v, i, f, eps=1e-6):
    """(B, H, T, D) and (B, H, T), in the parallel form."""
    total = torch.nn.functional.logsigmoid(f).cumsum(-1)
    log_weight = total[..., None] - total[..., None, :] + i[..., None, :]
    seen = torch.ones(q.shape[2], q.shape[2]).tril().bool()
    log_weight = log_weight.masked_fill(~seen, -torch.inf)
    m = torch.maximum(log_weight.amax(-1), total)[..., None]
    weight = q @ k.mT * q.shape[-1] ** -0.5 * (log_weight - m).exp()
    return weight @ v / (torch.maximum(weight.sum(-1, keepdim=True).abs(), (-m).exp()) + eps)


def fla_rms_norm(x, weight, bias, residual=None, eps=1e-5, prenorm=False):
    return _norm(x, weight, bias, residual, eps, prenorm, True)


def fla_layer_norm(x, weight, bias, residual=None, eps=1e-5, prenorm=False):
    return _norm(x, weight, bias, residual, eps, prenorm, False)


def fla_group_norm(x, weight, bias, eps=1e-5, is_rms_norm=False, num_groups=1):
    return _norm(x, weight, bias, None, eps, False, is_rms_norm, num_groups)


def fla_rms_norm_gated(x, g, weight, bias, activation="swish", eps=1e-6):
    gate = g.sigmoid() if activation == "sigmoid" else g * g.sigmoid()
    return _norm(x, weight, bias, None, eps, False, True) * gate


def rms_norm_fn(x, weight, bias, residual=None, eps=1e-6, prenorm=False):
    return _norm(x, weight, bias, residual, eps, prenorm, True)


def layer_norm_fn(x, weight, bias, residual=None, eps=1e-6, prenorm=False):
    return _norm(x, weight, bias, residual, eps, prenorm, False)


def rmsnorm_fn(x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True):
    groups = 1 if group_size is None else x.shape[-1] // group_size
    x = x if norm_before_gate else x * z * z.sigmoid()
    y = _norm(x, weight, bias, None, eps, False, True, groups)
    return y * z * z.sigmoid() if norm_before_gate else y


# Liger


def liger_rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    return _norm(X, W + offset, None, None, eps, False, True)


def liger_fused_add_rms_norm(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    return _norm(X, W + offset, None, R, eps, True, True)


def liger_layer_norm(X, W, B, eps):
    return _norm(X, W, B, None, eps, False, False)


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
NAMES = {name: f for name, f in globals().items() if not name.startswith("_")} | {
    "fla": SimpleNamespace(
        rms_norm=fla_rms_norm,
        layer_norm=fla_layer_norm,
        group_norm=fla_group_norm,
        rms_norm_gated=fla_rms_norm_gated,
        chunk_gla=_fla(_given, False),
        chunk_retention=_fla(_retained, False),
        chunk_delta_rule=_fla(lambda k: None, True),
        chunk_gated_delta_rule=_fla(_given, True),
        chunk_kda=_fla(_given, True),
        chunk_rwkv6=fla_rwkv6,
        chunk_rwkv7=lambda r, w, k, v, a, b: fla_dplr(r, k, v, a, b, w, scale=1.0),
        chunk_dplr_delta_rule=fla_dplr,
        fused_recurrent_rwkv4=_rwkv4,
    )
}
