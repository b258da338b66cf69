"""Published sizes: exact numbers of parameters, and the time to build them without memory."""

import re
import time

import pytest
import torch

from omniattn.models import PRESETS
from omniattn.models.presets import TRAINED

#: Numbers of parameters of the releases.
COUNTS = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2-57b-a14b": 57_408_658_944,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "jamba-v0.1": 51_570_323_328,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200 - 58 * 256,  # the release counts the routers' biases
    "deepseek-v3.2": 671_026_419_200 - 58 * 256 + 61 * 13_959_424,  # with 61 indexers
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,
    "bloom": 176_247_271_424,
    "mpt-7b": 6_649_286_656,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "falcon-rw-1b": 1_311_625_216,
    "rwkv-4-169m": 169_342_464,
    "zamba-7b": 7_232_490_496,
    "samba-421m": 421_793_280,
    "xlstm-125m": 163_806_144,
    "xlstm-350m": 409_290_112,
    "xlstm-760m": 840_427_392,
    "xlstm-1.3b": 1_422_559_616,
    "xlstm-7b": 6_865_424_896,
    "rwkv-5-1.5b": 1_577_754_624,
    "rwkv-5-7b": 7_518_044_160,
    "rwkv-6-1.6b": 1_599_873_024,
    "rwkv-6-7b": 7_635_746_816,
    "rwkv-7-0.1b": 191_034_624,
    "rwkv-7-0.4b": 450_767_872,
    "rwkv-7-1.5b": 1_527_404_544,
    "bert-base": 109_514_298,
    "roberta-base": 124_697_433,
    "roberta-large": 355_412_057,
    "electra-small-generator": 13_546_682,
    "electra-base-discriminator": 109_483_009,
    "electra-large-discriminator": 335_142_913,
    "deberta-base": 139_244_121,
    "deberta-v2-xlarge": 887_085_156,
    "deberta-v2-xxlarge": 1_567_041_636,
    "deberta-v3-base": 184_551_780,
    "deberta-v3-large": 435_191_908,
    "longformer-base-4096": 148_711_257,
    "longformer-large-4096": 434_653_273,
    "bigbird-roberta-base": 127_520_694,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5-v1.1-small": 76_961_152,
    "t5-v1.1-large": 783_150_080,
    "t5-v1.1-xl": 2_849_757_184,
    "t5-v1.1-xxl": 11_135_332_352,
    "t5-v1.1-base": 247_577_856,
    "switch-base-8": 222_903_552 + 12 * (7 * 2 * 768 * 3072 + 8 * 768),
    "switch-c-2048": 1_571_308_972_448,  # the paper rounds to 1,571 billion
    "transformer-base": 63_045_632,  # of 37,000 tokens; the paper rounds to 65 and 213 million
    "transformer-big": 214_171_648,
    "bart-base": 139_420_416,
    "bart-large": 406_291_456,
    "vit-gpt2": 239_195_904 - 768 * 769,  # transformers counts a pooler without effect
    "mbart-large": 610_851_840,
    "opus-mt-en-de": 73_886_208,  # without the sinusoids that transformers stores
    "transformer-xl-wt103": 151_106_305,
    "mamba-130m": 129_135_360,
    "mamba-2.8b": 2_768_345_600,
    "mamba2-130m": 128_989_632,
    "mamba2-2.7b": 2_702_599_680,
    "vit-b-16": 86_567_656,
    "vit-l-16": 304_326_632,
    "vit-h-14": 632_045_800,
    "vit-s-16": 22_050_664,
    "vit-b-32": 88_224_232,
    "vit-l-32": 306_535_400,
    "deit-tiny": 5_717_416,
    "deit-small": 22_050_664,
    "deit-base": 86_567_656,
    "deit-tiny-distilled": 5_910_800,
    "deit-small-distilled": 22_436_432,
    "deit-base-distilled": 87_338_192,
    "vit-mae-base": 111_907_840,
    "clip-vit-b-32": 151_277_313,
    "clip-vit-b-16": 149_620_737,
    "clip-vit-l-14": 427_616_513,
    "dino-vits16": 21_665_664,
    "dino-vits8": 21_670_272,
    "dino-vitb16": 85_798_656,
    "dino-vitb8": 85_807_872,
    "dinov2-small": 22_056_576,
    "dinov2-base": 86_580_480,
    "dinov2-large": 304_368_640,
    "dinov2-giant": 1_136_480_768,
    "dinov2-small-registers": 22_058_112,
    "dinov2-base-registers": 86_583_552,
    "dinov2-large-registers": 304_372_736,
    "dinov2-giant-registers": 1_136_486_912,
    "pvt-tiny": 13_229_288,
    "pvt-small": 24_485_864,
    "pvt-medium": 44_208_104,
    "pvt-large": 61_369_320,
    "pvt-v2-b0": 3_666_760,
    "pvt-v2-b1": 14_009_000,
    "pvt-v2-b2": 25_362_856,
    "pvt-v2-b2-linear": 22_553_512,
    "pvt-v2-b3": 45_238_696,
    "pvt-v2-b4": 62_556_072,
    "pvt-v2-b5": 81_956_008,
    "swin-t": 28_288_354,
    "swin-s": 49_606_258,
    "swin-b": 87_768_224,
}


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in TRAINED])
def test_sizes_of_the_releases(name):
    started = time.process_time()
    count = PRESETS[name].num_parameters
    assert time.process_time() - started < 2
    assert count == COUNTS.get(name, count)


