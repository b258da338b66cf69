"""Inputs of models of transformers that those by the names of their arguments do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

Inputs = dict[str, Tensor]


def of(model: PreTrainedModel, generator: torch.Generator) -> Inputs | None:
    """Arguments of the model's forward, None where nothing is said here."""
    for types, make in _MAKERS.items():
        if model.config.model_type in types:
            return make(model.config, generator)
    return None


def _draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def _patches(config: Any, generator: torch.Generator) -> Inputs:
    """An image of 4 x 4 patches, flattened."""
    frames = getattr(config, "temporal_patch_size", getattr(config, "patch_temporal", 1))
    channels = getattr(config, "in_channels", None) or getattr(config, "num_channels", 3)
    pixels = _draw(generator, 16, channels * frames * config.patch_size**2)
    return {"pixel_values": pixels, "grid_thw": torch.tensor([[1, 4, 4]])}


def _square_patches(config: Any, generator: torch.Generator) -> Inputs:
    found = _patches(config, generator)
    size = config.patch_size
    found["pixel_values"] = found["pixel_values"].unflatten(1, (-1, size, size))
    return found


def _merged_patches(config: Any, generator: torch.Generator) -> Inputs:
    return {**_patches(config, generator), "merge_sizes": torch.tensor([2])}


def _shaped_patches(config: Any, generator: torch.Generator) -> Inputs:
    """Images of up to 16 patches, and how many rows and columns they have."""
    config, count = getattr(config, "vision_config", config), 16
    pixels = _draw(generator, 2, count, config.num_channels * config.patch_size**2)
    shapes = torch.tensor([[4, 4], [2, 6]])
    mask = torch.arange(count) < shapes.prod(1)[:, None]
    return {
        "pixel_values": pixels,
        "pixel_attention_mask": mask.long(),
        "spatial_shapes": shapes,
    }


def _waves(config: Any, generator: torch.Generator) -> Inputs:
    """Mono sounds with a dimension of channels."""
    return {"input_values": _draw(generator, 2, 1, 1920)}


def _mel(bins: str, length: int | None = None) -> Callable[[Any, torch.Generator], Inputs]:
    def make(config: Any, generator: torch.Generator) -> Inputs:
        time = 2 * config.max_source_positions if length is None else length
        return {"input_features": _draw(generator, 2, getattr(config, bins), time)}

    return make


def _series(config: Any, generator: torch.Generator) -> Inputs:
    past = config.context_length + max(config.lags_sequence)
    return {
        "past_values": _draw(generator, 2, past),
        "past_time_features": _draw(generator, 2, past, config.num_time_features),
        "past_observed_mask": torch.ones(2, past),
        "future_values": _draw(generator, 2, config.prediction_length),
        "future_time_features": _draw(
            generator, 2, config.prediction_length, config.num_time_features
        ),
    }


def _channels_of_series(config: Any, generator: torch.Generator) -> Inputs:
    return {"past_values": _draw(generator, 2, config.context_length, config.num_input_channels)}


def _features(
    *shape: int, mask: str | None = None, length: int = 0
) -> Callable[[Any, torch.Generator], Inputs]:
    def make(config: Any, generator: torch.Generator) -> Inputs:
        found = {"input_features": _draw(generator, 2, *shape)}
        return found if mask is None else {**found, mask: torch.ones(2, length).long()}

    return make


def _trajectory(config: Any, generator: torch.Generator) -> Inputs:
    length = 5
    return {
        "states": _draw(generator, 2, length, config.state_dim),
        "actions": _draw(generator, 2, length, config.act_dim),
        "rewards": _draw(generator, 2, length, 1),
        "returns_to_go": _draw(generator, 2, length, 1),
        "timesteps": torch.arange(length).expand(2, -1),
    }


def _tokens(generator: torch.Generator, *more: int) -> Inputs:
    ids = torch.randint(5, 90, (2, 13, *more), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones(2, 13, dtype=torch.long)}


def _codes(config: Any, generator: torch.Generator) -> Inputs:
    return _tokens(generator, config.num_codebooks + 1)


def _image(config: Any) -> tuple[int, int, int]:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 32)
    size = size if isinstance(size, int) else size[-1]
    return getattr(vision, "num_channels", 3), size, size


