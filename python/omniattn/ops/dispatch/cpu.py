"""CPU family, read from /proc/cpuinfo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["cpu_family", "cpuinfo", "record_of_family"]

_INTEL = {
    85: "skylake_server", 106: "ice_lake", 108: "ice_lake", 143: "sapphire_rapids",
    173: "granite_rapids", 174: "granite_rapids", 207: "emerald_rapids",
}  # fmt: skip
_ZEN4 = (range(0x10, 0x20), range(0x60, 0xB0))  # models of family 25; the others are Zen 3
_AMD = {23: "zen2", 25: "zen3", 26: "zen5"}
_SAME_CORES = {"sapphire_rapids": "emerald_rapids", "emerald_rapids": "sapphire_rapids"}


def cpuinfo(path: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Returns the first processor's entries of /proc/cpuinfo; empty if it does not exist."""
    entries: dict[str, str] = {}
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        key, _, value = line.partition(":")
        entries.setdefault(key.strip(), value.strip())
    return entries


def cpu_family(entries: dict[str, str] | None = None) -> str:
    """Returns the microarchitecture, by which measurements are recorded, such as "sapphire_rapids".

    Some hypervisors report another model, but the instructions of the processor: AMX tells the
    cores. For unknown processors, returns vendor, family and model.
    """
    entries = cpuinfo() if entries is None else entries
    vendor = entries.get("vendor_id", "unknown")
    family, model = (int(entries.get(key, 0)) for key in ("cpu family", "model"))
    if vendor == "GenuineIntel" and family == 6 and model in _INTEL:
        return _INTEL[model]
    flags = entries.get("flags", "").split()
    if vendor == "GenuineIntel" and "amx_tile" in flags:
        return "granite_rapids" if "amx_fp16" in flags else "sapphire_rapids"
    if vendor == "AuthenticAMD" and family in _AMD:
        zen4 = family == 25 and any(model in models for models in _ZEN4)
        return "zen4" if zen4 else _AMD[family]
    return f"{vendor}_{family}_{model}".lower()


def record_of_family(records: dict[str, Any], family: str) -> Any:
    """Returns the measurements of a CPU family or of one with equal cores, or None."""
    return records.get(family, records.get(_SAME_CORES.get(family, "")))
