"""A small model of every type that transformers has, with inputs for it."""

from __future__ import annotations

import inspect
import re
from typing import Any

import small_inputs
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import configuration_auto, modeling_auto

VOCABULARY = 99
#: Fields of a config by a pattern of their whole name, with what becomes of the default.
_FIELDS: tuple[tuple[str, Any], ...] = (
    (r".*vocab_size|num_vocabs?", VOCABULARY),
    (r".*_token_id|.*_token_index", lambda x: min(x, VOCABULARY - 3)),
    (r".*head_dim|d_kv|.*_head_size", 16),
    (r"(num|n)_.*key_value_heads|num_kv_heads", 2),
    (r"(.*_)?(num|n)_.*heads?|.*(attention|decoder|encoder)_heads|num_heads|n_head", 4),
    (
        r"(?!.*feat_extract)((.*_)?(num|n)_(.*_)?(layers?|blocks)|.*_layers|depth)",
        lambda x: min(x, 2),
    ),
    (r".*intermediate_(size|dim)|.*ffn_(hidden_)?(size|dim)|d_ff|d_inner|n_inner|mlp_dim", 48),
    (r"(.*_)?hidden_(size|dim)|d_model|d_latents|n_embd|(.*_)?emb(ed)?_dim|dim|embedding_size", 64),
    (r".*projection_(dim|size)|.*proj_dim|.*out_hidden_size", 64),
    (r"rotary_dim", lambda x: min(x, 8)),
    (r"(q|kv|o)_lora_rank", 16),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts", 4),
    (r".*experts_per_tok(en)?|.*topk|.*top_k|moe_k|n_group|num_expert_group", lambda x: min(x, 2)),
    (r"topk_group", 1),
    (r"sliding_window", 5),
    (r"attention_window", 6),
    (r"num_frames", 4),
    (r"image_size|img_size", 32),
    (r"patch_size", 8),
    (r"(.*_)?max_(position_embeddings|.*positions)|n_positions", lambda x: min(x, 128)),
)


def _size(name: str, value: Any) -> Any:
    for pattern, small in _FIELDS:
        if re.fullmatch(pattern, name):
            return small(value) if callable(small) else small
    return value


def _of_all_layers(config: PreTrainedConfig, name: str) -> Any:
    """A field, None where the config has none or layers differ, for which it raises."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


def _stages(backbone: PreTrainedConfig) -> dict[str, Any]:
    """Returns the backbone's output stages, if its small config has them too."""
    stages = getattr(backbone, "out_features", None)
    known = getattr(small_config(type(backbone)), "stage_names", ()) if stages else ()
    return {"out_features": stages} if stages and set(stages) <= set(known) else {}


def small_config(kind: type[PreTrainedConfig], **given: Any) -> PreTrainedConfig:
    """A config with few and small layers; `given` overrides what the patterns choose."""
    default = kind()
    changes: dict[str, Any] = {}
    for name, value in vars(default).items():
        if isinstance(value, PreTrainedConfig):
            part = dict(given.pop(name, {}))
            if "model_type" in part:
                kind_of_part = configuration_auto.CONFIG_MAPPING[part.pop("model_type")]
            else:
                kind_of_part, part = type(value), {**_stages(value), **part}
            changes[name] = small_config(kind_of_part, **part)
        elif type(value) is int and value > 0 and not name.startswith("_"):
            if (small := _size(name, value)) != value:
                changes[name] = small
        elif name in ("layer_types", "mlp_layer_types", "block_types") and value:
            changes[name] = [value[0], next((x for x in value if x != value[0]), value[0])]
        elif name == "rope_parameters" and value and "mrope_section" in value:
            half = int(8 * value.get("partial_rotary_factor", 1))
            section = [half // 4, half // 4, half - 2 * (half // 4)]
            changes[name] = {**value, "mrope_section": section}
    heads = _of_all_layers(default, "num_attention_heads")
    if _of_all_layers(default, "num_key_value_heads") == heads and heads is not None:
        changes["num_key_value_heads"] = 4
    if hasattr(default, "qk_rope_head_dim"):
        changes.pop("head_dim", None)  # follows
    return kind(**{**changes, **given})


#: Tasks in order of preference: a type is tried as the first of these that it has a class for.
_TASKS = (
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "MASKED_LM",
    "CTC",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "OBJECT_DETECTION",
    "SEMANTIC_SEGMENTATION",
    "TOKEN_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION",
)


def class_name(model_type: str) -> str | None:
    """The class that stands for a type of model, None if it has none of its own."""
    names = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in _TASKS]
    for mapping in (*names, modeling_auto.MODEL_MAPPING_NAMES):
        if model_type in mapping:
            name = mapping[model_type]
            return name if isinstance(name, str) else name[0]
    return None


