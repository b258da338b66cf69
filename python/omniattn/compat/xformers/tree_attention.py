"""Attention of trees of draft tokens: `xformers.ops.tree_attention`."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from omniattn.checks.arguments import require_int, require_shape
from omniattn.compat._errors import errors_as, require_form, require_real
from omniattn.compat.xformers.attn_bias import AttentionBias
from omniattn.compat.xformers.fmha import memory_efficient_attention_partial, merge_attentions

#: A node of a tree: the number of the child at each level, from the root on.
Node = tuple[int, ...]


@dataclass
class TreeAttnMetadata:
    """A tree of M nodes, of which the first is the root, as tensors.

    Args:
        tree_choices: nodes without the root, by level and then by number.
        attention_bias: (M, M), 0 where a node (row) descends from another one or is it, else -inf.
        tree_indices: (M,), the draft token of each node: child c of any node of a level is the same
            token, and tokens are numbered from level to level.
        retrieval_indices: (leaves, depth + 1), nodes on the way to each leaf, then -1.
        path_lengths: number of nodes on these ways.
        tree_seq_position_ids: (M,) int32, level of each node.
        parent_node_indices: (M - 1,), parent of each node but the root.
        child_node_indices: (M, most children), places in `tree_choices` of the children; the last
            one is repeated. Leaves have 0.
        num_children_per_node: (M,).
        candidate_idx: (M - 1,), number of siblings before each node but the root.
        num_nodes_per_level, num_nodes_per_level_cpu: (levels,), the root's included.
        num_children_per_node_at_level, num_children_per_node_at_level_cpu: `num_children_per_node`
            of each level.
        subtree_sizes: number of nodes up to each level.
    """

    tree_choices: Sequence[Node]
    attention_bias: Tensor
    tree_indices: Tensor
    retrieval_indices: Tensor
    path_lengths: list[int]
    tree_seq_position_ids: Tensor
    parent_node_indices: Tensor
    child_node_indices: Tensor
    num_children_per_node: Tensor
    candidate_idx: Tensor
    num_nodes_per_level: Tensor
    num_nodes_per_level_cpu: Tensor
    num_children_per_node_at_level: list[Tensor]
    num_children_per_node_at_level_cpu: list[Tensor]
    subtree_sizes: list[int]

    @classmethod
    @functools.lru_cache
    def from_tree_choices_cached(
        cls,
        tree_choices: tuple[Node, ...],
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> TreeAttnMetadata:
        """Returns :meth:`from_tree_choices`, once for each tree."""
        return cls.from_tree_choices(tree_choices, dtype, device)

    @classmethod
    def from_tree_choices(
        cls,
        tree_choices: Sequence[Node],
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> TreeAttnMetadata:
        """Returns the tree of these nodes, in any order, without the root.

        Args:
            tree_choices: nodes, such as (2, 0) for the first child of the root's third child.
            dtype: dtype of `attention_bias`.
            device: device of the tensors.
        """
        choices = sorted(tree_choices, key=lambda node: (len(node), node))
        nodes: list[Node] = [(), *choices]
        place = {node: n for n, node in enumerate(nodes)}
        for node in choices:
            if not node or node[:-1] not in place or len(place) < len(nodes):
                raise ValueError(
                    "from_tree_choices: tree_choices must have the parent of each node, no node "
                    f"twice and not the root, got {choices}"
                )
        ways = [[place[node[:level]] for level in range(len(node) + 1)] for node in nodes]
        children: list[list[int]] = [[] for _ in nodes]
        for n, node in enumerate(choices):
            children[place[node[:-1]]].append(n)
        levels = [len(list(group)) for _, group in itertools.groupby(nodes, len)]
        tokens, before = [0], 0
        for _, group in itertools.groupby(choices, len):
            tokens += [before + node[-1] + 1 for node in group]
            before = max(tokens)
        leaves = [way for way, own in zip(ways, children, strict=True) if not own]

        def integers(values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        def rows(values: list[list[int]], filler: float) -> Tensor:
            padded = pad_sequence([torch.tensor(v) for v in values], True, filler)
            return padded.to(device=device, dtype=torch.int64)

        bias = torch.full((len(nodes), len(nodes)), -math.inf, dtype=dtype)
        for row, way in zip(bias, ways, strict=True):
            row[way] = 0
        most = max(1, *map(len, children))
        repeated = [(own + own[-1:] * most)[:most] if own else [0] * most for own in children]
        counts, per_level = integers([len(own) for own in children]), integers(levels)
        siblings = [children[place[node[:-1]]].index(n) for n, node in enumerate(choices)]
        return cls(
            tree_choices=choices,
            attention_bias=bias.to(device),
            tree_indices=integers(tokens),
            retrieval_indices=rows(leaves, -1),
            path_lengths=[len(way) for way in leaves],
            tree_seq_position_ids=integers([len(node) for node in nodes], torch.int32),
            parent_node_indices=integers([place[node[:-1]] for node in choices]),
            child_node_indices=rows(repeated, 0),
            num_children_per_node=counts,
            candidate_idx=integers(siblings),
            num_nodes_per_level=per_level,
            num_nodes_per_level_cpu=per_level.cpu(),
            num_children_per_node_at_level=list(counts.split(levels)),
            num_children_per_node_at_level_cpu=list(counts.cpu().split(levels)),
            subtree_sizes=list(itertools.accumulate(levels)),
        )


def construct_tree_choices(branching: Sequence[int]) -> list[Node]:
    """Returns the nodes of the tree whose nodes at level i have ``branching[i]`` children."""
    ranges = [range(count) for count in branching]
    levels = (itertools.product(*ranges[: depth + 1]) for depth in range(len(ranges)))
    return list(itertools.chain.from_iterable(levels))


def construct_full_tree_choices(tree_depth: int, branching: int) -> list[Node]:
    """Returns :func:`construct_tree_choices` of `tree_depth` levels with equally many children."""
    for name, value in (("tree_depth", tree_depth), ("branching", branching)):
        require_int("construct_full_tree_choices", name, value, 0)
    return construct_tree_choices([branching] * tree_depth)


def get_full_tree_size(tree_depth: int, branching: int) -> int:
    """Returns the number of nodes of a full tree of `tree_depth` levels, the root's included."""
    for name, value in (("tree_depth", tree_depth), ("branching", branching)):
        require_int("get_full_tree_size", name, value, 0)
    return int(sum(branching**level for level in range(tree_depth)))