def _rwkv5(dim: int, layers: int, hidden: int) -> int:
    """As RWKV_Tmix_x052 and RWKV_CMix_x052 of BlinkDL/RWKV-LM (033ce840) declare them."""
    time = 5 * dim**2 + 4 * dim + 2 * dim + 2 * dim  # r k v g o, mixes, decay and bonus, ln_x
    channel = dim**2 + 2 * dim * hidden + 2 * dim
    return layers * (time + channel + 4 * dim) + 2 * 65536 * dim + 4 * dim  # ln1 ln2; ln0, ln_out


def _rwkv6(dim: int, layers: int, hidden: int, mix: int = 32, decay: int = 64) -> int:
    """RWKV-5's layers, 2 more mixes, and mixes and decays of low rank (x060 there)."""
    return _rwkv5(dim, layers, hidden) + layers * 2 * dim * (1 + 5 * mix + decay)


def _rwkv7(dim: int, layers: int, ranks: tuple[int, int, int, int]) -> int:
    """Of x070 there; ranks of decay, a, v and gate by the table of arXiv 2503.14456."""
    time = 4 * dim**2 + 2 * dim * sum(ranks)  # r k v o, low ranks
    time += (6 + 3 + 3 + 2) * dim  # mixes; w0 a0 v0; k_k k_a r_k; ln_x
    channel = 8 * dim**2 + dim
    first = (2 * ranks[2] + 1) * dim  # the first layer takes v as it is
    return layers * (time + channel + 4 * dim) - first + 2 * 65536 * dim + 4 * dim


def _retnet(dim: int, layers: int, heads: int) -> int:
    """12 dim^2 per layer by arXiv 2307.08621; the paper states neither vocabulary nor norms."""
    norms = 4 * dim + 2 * dim // heads
    return layers * (12 * dim**2 + norms) + 2 * dim + 50257 * dim


def _samba(dim: int, layers: int, hidden: int) -> int:
    """As config.py and model.py of microsoft/Samba (19845f41): a tied head, mamba_simple.py."""
    inner, rank, state = 2 * dim, dim // 16, 16
    mamba = 3 * dim * inner + 5 * inner + inner * (rank + 2 * state)  # in, out; conv; x_proj
    mamba += (rank + 1) * inner + inner * state + inner  # dt_proj, A_log, D
    shared = 3 * dim * hidden + 2 * dim
    return layers // 2 * (mamba + 4 * dim**2) + layers * shared + (32000 + 1) * dim