def model_types() -> list[str]:
    """All types that have a class. Imports none of them."""
    return sorted(t for t in configuration_auto.CONFIG_MAPPING_NAMES if class_name(t) is not None)


def _mrope(*section: int) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": sum(section) / 8}
    return {"rope_parameters": {**rope, "mrope_section": list(section)}}


_ONE_OF_TWO = {"attn_layer_indices": [1]}
# The hybrid layers share one attention, which is twice as wide as the model.
_ZAMBA = {"num_hidden_layers": 3, "layer_types": ["mamba", "hybrid", "hybrid"]}
_ZAMBA |= {"attention_hidden_size": 128, "attention_head_dim": 32}
_SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 24, "window_size": 4}
_SWIN |= {"depths": [2, 2], "num_heads": [3, 6]}
_MIMI = {"upsample_groups": 64, "num_filters": 4}
_SERIES = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2]}
_SPARK = {"patch_sizes": (4, 2), "hidden_sizes": (16, 32), "depths": (1, 1)}
_QWEN4 = {"layer_types": ["linear_attention", "indexed_attention"], "indexer_compress_ratio": 2}
_QWEN4 |= {"indexer_budget": 8, "indexer_head_dim": 16, "indexer_n_heads": 2, "indexer_kv_heads": 1}
_BACKBONE = {"backbone_config": {"embed_dim": 24, "window_size": 4, "depths": (2, 2, 2, 2)}}
_RESNET = {"model_type": "resnet", "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}
_DETR = {"backbone_config": {**_RESNET, "out_features": ["stage4"]}, "num_queries": 8}
_DEFORMABLE = {"backbone_config": {**_RESNET, "out_features": ["stage2", "stage3", "stage4"]}}
_DEFORMABLE |= {"num_queries": 8}
_SAM = {"prompt_encoder_config": {"hidden_size": 64, "image_size": 32, "patch_size": 8}}
_SAM |= {"vision_config": {"output_channels": 64, "num_pos_feats": 32}}
_QUERIES = {"num_queries": 8, "decoder_in_channels": [64, 64, 64]}
_RT_DETR = {"backbone_config": {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}}
_RT_DETR |= {"encoder_in_channels": [16, 32, 32], **_QUERIES}
_HGNET = {"stem_channels": [3, 8, 8], "stage_in_channels": [8, 16, 16, 16]}
_HGNET |= {"stage_mid_channels": [8] * 4, "stage_out_channels": [16] * 4, "hidden_sizes": [16] * 4}
_FINE = {"backbone_config": _HGNET, "encoder_in_channels": [16, 16, 16], **_QUERIES}
_THIN = {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128}
#: Settings that the patterns do not get right, by type.
_GIVEN: dict[str, dict[str, Any]] = {
    # The states of xLSTMModel have the sizes of its layers where those are multiples of 64.
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "bamba": _ONE_OF_TWO,
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "zamba": _ZAMBA | {"n_mamba_heads": 2},
    "zamba2": _ZAMBA
    | {"hybrid_layer_ids": [1, 2], "num_mem_blocks": 1, "mamba_ngroups": 2, "n_mamba_heads": 8},
    "donut-swin": _SWIN,
    "swin": _SWIN,
    "swinv2": _SWIN,
    "vits": {"upsample_initial_channel": 32},
    "yolos": {"image_size": [64, 96]},
    "qwen2_vl": {"text_config": _mrope(2, 2, 4)},
    "qwen2_vl_text": _mrope(2, 2, 4),
    "qwen2_5_vl": {"text_config": _mrope(2, 2, 4)},
    "qwen2_5_vl_text": _mrope(2, 2, 4),
    "paddleocr_vl": {"text_config": _mrope(2, 2, 4)},
    "dots3_note_text": {"num_key_value_heads": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "glm46v": {"text_config": _mrope(2, 2, 4)},
    "glm4v": {"text_config": _mrope(2, 2, 4)},
    "glm4v_moe": {"text_config": _mrope(1, 1, 2)},
    "glm4v_moe_text": _mrope(1, 1, 2),
    "glm4v_text": _mrope(2, 2, 4),
    "glm5_next": {"text_config": {"index_topk": 16}},
    "glm5_next_text": {"index_topk": 16},
    "glm_image": {"text_config": _mrope(2, 2, 4)},
    "glm_image_text": _mrope(2, 2, 4),
    "glm_ocr": {"text_config": _mrope(2, 2, 4)},
    "glm_ocr_text": _mrope(2, 2, 4),
    "glmga": {"text_config": _mrope(2, 2, 4)},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "perceiver": {"num_self_attends_per_block": 2, "num_latents": 8},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "dpt": {
        "backbone_out_indices": [0, 1],
        "neck_hidden_sizes": [16, 32],
        "reassemble_factors": [4, 2],
    },
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16},
    "lilt": {"hidden_size": 48},
    "longcat_flash": {"qk_rope_head_dim": 16, "qk_head_dim": 32, "head_dim": 16},
    "mobilebert": {
        "num_feedforward_networks": 2,
        "true_hidden_size": 32,
        "embedding_size": 32,
        "intra_bottleneck_size": 32,
    },
    "poolformer": {"num_encoder_blocks": 4},
    "pvt": {"num_encoder_blocks": 4},
    "step3p7": {"text_config": {"sliding_window": 5}},
    "xmod": {"default_language": "en_XX"},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "align": {"projection_dim": 32, "vision_config": _THIN},
    "csm": {"codec_config": _MIMI},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 0},
    "efficientnet": _THIN,
    "dinov3_vit": {"hidden_size": 64},
    "levit": {"image_size": 224, "patch_size": 16},
    "maskformer-swin": _SWIN,
    "swin2sr": {**_SWIN, "patch_size": 1},
    "mimi": _MIMI,
    "mimi_encoder": _MIMI,
    "pocket_tts_audio_tokenizer": _MIMI,
    "pocket_tts_audio_tokenizer_encoder": _MIMI,
    "kyutai_speech_to_text": {"codec_config": _MIMI},
    "wav2vec2-bert": {"vocab_size": VOCABULARY},
    "wav2vec2-conformer": {"vocab_size": VOCABULARY},
    "wavtokenizer": {"codebook_dim": 64},
    "wavtokenizer_encoder": {"codebook_dim": 64},
    "time_series_transformer": _SERIES,
    "gradium_phonon_tts": {"flow_head_config": {"condition_dim": 64}},
    "pocket_tts": {"flow_head_config": {"condition_dim": 64}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "muse_spark_audio": _SPARK,
    "muse_spark": {"audio_config": _SPARK},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2]}},
    "qwen4_exp_text": _QWEN4,
    "qwen4_exp": {"text_config": _QWEN4},
    "sam": _SAM,
    "sam_hq": _SAM,
    "maskformer": _BACKBONE,
    "mask2former": _BACKBONE,
    "grounding-dino": {**_BACKBONE, "num_queries": 2},
    "mm-grounding-dino": {**_BACKBONE, "num_queries": 2},
    "conditional_detr": _DETR,
    "detr": _DETR,
    "dab-detr": _DETR,
    "table-transformer": _DETR,
    "deformable_detr": _DEFORMABLE,
    "rt_detr": _RT_DETR,
    "rt_detr_v2": _RT_DETR,
    "d_fine": _FINE,
    "deimv2": _FINE,
    "rf_detr": {"num_queries": 4},
    "chameleon": {"vocabulary_map": {"<image>": 5, "IMGIMGA": 6}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "seggpt": {"image_size": [64, 32]},
    "convnext": {"image_size": 64, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]},
    "convnextv2": {"image_size": 64, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]},
    "mobilevitv2": {"image_size": 256, "patch_size": 2},
    "kosmos-2": {"latent_query_num": 4},
    "blip-2": {"num_query_tokens": 4, "image_token_index": 7},
    "instructblip": {"num_query_tokens": 4, "image_token_index": 7},
    "instructblipvideo": {"num_query_tokens": 4, "video_token_index": 7},
    "hunyuan_vl": {"text_config": {"head_dim": 16, **_mrope(2, 2, 4)}},
    "hunyuan_vl_text": {"head_dim": 16, **_mrope(2, 2, 4)},
    "upernet": {
        "backbone_config": {**_RESNET, "out_features": [f"stage{n}" for n in (1, 2, 3, 4)]}
    },
    "paligemma": {"image_token_index": 7, "vision_config": {"patch_size": 16}},
    "vjepa2": {"crop_size": 32, "frames_per_clip": 4},
}


