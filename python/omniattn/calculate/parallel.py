"""A training step on a mesh of ranks: memory, messages and time of one rank."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from omniattn.calculate.activations import Stage
from omniattn.calculate.costs import flops
from omniattn.calculate.sources import Source, config_of, dtype_of, require_sizes
from omniattn.calculate.trace import meta_model
from omniattn.models.decoders.decoder import Decoder
from omniattn.modules import DecoderBlock, Experts, MoE

OP = "parallel"
#: Dimensions of a mesh, as of `python -m omniattn train`.
_DIMENSIONS = ("pp", "dp", "fsdp", "cp", "ep", "tp")
_MOMENTS = 2  # of AdamW


@dataclass(frozen=True)
class Parallel:
    """A training step of one rank; where ranks differ, the largest number of any.

    Args:
        ranks: number of ranks of the mesh.
        parameters: number of parameters that a rank stores.
        state_bytes: bytes of weights, gradients and AdamW's moments, all in the given dtype.
        peak_bytes: bytes of weights, moments, activations, gathered weights and gradients at the
            time when they are most, in a forward or backward, without buffers of messages.
        traffic: bytes that a rank sends, by kind: "shard" and "replicate" for gathered weights and
            reduced gradients of FSDP2, and the dimensions "cp", "ep", "tp" and "pp".
        seconds: "compute", of operations that are divided evenly, with the pipeline's idle time,
            and the time of each kind of traffic; a step takes their sum if nothing overlaps. Empty
            without `peak_flops` and `link`.
    """

    ranks: int
    parameters: int
    state_bytes: int
    peak_bytes: int
    traffic: dict[str, int]
    seconds: dict[str, float]


def parallel(
    config: Source,
    mesh: Mapping[str, int],
    *,
    batch: int,
    length: int,
    accumulate: int = 1,
    dtype: torch.dtype | str = "bf16",
    peak_flops: float | None = None,
    link: float | None = None,
) -> Parallel:
    """Counts what a rank of `Trainer` stores and sends in a step, by a run on the meta device.

    An all-gather or reduce-scatter of S bytes over N ranks sends ``(N - 1) / N S``, an all-reduce
    twice that. With M microbatches, FSDP2 gathers blocks 2 M times and embedding and head M times,
    and reduces gradients M times (stages of a pipeline: M + 1, 1 and 1). Each split layer
    all-reduces (B, T, dim) in the forward and in the backward, split experts also the gradient of
    routing weights, and they exchange their parts of gate and up in both; the ring passes keys and
    values twice and their gradients once, delta rules, scans and convolutions a state or its last
    tokens from chunk to chunk, and their gradients back, other recurrences a sum and a decay from
    each chunk to all ranks, in both passes; ranks of ep exchange a row for each token and choice
    four times, as if experts were chosen evenly (sums for balance losses, of two numbers for each
    expert, are not counted); stages send two tensors (B, T, dim) in each direction.

    Args:
        config: a decoder, as in :func:`flops`.
        mesh: ranks of the dimensions "pp", "dp", "fsdp", "cp", "ep", "tp"; others have 1.
        batch, length: sequences of a step, on all ranks, and their tokens.
        accumulate: microbatches M of a rank.
        dtype: of weights, gradients, moments and activations.
        peak_flops, link: operations and sent bytes per second of a rank, for times.

    Raises:
        ValueError: a size is invalid, or the mesh does not divide the batch, tokens, layers, heads
            or experts.
        NotImplementedError: a model or layer that the dimensions cannot divide, or of which the
            messages are not counted here: predictors of further tokens; residual streams.

    Example:
        >>> found = parallel("llama-3-8b", {"fsdp": 64, "tp": 8}, batch=64, length=8192)
        >>> found.ranks, f"{found.state_bytes / 1e9:.2f} GB", f"{found.traffic['tp'] / 1e9:.0f} GB"
        (512, '0.13 GB', '15 GB')
    """
    require_sizes(OP, batch=batch, length=length, accumulate=accumulate, **mesh)
    if unknown := sorted(mesh.keys() - set(_DIMENSIONS)):
        raise ValueError(
            f"{OP}: mesh must have dimensions of {', '.join(_DIMENSIONS)}, got {', '.join(unknown)}"
        )
    source, kind = config_of(config), dtype_of(dtype)
    model = copy.deepcopy(meta_model(source, kind))  # tp narrows its layers
    if not isinstance(model, Decoder):
        raise NotImplementedError(f"{OP}: config must be of a decoder, got {type(source).__name__}")
    found = _Step(model, dict.fromkeys(_DIMENSIONS, 1) | dict(mesh), batch, length, accumulate)
    parameters, peak, traffic = found.totals()
    ranks = math.prod(mesh.values())
    seconds: dict[str, float] = {}
    if peak_flops is not None and link is not None:
        work = flops(source, length, batch=batch).training / ranks / peak_flops
        idle = (found.parts + found.sizes["pp"] - 1) / found.parts
        seconds = {"compute": work * idle} | {k: n / link for k, n in traffic.items()}
    state = (2 + _MOMENTS) * parameters * kind.itemsize
    return Parallel(ranks, parameters, state, peak, traffic, seconds)


class _Step:
    """Numbers of a step, stage by stage."""

    def __init__(
        self, model: Decoder, sizes: dict[str, int], batch: int, length: int, parts: int
    ) -> None:
        self.model, self.sizes, self.parts = model, sizes, parts
        self.dtype = model.embed_tokens.weight.dtype
        self.wide = torch.promote_types(self.dtype, torch.float32).itemsize
        replicas = sizes["dp"] * sizes["fsdp"] * sizes["ep"]
        chunks = 2 * sizes["cp"] if sizes["cp"] > 1 else 1
        for name, value, by in (
            ("batch", batch, replicas * parts),
            ("length", length, chunks),
            ("num_layers", len(model.layers), sizes["pp"]),
        ):
            if value % by:
                raise ValueError(f"{OP}: {name} must be a multiple of {by}, got {name}={value}")
        self.batch, self.length = batch // (replicas * parts), length // sizes["cp"]
        self.tokens = self.batch * self.length
        self.row = self.tokens * model.config.dim * self.dtype.itemsize
        base = sizes["fsdp"] if sizes["fsdp"] > 1 else sizes["dp"]
        self.among = base * sizes["cp"] * sizes["ep"]  # ranks that FSDP2 shards over
        self._check()
        self.between_chunks = self._between_chunks()
        self.splits = self._splits()
        whole = {name: p.shape for name, p in model.named_parameters()}
        self.shapes = {name: self._local(name, shape) for name, shape in whole.items()}

    def _check(self) -> None:
        sizes, model = self.sizes, self.model
        if model.predictor is not None or model.collapse is not None:
            raise NotImplementedError(
                f"{OP}: config must have no predictor and no residual streams, "
                f"got {type(model.config).__name__}"
            )
        experts = [m for m in model.modules() if isinstance(m, MoE)]
        if sizes["ep"] > 1 and not experts:
            raise ValueError(f"{OP}: ep must be 1 without experts, got ep={sizes['ep']}")
        for layer in experts:
            count = layer.config.experts.experts
            if count % sizes["ep"]:
                raise ValueError(
                    f"{OP}: ep must divide the experts, got ep={sizes['ep']}, experts={count}"
                )
        for block in model.layers:
            if not isinstance(block, DecoderBlock):
                raise NotImplementedError(
                    f"{OP}: layers must be DecoderBlocks, got {type(block).__name__}"
                )
            if sizes["pp"] > 1 and block.mixer.publishes:
                raise NotImplementedError(
                    f"{OP}: pp must be 1 where layers read values or keys of others, got "
                    f"pp={sizes['pp']}, {', '.join(block.mixer.publishes)}"
                )

    def _between_chunks(self) -> list[int]:
        """Returns the bytes of cp's messages of each layer in a microbatch."""
        ranks, model = self.sizes["cp"], self.model
        if ranks == 1:
            return [0] * len(model.layers)
        from omniattn.calculate.messages import context_bytes
        from omniattn.distributed.context import LAYERS
        from omniattn.distributed.tensor.splits import split_of

        x = model.embed_tokens.weight.new_empty(self.batch, self.length, model.config.dim)
        positions = torch.arange(self.length, device="meta")
        rope = None if model.rotary is None else model.rotary(positions)
        options: dict[str, Any] = {"rope": rope, "mask": None, "shared": {}}
        found: dict[Any, int] = {}  # of equal blocks once
        for block in model.layers:
            if block.config in found:
                continue
            mixer = block.mixer
            if (kind := type(mixer).__name__) not in LAYERS:
                raise NotImplementedError(
                    f"{OP}: with cp mixers must be of {', '.join(sorted(LAYERS))}, got {kind}"
                )
            if self.sizes["tp"] > 1:
                part = split_of(mixer, self.sizes["tp"]).config
                block.mixer = part.build(device="meta", dtype=self.dtype)
            run = functools.partial(model._through, [block], x, None, options, {}, None)
            found[block.config] = context_bytes(ranks, run)
            block.mixer = mixer
        return [found[block.config] for block in model.layers]

    def _splits(self) -> dict[str, dict[str, Any]]:
        """Returns the parts of the layers that tp splits, by the paths of the layers."""
        from omniattn.distributed.tensor.splits import is_split, parts_of, split_of

        ranks = self.sizes["tp"]
        if ranks == 1:
            return {}
        if self.model.config.vocab_size % ranks:
            raise ValueError(
                f"{OP}: tp must divide vocab_size, got tp={ranks}, "
                f"vocab_size={self.model.config.vocab_size}"
            )
        layers = {
            path: m
            for path, m in self.model.named_modules()
            if is_split(m) and not (isinstance(m, Experts) and self.sizes["ep"] > 1)
        }
        for block in self.model.layers:
            split_of(block.mixer, ranks)
        return {path: parts_of(m, split_of(m, ranks), ranks, 0) for path, m in layers.items()}

    def _local(self, name: str, shape: torch.Size) -> tuple[int, ...]:
        """Returns the shape of a parameter on a rank of ep and tp."""
        sizes = list(shape)
        if self._is_expert(name):
            sizes[0] //= self.sizes["ep"]
        for path, parts in self.splits.items():
            part = parts.get(name.removeprefix(f"{path}.")) if name.startswith(f"{path}.") else None
            if part is not None and part.placement.is_shard():
                sizes[part.placement.dim] //= self.sizes["tp"]
        if name in ("embed_tokens.weight", "lm_head.weight"):
            sizes[0] //= self.sizes["tp"]
        return tuple(sizes)

    def _is_expert(self, name: str) -> bool:
        path = name.rpartition(".")[0]
        parent = self.model.get_submodule(path.rpartition(".")[0])
        return isinstance(parent, MoE) and path.endswith(".experts")

    def totals(self) -> tuple[int, int, dict[str, int]]:
        """Returns the largest numbers of any stage: of parameters, of bytes that exist at once, and
        of bytes of each kind that are sent."""
        found = [self._stage(n) for n in range(self.sizes["pp"])]
        peaks = self._peaks([stored for stored, _ in found])
        kinds = {kind for _, traffic in found for kind, n in traffic.items() if n}
        most = {kind: round(max(t[kind] for _, t in found)) for kind in sorted(kinds)}
        return max(count for count, _ in found), max(peaks), most

    def _peaks(self, stored: list[int]) -> Iterator[int]:
        """Yields the largest memory of a rank of each stage, which stores some parameters."""
        from omniattn.distributed.pipeline import DecoderStage

        stages = self.sizes["pp"]
        weight = self.model.embed_tokens.weight
        tokens = weight.new_empty(self.batch, self.length, dtype=torch.int64)
        given = None
        for n in range(stages):
            model = self._part()
            if stages > 1:
                kind = type(model)
                model.__class__ = type(f"{kind.__name__}Stage", (DecoderStage, kind), {})
                cast(DecoderStage, model).cut_stage(n, stages)
            stage = Stage(model, tokens, given, self.among)
            # 1F1B; GPipe where parts are fewer than stages.
            in_flight = self.parts if self.parts < stages else stages - n
            held = (1 + _MOMENTS) * stored[n] * self.dtype.itemsize
            held += in_flight * self._exchanged(self._blocks(n))
            yield held + stage.peak(self.parts, in_flight)
            given = stage.forward()

    def _part(self) -> Decoder:
        """Returns the model with a rank's parts of the layers that tp splits."""
        model, ranks = copy.deepcopy(self.model).train(), self.sizes["tp"]
        for path in self.splits:  # `parts_of` has given these layers the configs of their parts
            config: Any = model.get_submodule(path).config
            parent, _, name = path.rpartition(".")
            layer = config.build(device="meta", dtype=self.dtype)
            setattr(model.get_submodule(parent), name, layer)
        for head in (model.embed_tokens, model.lm_head):
            if head is not None:
                head.weight = nn.Parameter(head.weight[: len(head.weight) // ranks].detach())
        return model

    def _stage(self, stage: int) -> tuple[int, dict[str, float]]:
        """Returns the parameters that a rank of a stage stores, and the bytes that it sends."""
        sizes, parts = self.sizes, self.parts
        stages, layers = sizes["pp"], self._layers(stage)
        first, last = stage == 0, stage == stages - 1
        repeats = self.model.lm_head is None
        blocks = self._blocks(stage)
        heads = [name for name in self.shapes if not name.startswith("layers.")]
        ends = ("norm.", "lm_head.")
        root = [
            name
            for name in heads
            if (last if name.startswith(ends) else first or (last and repeats and "tokens" in name))
        ]
        own = [name for name in self.shapes if name.startswith(tuple(blocks))]
        experts = [name for name in own if self._is_expert(name) and sizes["ep"] > 1]
        dense = [name for name in own if name not in experts]

        replicas, among = sizes["dp"] if sizes["fsdp"] > 1 else 1, self.among
        gathers = (2 * parts, parts) if stages == 1 else (parts + 1, 1)
        reduced = parts if stages == 1 else 1
        traffic = dict.fromkeys(("shard", "replicate", "cp", "ep", "tp", "pp"), 0.0)
        stored = 0
        for names, over, gathered in (
            (dense, among, gathers[0]),
            (experts, among // sizes["ep"], gathers[0]),
            (root, among, gathers[1]),
        ):
            shards = sum(self._shard(name, over) for name in names)
            stored += shards
            size = shards * self.dtype.itemsize
            traffic["shard"] += (over - 1) * size * (gathered + reduced)
            traffic["replicate"] += 2 * (replicas - 1) / replicas * size * reduced
        traffic["cp"] = parts * sum(self.between_chunks[n] for n in layers)
        traffic["ep"] = parts * sum(map(self._exchange, layers))
        traffic["tp"] = parts * self._reductions(blocks, first, last)
        if stages > 1:
            wide = self.wide if self.model.config.residual_in_fp32 else self.dtype.itemsize
            pair = self.row * (1 + wide / self.dtype.itemsize)
            traffic["pp"] = parts * pair * ((not first) + (not last))
            if repeats and (first or last):
                shard = self._shard("embed_tokens.weight", among)
                traffic["pp"] += shard * self.dtype.itemsize
        return stored, traffic

    def _layers(self, stage: int) -> range:
        count = len(self.model.layers) // self.sizes["pp"]
        return range(stage * count, (stage + 1) * count)

    def _blocks(self, stage: int) -> list[str]:
        return [f"layers.{n}." for n in self._layers(stage)]

    def _shard(self, name: str, ranks: int) -> int:
        """Returns the elements of a rank's shard by rows, padded to that of the first rank."""
        rows, *rest = self.shapes[name]
        return math.ceil(rows / ranks) * math.prod(rest)

    def _exchange(self, layer: int) -> float:
        """Returns the bytes of rows that go to other ranks' experts and back, twice."""
        ranks = self.sizes["ep"]
        layers = [m for m in self.model.layers[layer].modules() if isinstance(m, MoE)]
        rows = sum(4 * m.config.gate.top_k * self.row for m in layers)
        counts = sum(8 * m.config.experts.experts for m in layers)
        return (ranks - 1) / ranks * (rows + counts)

    def _reductions(self, blocks: list[str], first: bool, last: bool) -> float:
        """Returns the bytes of tp's messages in a microbatch."""
        ranks = self.sizes["tp"]
        if ranks == 1:
            return 0
        own = {p: parts for p, parts in self.splits.items() if p.startswith(tuple(blocks))}
        total = 2 * self.row * (2 * len(own) + first + last)
        for path, parts in own.items():
            for name, part in parts.items():
                if part.summed:
                    size = self.model.get_submodule(path).get_parameter(name).numel()
                    total += 2 * size * self.dtype.itemsize
            parent: Any = self.model.get_submodule(path.rpartition(".")[0])
            if isinstance(parent, MoE) and path.endswith(".experts"):
                total += 2 * self.tokens * parent.config.gate.top_k * self.wide
        if last:  # of the loss: all ranks' normalizers, and the sum of the targets' logits
            total += (ranks + 2) * self.tokens * self.wide
        # Of two ranks each keeps a half of its part of gate and up.
        exchanged = self._exchanged(blocks) * (1 if ranks > 2 else 1 / 2)
        return (ranks - 1) / ranks * total + 2 * exchanged

    def _exchanged(self, blocks: list[str]) -> int:
        """Returns the bytes of a rank's part of gate and up of split experts, which the forward
        reads from other ranks and keeps for the backward."""
        found = 0
        for path, parts in self.splits.items():
            if path.startswith(tuple(blocks)):
                names = [f"{path}.{name}" for name, part in parts.items() if part.halves]
                found += sum(math.prod(self.shapes[name]) for name in names)
        return found * self.dtype.itemsize
