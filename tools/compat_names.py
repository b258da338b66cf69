"""Writes the lists of names of other libraries, and the page that shows them.

    python tools/compat_names.py names fla CHECKOUT   # python/omniattn/compat/names/fla.txt
    python tools/compat_names.py names fla            # the same names, as this package has them
    python tools/compat_names.py page                 # docs/compat.md

CHECKOUT is the folder of a git repository, which may be bare. Public names of a module are the
functions and classes that it defines, or in a package also those that it imports from its own
modules, without kernels and autograd functions.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import io
import re
import subprocess
import tarfile
from pathlib import Path

from omniattn.compat._names import FOLDER, MODULES, Library, library

ROOT = Path(__file__).parents[1]
#: Folder of each package in its repository, and the file that has its version.
SOURCES = {
    "causal_conv1d": ("causal_conv1d", "causal_conv1d/__init__.py"),
    "fla": ("fla", "fla/__init__.py"),
    "flash_attn": ("flash_attn", "flash_attn/__init__.py"),
    "flash_attn_interface": ("hopper/flash_attn_interface.py", "hopper/__init__.py"),
    "liger_kernel": ("src/liger_kernel", "pyproject.toml"),
    "mamba_ssm": ("mamba_ssm", "mamba_ssm/__init__.py"),
    "natten": ("src/natten", "src/natten/version.py"),
    "xformers": ("xformers", "version.txt"),
}
#: Modules without names for users: code of one device, distribution, tests, command lines.
INNER = re.compile(
    r"(^|\.)(backends?|(?<!fla\.ops\.)cp|ops\.cp\.(?!context)\w+|(?<!flash_attn\.)cute|cute\.(?!interface)\w+|cutedsl|cutile|tilelang|gluon|megatron|triton\.monkey_patch|testing"
    r"|benchmark|determinism|env_report|flash_attn_triton(_og)?|flash_blocksparse\w*|library"
    r"|triton\.mamba3|kernels|experimental|decoding|trainer|trainer_integration|fsdp"
    r"|distributed|tensor_parallel|generation|pretrained|cpp_functions"
    r"|natten\.(profil\w+|token_permute|utils(?!\.varlen))|xformers\.(attn_bias_utils|benchmarks|csrc"
    r"|checkpoint|components|fwbw_overlap|info|profiler|sparse|test|triton|utils|flash_attn_3)"
    r"|xformers\.ops\.(common|differentiable_collectives|fmha\.(?!attn_bias)\w+))(\.|$)"
)
#: Names that are steps of a kernel.
STEP = re.compile(
    r"^(init_to_zero|get_num_warps|config_prune|custom_amp_decorator|round_multiple|test_\w+"
    r"|maybe_\w+|ensure_\w+|triton_\w+|get_configs\w*|get_bucket_m|compare_version|is_hip"
    r"|device_context|calculate_settings|get_npu_\w+|set_large_\w+|infer_device|\w+_triton|(\w+_)?setup_context"
    r"|(?!liger_|memory_)\w+_(forward|backward)(_\w+)?)$"
    r"|(_(fwd|bwd|fwdbwd|kernel|kernel\w+|fwd_\w+|bwd_\w+|back|impl)|Function|Fn|Func)$|^(fwd|bwd)_"
)
#: Reasons of refusals, by package and module.name.
REFUSED = [
    (r"flash_attn\.models\.|patch_embed", "models are in omniattn.models"),
    (r"flash_attn\.modules\.", "layers are in omniattn.modules"),
    (r"fla\.models\b", "models are in omniattn.models, and Model.from_hf loads checkpoints"),
    (r"mamba_ssm\.models\.|MambaLMHeadModel", "models are in omniattn.models"),
    (r"Parallel(?!_)|xformers\.ops\.(\w+\.)?(fused_(all|any|lin)|sequence_parallel)",
     "weights are not split over processes here"),
    (r"[Ss]pars(e|ify)24", "weights with 2 zeros of 4 are for tensor cores"),
    (r"apply_liger_(kernel|llama4)|_apply_liger|AutoLiger|monkey_patch",
     "omniattn.hf.patch patches models of transformers"),
    (r"liger_kernel\.transformers\.model\.", "omniattn.hf.patch patches models of transformers"),
    (r"^fla\.utils\b|prepare_block_csr|get_max_num_splits|PrepareModuleWeight|_cp$"
     r"|deprecate_kwarg|apply_liger_triton_cache|liger_kernel\.utils\.|(is_\w+_available)$"
     r"|get_scheduler_metadata|num_splits_heuristic|(Bwd|Fwd)Config|_cuda$|fast_causal_conv1d_fn"
     r"|compute_routing_metadata|validate_formula_and_mode|gemm_swiglu|prepare_maxlens"
     r"|(load_config|load_state_dict)_hf",
     "it serves the library's own kernels, devices and files"),
    (r"\.naive_\w+$|_ref$|GroupNormRef|_torch$|segsum|ssd_minimal_discrete|mamba_inner_ref",
     "formulas in plain torch are in omniattn.reference"),
    (r"fla\.layers\.(\w+\.)?(YOCO|SlidingWindowSharedKey)",
     "omniattn.modules has layers of this kind, with caches of their own"),
    (r"wall_attn(\.\w+)?\.(build_wall_kv_cache|parallel_wall_attn_decode)"
     r"|ops\.(build_wall_kv_cache|parallel_wall_attn_decode)",
     "omniattn.modules.WallAttention decodes with its cache"),
    (r"(log_linear_)?mamba2\.(ceil_log|get_num_levels|hmamba_|apply_mask|pad_tensor|reshape_into)"
     r"|mamba2\.segment_sum|mom\.(transform|reconstruct)|rodimus\.(align_multiple|autocast_)"
     r"|\.TokenShift$|causal_conv1d_update_states|utils\.(softplus\.)?softplus$"
     r"|(chunk_scan|chunk_state(_varlen)?|state_passing)$|round_up_headdim|KernelSchedule",
     "it is a step of the library's own layers and kernels"),
    (r"xformers\.(checkpoint|get_optimal_checkpoint|selective_checkpoint)",
     "torch.utils.checkpoint chooses what is recomputed"),
    (r"xformers\.(compute_once|get_python_lib|list_operators)|fmha\.(ALL_|Inputs|dispatch)"
     r"|SwiGLU(Eager)?Op|IndexSelect|ScaledIndexAdd|tiled_matmul\.check_|SplitKAutotune"
     r"|use_triton_splitk|sp24\.\w+$",
     "it serves the library's own kernels, devices and files"),
    (r"fla\.ops\.cp\.(comm\.)?all_", "torch.distributed has messages between ranks"),
    (r"_subset$", "rows that stochastic depth leaves out are not left out of norms here"),
    (r"k_activations\.Activation", "it names kernels of the library"),
    (r"mha\.MHA|Mamba2Simple", "layers of this kind are in omniattn.modules"),
    (r"BitLinear|bitattn|BitAttention|fused_bitlinear|int8|RMSNormLinearQuant|LayerNormLinearQuant",
     "omniattn.modules.BitLinear has weights of 1.58 bits"),
]  # fmt: skip
#: Names that are called otherwise here, because two modules use one name.
ALIASES = {
    "flash_attn.cute.flash_attn_func": "cute_flash_attn_func",
    "flash_attn.cute.flash_attn_varlen_func": "cute_flash_attn_varlen_func",
    "flash_attn.cute.interface.flash_attn_func": "cute_flash_attn_func",
    "flash_attn.cute.interface.flash_attn_varlen_func": "cute_flash_attn_varlen_func",
    "flash_attn.ops.triton.layer_norm.RMSNorm": "TritonRMSNorm",
    "liger_kernel.chunked_loss.functional.liger_fused_linear_jsd": "chunked_liger_fused_linear_jsd",
    "mamba_ssm.ops.triton.layernorm_gated.RMSNorm": "GatedRMSNorm",
    "mamba_ssm.ops.triton.layernorm_gated.LayerNorm": "GatedLayerNorm",
}
#: Modules that pull requests add to a library: commit, and public names.
PROPOSED = {
    "fla": {
        "fla.ops.cyfa": ("ef747b38", {"chunk_cyfa", "fused_recurrent_cyfa"}),
        "fla.ops.gka": ("b22c42ca", {"chunk_gka", "fused_recurrent_gka"}),
    }
}
KINDS = {"there": "+", "refused": "!", "absent": "-"}


def show(checkout: str, *arguments: str) -> str:
    command = ["git", "-C", checkout, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def sources(package: str, checkout: str) -> dict[str, tuple[ast.Module, bool]]:
    """Returns syntax trees of modules, and True for packages."""
    folder, _ = SOURCES[package]
    command = ["git", "-C", checkout, "archive", "HEAD", folder]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    found = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for path in files.getnames():
            if not path.endswith(".py"):
                continue
            parts = (
                package,
                *Path(path).with_suffix("").relative_to(folder.removesuffix(".py")).parts,
            )
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            if not INNER.search(name) and "._" not in name:
                text = files.extractfile(path)
                assert text is not None
                found[name] = ast.parse(text.read()), is_package
    return found


def is_public(node: ast.stmt) -> bool:
    """Returns True for functions and classes that are not parts of a kernel."""
    if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return False
    decorators = " ".join(ast.unparse(d) for d in node.decorator_list)
    bases = " ".join(ast.unparse(b) for b in node.bases) if isinstance(node, ast.ClassDef) else ""
    inner = "triton." in decorators or "autograd.Function" in bases
    return not (node.name.startswith("_") or STEP.search(node.name) or inner)


def public_names(package: str, checkout: str) -> dict[str, set[str]]:
    """Returns the public names of each module."""
    modules = sources(package, checkout)
    found: dict[str, set[str]] = {}
    for module, (tree, is_package) in modules.items():
        names, kept = {n.name for n in tree.body if is_public(n)}, set[str]()
        tries = [n for node in tree.body if isinstance(node, ast.Try) for n in node.body]
        names |= {
            n.name for i in tree.body if isinstance(i, ast.If) for n in i.body if is_public(n)
        }
        for node in [*tree.body, *tries]:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                value, target = node.value, node.targets[0].id
                applied = isinstance(value, ast.Attribute) and value.attr == "apply"
                aliased = isinstance(value, ast.Name) and target.islower()
                aliased |= target == "ACT2FN"
                if (applied or aliased) and not target.startswith("_"):
                    names.add(target)
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            root = node.module.split(".")[0]
            inner = is_package and (node.level > 0 or root == package)
            if inner or root == "mslk":  # xformers has the code of fmha in a package of its own
                found_names = {a.asname or a.name for a in node.names}
                names |= found_names
                kept |= found_names & {node.module}  # a function of the name of its module
        is_ops = re.match(r"fla\.ops\.\w+\.(?!gate$)", module)  # users import from the packages
        names = {n for n in names if not n.startswith("_") and not STEP.search(n)}
        if is_package:
            names -= {n.removeprefix(f"{module}.") for n in modules} - kept
        if names and not is_ops:
            found[module] = names
    for module, (tree, is_package) in modules.items():  # fla.ops.gla.chunk has what gla exports
        for node in tree.body if is_package and module.startswith("fla.ops.") else ():
            if isinstance(node, ast.ImportFrom) and node.module:
                inner = f"{module}.{node.module}" if node.level else node.module
                if inner.startswith(f"{module}."):
                    exported = {a.name for a in node.names} & found.get(module, set())
                    found.setdefault(inner, set()).update(exported)
    return {module: names for module, names in sorted(found.items()) if names}


def status(name: str, ours: set[str]) -> tuple[str, str]:
    """Returns the kind of a name with its module, and the word or reason in the list."""
    short = name.rpartition(".")[2]
    here = ALIASES.get(name, short)
    if here in ours:
        return "there", short if here == short else f"{short}={here}"
    for pattern, reason in REFUSED:
        if re.search(pattern, name):
            return "refused", reason
    return "absent", short


def of_checkout(package: str, checkout: str) -> tuple[str, str, dict[str, set[str]]]:
    """Returns version, commit and public names of each module."""
    _, place = SOURCES[package]
    content = show(checkout, "show", f"HEAD:{place}")
    version = re.search(r"version\S* = \"(.+)\"|^(\d\S+)$", content)
    assert version is not None
    commit = show(checkout, "rev-parse", "HEAD")[:12]
    names = public_names(package, checkout)
    for module, (_, proposed) in PROPOSED.get(package, {}).items():
        names.setdefault(module, proposed)
    return version[1] or version[2], commit, dict(sorted(names.items()))


def of_list(package: str) -> tuple[str, str, dict[str, set[str]]]:
    """Returns what :func:`of_checkout` does from the list that stands."""
    found = library(package)
    names = {m: {*n.there, *n.refused, *n.absent} for m, n in found.modules.items()}
    return found.version, found.commit, names


def write_names(package: str, checkout: str | None) -> None:
    version, commit, modules = of_checkout(package, checkout) if checkout else of_list(package)
    lines = [f"{version} {commit}"]
    ours = set(importlib.import_module(MODULES[package]).__all__)
    for module, names in modules.items():
        lines.append(f"[{module}]")
        groups: dict[tuple[str, str], list[str]] = {}
        for name in sorted(names):
            kind, word = status(f"{module}.{name}", ours)
            key = (kind, word) if kind == "refused" else (kind, "")
            groups.setdefault(key, []).append(name if kind == "refused" else word)
        for (kind, reason), words in sorted(
            groups.items(), key=lambda g: list(KINDS).index(g[0][0])
        ):
            lines.append(" ".join([KINDS[kind], *([f"{reason}:"] if reason else []), *words]))
    (FOLDER / f"{package}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def page() -> str:
    """Returns the page of all lists."""
    text = ["# Names of other libraries", "", INTRODUCTION, ""]
    totals = ["| library | version | there | refused | absent |", "|---|---|---|---|---|"]
    sections: list[str] = []
    for package in MODULES:
        found = library(package)
        there, refused, absent = (len(n) for n in unique(found))
        totals.append(f"| `{package}` | {found.version} | {there} | {refused} | {absent} |")
        sections += ["", f"## {package}", "", f"Names of version {found.version}, commit "]
        sections[-1] += f"{found.commit}; here in `{MODULES[package]}`."
        proposed = {m: c for m, (c, _) in PROPOSED.get(package, {}).items()}
        for module, names in found.modules.items():
            source = f" (a pull request, commit {proposed[module]})" if module in proposed else ""
            sections += ["", f"**{module}**{source}", ""]
            if names.there:
                sections.append(f"- there: {listed(names.there)}")
            for reason in sorted(set(names.refused.values())):
                words = [n for n, r in names.refused.items() if r == reason]
                sections.append(f"- refused, because {reason}: {listed(words)}")
            if names.absent:
                sections.append(f"- absent: {listed(names.absent)}")
    return "\n".join([*text, *totals, *sections]) + "\n"


def unique(found: Library) -> tuple[set[str], set[str], set[str]]:
    """Returns the names that are there, refused and absent, each once."""
    there = {n for m in found.modules.values() for n in m.there}
    refused = {n for m in found.modules.values() for n in m.refused} - there
    return there, refused, {n for m in found.modules.values() for n in m.absent} - there - refused


def listed(names: object) -> str:
    return ", ".join(f"`{name}`" for name in names)  # type: ignore[attr-defined]


INTRODUCTION = """\
`python tools/compat_names.py page` writes this page from the lists in
`python/omniattn/compat/names`. It shows which public names of other libraries exist here. After