def _s4(dim: int, layers: int, state: int = 64) -> int:
    """As s4s4ff.yaml and lm/s4-wt103.yaml of state-spaces/s4 (d589d982): two S4 for each MLP.

    The paper's 249 million have an adaptive embedding, of 38 million, in place of 267,735 rows.
    """
    kernel = dim * (4 * state + 2)  # A, P, B, C of state / 2 complex numbers; dt, D
    glu = 2 * dim**2 + 2 * dim
    mlp = 8 * dim**2 + 5 * dim
    return layers * (2 * (kernel + glu) + mlp + 3 * 2 * dim) + 2 * dim + 267735 * dim


def _differential(dim: int, layers: int, hidden: int, half: int) -> int:
    """As multihead_flashdiff_2.py of microsoft/unilm (422f24c5), with an untied head of cl100k."""
    mixer = 4 * dim**2 + 4 * half + 2 * half  # q k v o, the vectors of lambda, the norm of a head
    return layers * (mixer + 3 * dim * hidden + 2 * dim) + (2 * 100288 + 1) * dim


def _experts(
    dim: int, layers: int, hidden: int, inner: int, heads: int, experts: int, parts: int
) -> int:
    """T5's two stacks of layers, of which every second one has experts of `parts` matrices."""
    ffn = layers * ((experts + 1) * parts * dim * hidden + dim * experts)
    attention = (1 + 2) * layers * 4 * dim * inner
    return ffn + attention + (5 * layers + 2) * dim + 2 * 32 * heads + 32128 * dim


#: Numbers of models that transformers lacks, from what papers and official code declare.
DERIVED = {
    "rwkv-5-0.4b": _rwkv5(1024, 24, 3584),
    "rwkv-5-1.5b": _rwkv5(2048, 24, 7168),
    "rwkv-5-3b": _rwkv5(2560, 32, 8960),
    "rwkv-5-7b": _rwkv5(4096, 32, 14336),
    "rwkv-6-1.6b": _rwkv6(2048, 24, 7168),
    "rwkv-6-3b": _rwkv6(2560, 32, 8960),
    "rwkv-6-7b": _rwkv6(4096, 32, 14336, 64, 128),
    "rwkv-7-0.1b": _rwkv7(768, 12, (64, 64, 32, 128)),
    "rwkv-7-0.4b": _rwkv7(1024, 24, (64, 64, 32, 128)),
    "rwkv-7-1.5b": _rwkv7(2048, 24, (96, 96, 64, 256)),
    "rwkv-7-2.9b": _rwkv7(2560, 32, (96, 96, 64, 320)),
    "retnet-1.3b": _retnet(2048, 24, 8),
    "retnet-2.7b": _retnet(2560, 32, 10),
    "retnet-6.7b": _retnet(4096, 32, 16),
    "samba-421m": _samba(1536, 12, 4096),
    "samba-1.3b": _samba(2304, 18, 6144),
    "s4-wt103": _s4(1024, 16),
    "diff-3b": _differential(3072, 28, 8192, 128),
    # 36 layers of arXiv 2006.16668, whose 36,684 experts must mean 18 x 2048; vocabulary of T5.
    "gshard-600b": _experts(1024, 18, 8192, 2048, 16, 2048, 2),
    # Table 9 of arXiv 2101.03961, "395B"; a head of its own, as T5 1.1 has.
    "switch-xxl-128": _experts(4096, 24, 10240, 4096, 64, 128, 3) + 32128 * 4096,
}


_OTHERS = [n for n in PRESETS if n not in {*TRAINED, *COUNTS, *DERIVED}]


@pytest.mark.parametrize("name", DERIVED)
def test_sizes_that_transformers_lacks(name):
    assert PRESETS[name].num_parameters == DERIVED[name]
    assert COUNTS.get(name, DERIVED[name]) == DERIVED[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", _OTHERS)
def test_other_sizes_are_those_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    config = PRESETS[name]
    assert config.hf is not None, f"transformers has no {config.architecture}: derive the number"
    theirs = config.to_hf()
    with torch.device("meta"):
        model = getattr(transformers, config.hf.model)(theirs)
    counts = {n: p.numel() for n, p in model.named_parameters()}
    assert config.num_parameters == sum(
        count for n, count in counts.items() if not re.search(config.hf.unused, n)
    )
