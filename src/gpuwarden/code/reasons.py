"""Why code was judged as it was, in words that a person can check against a listing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpuwarden.code.ptx_features import Function

COLUMNS = tuple("xor_s rot_s prot_s fun_s core_s int_s fp_s bitwin_max h1_bit h1_core".split())
"""The features that the words are made of."""

CLEAR = 0.10
"""Share of bit work from which it is named as what stands out."""
THINNED = 0.25
"""Share of floating point that hash-like code does not have by itself."""
DENSER = 1.5


def of_kernel(features: Mapping[str, float], algorithms: Sequence[str] = ()) -> tuple[str, ...]:
    """What stands out in a kernel judged hash-like, and whose constants it has."""
    xor, rotates = features["xor_s"], features["rot_s"] + features["prot_s"]
    dense = max(features["bitwin_max"], features["h1_bit"])
    if dense >= CLEAR:
        shifts = features["fun_s"] - features["rot_s"]
        parts = [f"{_percent(xor)} xor", f"{_percent(rotates)} rotates"]
        if shifts >= CLEAR / 2:
            parts.append(f"{_percent(shifts)} shifts across two registers")
        parts.append(f"densest window {_percent(dense)}")
    else:
        parts = [
            f"{_percent(features['int_s'])} integer",
            f"densest window without floating point {_percent(features['h1_core'])} additions "
            "and bit work",
        ]
    found = [f"hash-like integer compute: {', '.join(parts)}"]
    if features["fp_s"] >= THINNED and features["h1_bit"] > DENSER * features["bitwin_max"]:
        found.append(f"thinned by {_percent(features['fp_s'])} floating point")
    return (*found, *of_constants(algorithms))


def of_function(function: Function, algorithms: Sequence[str] = ()) -> tuple[str, ...]:
    """What stands out in a function of PTX text judged hash-like, and whose constants it has."""
    parts = (
        f"{_percent(function.xor)} xor",
        f"{_percent(function.rotate)} rotates",
        f"densest window {_percent(function.dense)}",
    )
    return (f"hash-like integer compute in PTX: {', '.join(parts)}", *of_constants(algorithms))


def of_constants(algorithms: Sequence[str]) -> tuple[str, ...]:
    """That constants are those of algorithms, if any."""
    return (f"constants consistent with {', '.join(algorithms)}",) if algorithms else ()


def _percent(share: float) -> str:
    return f"{share:.0%}"