def make(model_type: str) -> PreTrainedModel:
    """A model with random weights, so large that no attention is uniform."""
    torch.manual_seed(0)
    config = small_config(
        configuration_auto.CONFIG_MAPPING[model_type], **_GIVEN.get(model_type, {})
    )
    kind: Any = getattr(transformers, class_name(model_type))
    if not isinstance(config, kind.config_class):
        config = config.get_text_config(decoder=True)
    config._attn_implementation = "eager"
    model = kind(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() >= 2 and p.numel() > 0:
                nn.init.normal_(p, std=min(1.0, 1.5 * p[0].numel() ** -0.5))
            elif p.is_floating_point():
                p.add_(torch.randn_like(p), alpha=0.1)
    return model


LENGTH = 13


def _spectrogram(model: PreTrainedModel, generator: torch.Generator) -> Tensor:
    """(B, bins, T) for models that begin with a convolution over T, otherwise (B, T, bins)."""
    names = ("num_mel_bins", "input_feat_size", "feature_size")
    configs = [getattr(model.config, name, None) for name in ("audio_config", "encoder_config")]
    configs = [model.config, *(c for c in configs if c is not None)]
    bins = next((getattr(c, n) for c in configs for n in names if hasattr(c, n)), 80)
    layers = (m for m in model.modules() if isinstance(m, nn.Conv1d))
    first = any(layer.in_channels == bins for layer in layers)
    x = torch.randn(2, 64, bins, generator=generator)
    return x.transpose(1, 2).contiguous() if first else x


def inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Arguments of the model's forward, for a batch of two."""
    config: Any = model.config
    generator = torch.Generator().manual_seed(1)
    special = small_inputs.of(model, generator)
    if special is not None:
        return special
    names = inspect.signature(model.forward).parameters
    ids = torch.randint(5, VOCABULARY - 3, (2, LENGTH), generator=generator)
    ids[:, 8] = (
        VOCABULARY - 3
    )  # the end of a text for models that pool there; no padding in any case
    main = model.main_input_name
    given: dict[str, Tensor] = {}
    if "input_ids" in names:
        given["input_ids"] = ids
        if "attention_mask" in names:
            given["attention_mask"] = torch.ones_like(ids)
        if "bbox" in names:
            given["bbox"] = torch.tensor([1, 2, 5, 7]).expand(2, LENGTH, 4)
    vision = getattr(config, "vision_config", config)
    if (
        main == "pixel_values"
        or ("pixel_values" in names and "input_ids" not in names)
        or ("pixel_values" in names and hasattr(config, "projection_dim"))
    ):
        size = getattr(vision, "image_size", 32)
        size = size if isinstance(size, (list, tuple)) else (size, size)
        channels = getattr(vision, "num_channels", getattr(vision, "in_channels", 3))
        frames = [vision.num_frames] if hasattr(vision, "num_frames") else []
        given["pixel_values"] = torch.randn(2, *frames, channels, *size, generator=generator)
    elif "query_embeds" in names:
        size = (2, 4, config.hidden_size)
        given["query_embeds"] = torch.randn(size, generator=generator)
    elif "grid_thw" in names:
        patch, frames = vision.patch_size, getattr(vision, "temporal_patch_size", 1)
        pixels = getattr(vision, "in_channels", 3) * frames * patch**2
        given["hidden_states"] = torch.randn(16, pixels, generator=generator)
        given["grid_thw"] = torch.tensor([[1, 4, 4]])
    elif main == "pixel_values_videos":
        size, frames = vision.image_size, getattr(vision, "num_frames", 4)
        given[main] = torch.randn(2, frames, 3, size, size, generator=generator)
    elif main == "input_values":
        if hasattr(config, "num_mel_bins"):
            given[main] = torch.randn(
                2, getattr(config, "max_length", 64), config.num_mel_bins, generator=generator
            )
        else:
            given[main] = torch.randn(2, 1600, generator=generator)
    elif main == "input_features":
        given[main] = _spectrogram(model, generator)
    if config.is_encoder_decoder and "decoder_input_ids" in names:
        given["decoder_input_ids"] = ids[:, :9]
    return given