def _text_and_image(config: Any, generator: torch.Generator) -> Inputs:
    return {**_tokens(generator), "pixel_values": _draw(generator, 2, *_image(config))}


def _text_and_regions(config: Any, generator: torch.Generator) -> Inputs:
    regions = {"visual_feats": (2, 4, config.visual_feat_dim), "visual_pos": (2, 4, 4)}
    return {**_tokens(generator), **{n: _draw(generator, *s) for n, s in regions.items()}}


def _text_and_boxes(config: Any, generator: torch.Generator) -> Inputs:
    boxes = torch.rand(2, 13, 4, generator=generator)
    ids = _tokens(generator)
    return {**ids, "bbox": boxes, "decoder_input_ids": ids["input_ids"][:, :9]}


def _video(config: Any, generator: torch.Generator) -> Inputs:
    size = (2, config.frames_per_clip, 3, config.crop_size, config.crop_size)
    return {"pixel_values_videos": _draw(generator, *size)}


def _speech_to_text(config: Any, generator: torch.Generator) -> Inputs:
    ids = _tokens(generator)["input_ids"][:, :9]
    return {"input_features": _draw(generator, 2, 64, 80), "decoder_input_ids": ids}


def _sound_to_text(config: Any, generator: torch.Generator) -> Inputs:
    ids = _tokens(generator)["input_ids"][:, :9]
    return {"input_values": _draw(generator, 2, 1600), "decoder_input_ids": ids}


def _prompted_image(config: Any, generator: torch.Generator) -> Inputs:
    images = {
        n: _draw(generator, 2, *_image(config)) for n in ("pixel_values", "prompt_pixel_values")
    }
    return {**images, "prompt_masks": _draw(generator, 2, *_image(config))}


def _pair(config: Any, generator: torch.Generator) -> Inputs:
    return {"pixel_values": _draw(generator, 1, 2, 1, 64, 64)}


def _image_in_text(config: Any, generator: torch.Generator) -> Inputs:
    """With a token for each that the image becomes at its beginning."""
    found = _text_and_image(config, generator)
    count = getattr(config, "num_query_tokens", None) or 4
    names = ("image_token_id", "image_token_index", "video_token_index")
    token = next(t for t in (getattr(config, name, None) for name in names) if t is not None)
    found["input_ids"][:, :count] = token
    if config.model_type.startswith("instructblip"):
        found["qformer_input_ids"] = _tokens(generator)["input_ids"]
    if config.model_type == "instructblipvideo":
        found["pixel_values"] = _draw(generator, 2, 1, *_image(config))
    return found


def _image_and_latents(config: Any, generator: torch.Generator) -> Inputs:
    found, count = _text_and_image(config, generator), config.latent_query_num
    where = (torch.arange(13) >= 1) & (torch.arange(13) < 1 + count)
    return {**found, "image_embeds_position_mask": where.long().expand(2, -1)}


def _flat_patches(config: Any, generator: torch.Generator) -> Inputs:
    """Each after its row and column."""
    vision = config.vision_config
    pixels = _draw(generator, 2, 16, vision.patch_embed_hidden_size)
    at = torch.cartesian_prod(torch.arange(1, 5), torch.arange(1, 5)).expand(2, -1, -1)
    ids = _tokens(generator)["input_ids"][:, :9]
    return {"flattened_patches": torch.cat((at, pixels), 2), "decoder_input_ids": ids}


def _queries_to(config: Any, generator: torch.Generator) -> Inputs:
    size = (2, 5, config.encoder_hidden_size)
    return {
        "query_embeds": _draw(generator, 2, 4, config.hidden_size),
        "encoder_hidden_states": _draw(generator, *size),
    }


def _placed_patches(config: Any, generator: torch.Generator) -> Inputs:
    at = torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(2, -1, -1)
    return {
        "pixel_values": _draw(generator, 2, 16, 3 * config.patch_size**2),
        "pixel_position_ids": at,
    }


def _mel_and_hidden(config: Any, generator: torch.Generator) -> Inputs:
    size = (2, 64, config.input_feat_size)
    return {
        "audio_mel": _draw(generator, *size),
        "audio_mel_mask": torch.zeros(2, 64, dtype=torch.bool),
    }


def _text_and_sound(*shape: int) -> Callable[[Any, torch.Generator], Inputs]:
    def make(config: Any, generator: torch.Generator) -> Inputs:
        return {**_tokens(generator), "input_features": _draw(generator, 2, *shape)}

    return make