def tree_attention(
    q: Tensor,
    spec_k: Tensor,
    spec_v: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    spec_attn_bias: Tensor,
    prefix_attn_bias: AttentionBias,
    prefix_op: Any = None,
    suffix_op: Any = None,
    autotune: bool = False,
    quantized_kv_scales: tuple[Tensor, Tensor] | None = None,
    q_fp8: Tensor | None = None,
) -> Tensor:
    """Attention of draft tokens, the nodes of a tree, to a cache and to each other.

    The two sets of keys are merged by :func:`merge_attentions`. Unlike xformers', the function has
    gradients.

    Args:
        q: (B, T, H, D) or (B, T, G, H, D), queries of the last T nodes.
        spec_k, spec_v: (B, M, H, D) or (B, M, G, H, D), keys and values of all nodes.
        cache_k, cache_v: (B, Tk, H, D) or (B, Tk, G, H, D), of the context; B = 1 with pages.
        spec_attn_bias: (T, M), such as the last rows of `TreeAttnMetadata.attention_bias`.
        prefix_attn_bias: mask of T queries and the context of each of B sequences, such as
            `BlockDiagonalPaddedKeysMask`.
        prefix_op, suffix_op, autotune: have no effect.
        quantized_kv_scales, q_fp8: must be None.

    Returns:
        O of the shape and dtype of q.
    """
    op = "tree_attention"
    for name, value in (("quantized_kv_scales", quantized_kv_scales), ("q_fp8", q_fp8)):
        if value is not None:
            raise NotImplementedError(f"{op}: {name} must be None, got {name}={type(value)}")
    tensors = {"q": q, "spec_k": spec_k, "spec_v": spec_v, "cache_k": cache_k, "cache_v": cache_v}
    require_real(op, **tensors, spec_attn_bias=spec_attn_bias)
    form = "B, T, H, D" if q.ndim == 4 else "B, T, G, H, D"
    for name, t in tensors.items():
        require_form(op, name, t, form)
    batch, steps = q.shape[:2]
    require_shape(op, "spec_attn_bias", spec_attn_bias, (steps, spec_k.shape[1]))
    rows, keys, values = (_packed(t) for t in (q, cache_k, cache_v))
    bias = spec_attn_bias.expand(batch, *q.shape[2:-1], -1, -1)
    with errors_as(op, "memory_efficient_attention_partial"):
        prefix, lse = memory_efficient_attention_partial(rows, keys, values, prefix_attn_bias)
        suffix = memory_efficient_attention_partial(q, spec_k, spec_v, bias)
    lse = lse[0].unflatten(-1, (batch, steps)).movedim(-2, 0)
    return merge_attentions([prefix.view_as(q), suffix[0]], [lse, suffix[1]])[0]


def _packed(t: Tensor) -> Tensor:
    """Returns the sequences one after another (1, B T, ..); heads that are expanded stay so."""
    return t.flatten(0, 1)[None]