```python
import omniattn.compat

served = omniattn.compat.install()
```

they can be imported from where the libraries have them, such as `from fla.ops.gla import
chunk_gla`, if the library is not installed. `served` tells for each library whether it is served
(True) or installed (False), and `omniattn.compat.uninstall()` undoes the call.

- The modules have the version below with the suffix `+omniattn`. There is no distribution of that
  name: `importlib.metadata.version` raises PackageNotFoundError as before.
- transformers 5 imports functions of fla, mamba-ssm and causal-conv1d when it loads the code of a
  model. Where `install` came before, its models with gated delta rules, KDA and Mamba call these
  functions, on the CPU, too. It asks for flash-attn by its distribution and for a GPU, so that
  `is_flash_attn_2_available()` stays False: `omniattn.hf.register` provides attention there. It
  finds Liger by the import alone: `use_liger_kernel=True` then raises an ImportError, which names
  `omniattn.hf.patch`.
- Importing a refused or absent name raises an ImportError with the reason."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=("names", "page"))
    parser.add_argument("package", nargs="?", choices=tuple(SOURCES))
    parser.add_argument("checkout", nargs="?")
    given = parser.parse_args()
    if given.task == "names":
        write_names(given.package, given.checkout)
    else:
        (ROOT / "docs/compat.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