def _sized_patches(config: Any, generator: torch.Generator) -> Inputs:
    size = config.patch_size
    pixels = _draw(generator, 1, 3, size, 16 * size)
    return {"pixel_values": pixels, "target_sizes": torch.tensor([[4, 4]])}


def _images_of_text(config: Any, generator: torch.Generator) -> Inputs:
    images = _draw(generator, 2, 1, *_image(config))
    seen = torch.ones(2, 13, 1, dtype=torch.long)
    return {**_tokens(generator), "pixel_values": images, "image_attention_mask": seen}


def _mel_of_music(config: Any, generator: torch.Generator) -> Inputs:
    return {"input_ids": torch.randint(5, 90, (2 * config.num_codebooks, 9), generator=generator)}


def _forecast(config: Any, generator: torch.Generator) -> Inputs:
    past = _draw(generator, 2, config.context_length)
    padding = torch.zeros(2, config.context_length + config.horizon_length).long()
    if config.model_type == "timesfm":
        padding = padding[:, : config.context_length]
        return {
            "past_values": past,
            "past_values_padding": padding,
            "freq": torch.zeros(2, 1).long(),
        }
    return {"past_values": past}


_MAKERS: dict[tuple[str, ...], Callable[[Any, torch.Generator], Inputs]] = {
    (
        "cosmos3_edge_vision",
        "glm_image_vision",
        "hunyuan_vl_vision",
        "hy_v4_vl_vision",
        "muse_glimmer_vision",
        "muse_spark_vision",
        "lfm3_vl_vision",
    ): _patches,
    ("kimi_k25_vision",): _square_patches,
    ("video_llama_3_vision",): _merged_patches,
    ("siglip2", "siglip2_vision_model"): _shaped_patches,
    (
        "dac",
        "encodec",
        "mimi",
        "mimi_encoder",
        "omniasr_audio",
        "omniasr_ctc",
        "pe_audio_encoder",
        "pocket_tts_audio_tokenizer",
        "pocket_tts_audio_tokenizer_encoder",
        "wavtokenizer",
        "wavtokenizer_encoder",
    ): _waves,
    ("moss_transcribe_diarize_audio", "qwen2_audio_encoder", "voxtral_encoder"): _mel(
        "num_mel_bins"
    ),
    ("audioflamingo3_encoder",): _features(128, 256, mask="input_features_mask", length=256),
    ("qwen3_asr_encoder",): _features(128, 200, mask="input_features_mask", length=200),
    ("fun_asr_nano_encoder",): _features(64, 560, mask="input_features_mask", length=64),
    ("gemma4_audio", "nemotron3_5_transcribe_audio"): _features(64, 128),
    ("granite_speech5_ctc", "granite_speech5_encoder"): _features(64, 320),
    ("wav2vec2-bert",): _features(64, 160),
    ("univnet",): _features(16, 100),
    ("decision_transformer",): _trajectory,
    ("kyutai_speech_to_text",): _codes,
    ("bridgetower", "vilt"): _text_and_image,
    ("minicpm_ocr_vision", "minicpmv4_7_vision"): _sized_patches,
    ("voxtral_realtime",): _text_and_sound(128, 8 * 13),
    ("speech-encoder-decoder",): _sound_to_text,
    ("lxmert",): _text_and_regions,
    ("udop",): _text_and_boxes,
    ("vjepa2",): _video,
    ("speech_to_text",): _speech_to_text,
    ("speecht5",): _sound_to_text,
    ("seggpt",): _prompted_image,
    ("lightglue",): _pair,
    ("idefics",): _images_of_text,
    ("musicgen_decoder", "musicgen_melody_decoder"): _mel_of_music,
    ("timesfm", "timesfm2_5"): _forecast,
    ("blip-2", "instructblip", "instructblipvideo", "paligemma"): _image_in_text,
    ("kosmos-2",): _image_and_latents,
    ("pix2struct",): _flat_patches,
    ("blip_2_qformer",): _queries_to,
    ("gemma4_vision",): _placed_patches,
    ("gemma3n_audio",): _mel_and_hidden,
    ("time_series_transformer",): _series,
    ("patchtst", "patchtsmixer"): _channels_of_series,
}
