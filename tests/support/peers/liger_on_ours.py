"""Names of Liger-Kernel that its tests import and `omniattn.compat.liger` does not have."""

from types import SimpleNamespace

from omniattn.compat import liger


def transformers_version_dispatch(_, before, after, before_args=(), after_args=(), **options):
    given = options.get("after_kwargs") or {}
    return after(*after_args, **{k: v for k, v in given.items() if k != "device"})


def swiglu(a, b, gate_multiplier=1.0, down_multiplier=1.0):
    return liger.liger_swiglu(a * gate_multiplier, b) * down_multiplier


#: Autograd functions with the arguments of ours.
FUNCTIONS = {
    "LigerAttnResFunction": liger.liger_attn_res,
    "LigerDyTFunction": liger.liger_dyt,
    "LigerFusedAddRMSNormFunction": liger.liger_fused_add_rms_norm,
    "LigerFusedLinearCPOFunction": liger.liger_fused_linear_cpo,
    "LigerFusedLinearCosineSimilarityFunction": liger.liger_fused_linear_cosine,
    "LigerFusedLinearDPOFunction": liger.liger_fused_linear_dpo,
    "LigerFusedLinearJSDFunction": liger.liger_fused_linear_jsd,
    "LigerFusedLinearKTOFunction": liger.liger_fused_linear_kto,
    "LigerFusedLinearORPOFunction": liger.liger_fused_linear_orpo,
    "LigerFusedLinearSimPOFunction": liger.liger_fused_linear_simpo,
    "LigerGELUMulFunction": liger.liger_geglu,
    "LigerJSDFunction": liger.liger_jsd,
    "LigerLayerNormFunction": liger.liger_layer_norm,
    "LigerLlama4RopeFunction": liger.liger_llama4_text_rotary_pos_emb,
    "LigerModulatedRMSNormFunction": liger.liger_modulated_rms_norm,
    "LigerPolyNormFunction": liger.liger_poly_norm,
    "LigerRMSNormFunction": liger.liger_rms_norm,
    "LigerReLUSquaredFunction": liger.liger_relu_squared,
    "LigerRopeFunction": liger.liger_rope,
    "LigerSiLUMulFunction": swiglu,
    "liger_kernel.chunked_loss.jsd_loss.LigerFusedLinearJSDFunction": (
        liger.chunked_liger_fused_linear_jsd
    ),
}
NAMES = {
    "infer_device": lambda: "cpu",
    "infer_comm_backend": lambda: "gloo",
    "transformers_version_dispatch": transformers_version_dispatch,
    **{name: SimpleNamespace(apply=f) for name, f in FUNCTIONS.items()},
}
