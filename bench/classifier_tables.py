"""The figures of docs/classifier.md, printed from left-out scores."""

from __future__ import annotations

import collections

import numpy as np

from bench.classifier_data import HASHING_OTHER_VERSIONS, Mask, TrainingSet, generation_of
from bench.classifier_measures import (
    MODULE_RATE,
    SET_RATE,
    Calibration,
    Raw,
    Scores,
    alarm_rate_without,
    caught,
    caught_without,
    combined,
    grouped,
    hidden_mining_sets,
    interval,
    of_groups,
    other_versions_of_the_rest,
    owners_of_groups,
    rate_at,
    scored,
    small_benign_sets,
    threshold,
)
from gpuwarden.code.classify.model import GENERATIONS

RATES = (1e-2, 1e-3, 1e-4)
MUTATED = "mutated_miner:"
MUTATED_ARCHITECTURES = (80, 90, 120)


def print_tables(
    data: TrainingSet, raw: dict[str, Raw], calibration: Calibration, scores: Scores
) -> None:
    """Everything that the page of the classifier tells."""
    _protocols(data, raw, calibration, scores)
    _users(data, calibration, scores)
    _families(data, calibration, scores)
    _libraries(data, calibration, scores)
    _changed_code(data, raw, calibration, scores)
    _generations(data, calibration, scores)


def _title(text: str) -> None:
    print(f"\n## {text}\n")


def _row(*cells: object) -> None:
    print("| " + " | ".join(f"{c:.3f}" if isinstance(c, float) else str(c) for c in cells) + " |")


def _head(*cells: str) -> None:
    _row(*cells)
    _row(*["---"] * len(cells))


def _views_alone(
    data: TrainingSet, raw: dict[str, Raw], calibration: Calibration
) -> dict[str, Scores]:
    """Scores with the other view shut."""
    result = {}
    for name in raw:
        nothing = {view: np.inf for view in raw if view != name}
        alone = Calibration(
            {**calibration.gates, **nothing}, calibration.tables, calibration.generations
        )
        result[name] = scored(data, combined(raw, alone), alone)
    return result


def _protocols(
    data: TrainingSet, raw: dict[str, Raw], calibration: Calibration, scores: Scores
) -> None:
    _title("Share of mining code found at a false-positive rate of 1% / 0.1% / 0.01%")
    _head("protocol", "what", "kernels", "modules", "sets")
    for protocol in "AB":
        for name, mine in {**_views_alone(data, raw, calibration), "both": scores}.items():
            cells = [
                " / ".join(f"{share:.3f}" for share in caught(data, mine, protocol, rates, unit))
                for unit, rates in (("kernel", RATES), ("module", RATES), ("unit", RATES[:1]))
            ]
            _row(protocol, name, *cells)
    benign = data.negatives("B")
    counts = (
        int(data.count[benign].sum()),
        *(len(of_groups(data, scores, benign, u)) for u in ("module", "unit")),
    )
    mining = (
        int(data.count[data.mining].sum()),
        *(len(of_groups(data, scores, data.mining, u)) for u in ("module", "unit")),
    )
    print(f"\nBenign (B): {counts[0]:,} kernels, {counts[1]:,} modules, {counts[2]} sets.")
    print(f"Mining: {mining[0]:,} kernels, {mining[1]:,} modules, {mining[2]} sets.")
    hits = of_groups(data, scores, data.mining, "module") >= calibration.module_threshold
    for owner in ("family", "project"):
        low, high = interval(owners_of_groups(data, data.mining, "module", owner), hits)
        print(
            f"Modules found at 0.1%, every {owner} drawn as a whole: {low:.3f} to {high:.3f} (95%)."
        )
    low, high = caught_without(data, scores, "module", MODULE_RATE)
    print(f"With any one benign library left out of the threshold: {low:.3f} to {high:.3f}.")
    alarmed = alarm_rate_without(data, scores, "module", MODULE_RATE)
    print(f"False-positive rate when a library is judged by the others' threshold: {alarmed:.4f}.")


def _users(data: TrainingSet, calibration: Calibration, scores: Scores) -> None:
    _title("What a user feels: all modules of a set are unknown")
    _head("threshold", "score", "benign sets alarmed (B)", "(A)", "mining sets caught")
    sets = {p: of_groups(data, scores, data.negatives(p), "unit") for p in "AB"}
    mining = of_groups(data, scores, data.mining, "unit")
    lines = [
        ("shipped", calibration.set_threshold),
        ("1% of B's sets", threshold(sets["B"], SET_RATE)),
        ("none of B's sets", threshold(sets["B"], 0.0)),
        ("1% of A's sets", threshold(sets["A"], SET_RATE)),
    ]
    for name, least in lines:
        alarms = [f"{(sets[p] >= least).sum()} of {len(sets[p])}" for p in "BA"]
        _row(name, f"{least:.2f}", *alarms, f"{(mining >= least).mean():.3f}")
    by_module = [
        _highest_module(data, scores, rows) >= calibration.module_threshold
        for rows in (data.negatives("B"), data.negatives("A"), data.mining)
    ]
    alarms = [f"{hits.sum()} of {len(sets[p])}" for hits, p in zip(by_module, "BA", strict=False)]
    _row("any one module", f"{calibration.module_threshold:.2f}", *alarms, by_module[2].mean())
    least = calibration.set_threshold
    print()
    for owner in ("family", "project"):
        low, high = interval(owners_of_groups(data, data.mining, "unit", owner), mining >= least)
        print(f"Sets caught, every {owner} drawn as a whole: {low:.3f} to {high:.3f} (95%).")
    alarmed = alarm_rate_without(data, scores, "unit", SET_RATE)
    print(f"Benign sets alarmed when a library is judged by the others' 1%: {alarmed:.4f}.")
    for kernels in (1, 3, 10, 50):
        share = small_benign_sets(data, scores, kernels, least)
        print(f"Random benign sets of {kernels} kernels of one library alarmed: {share:.4f}.")
    share = hidden_mining_sets(data, scores, least)
    print(f"Mining sets caught among any number of unknown benign kernels: {share:.3f}.")
    rest = other_versions_of_the_rest(data)
    share = rate_at(data, scores, rest, least, "unit")
    print(f"Other versions of libraries that do not hash, sets alarmed: {share:.4f}.")
    share = rate_at(data, scores, rest, calibration.module_threshold, "module")
    print(f"The same, modules: {share:.4f}.")


def _highest_module(data: TrainingSet, scores: Scores, rows: Mask) -> Scores:
    """The score of the highest module of each set."""
    _, place = np.unique(data.module[rows], return_index=True)
    modules = grouped(data.module[rows], scores[rows], data.count[rows])
    units, inverse = np.unique(data.unit[rows][place], return_inverse=True)
    highest = np.zeros(len(units))
    np.maximum.at(highest, inverse, modules)
    return highest


def _families(data: TrainingSet, calibration: Calibration, scores: Scores) -> None:
    _title("Families of mining code, each left out as a whole")
    _head("family", "modules", "found", "sets", "caught")
    for family in np.unique(data.family[data.mining]):
        rows = data.mining & (data.family == family)
        modules, units = (of_groups(data, scores, rows, unit) for unit in ("module", "unit"))
        found = float((modules >= calibration.module_threshold).mean())
        held = float((units >= calibration.set_threshold).mean())
        _row(family, len(modules), found, len(units), held)


def _libraries(data: TrainingSet, calibration: Calibration, scores: Scores) -> None:
    _title("Benign libraries with an alarm; every other has none")
    _head("library", "protocol", "modules", "alarmed", "sets", "alarmed at")
    for protocol in "AB":
        benign = data.negatives(protocol)
        for library in np.unique(data.library[benign]):
            rows = benign & (data.library == library)
            modules, units = (of_groups(data, scores, rows, unit) for unit in ("module", "unit"))
            above = int((modules >= calibration.module_threshold).sum())
            sets = _alarmed_architectures(data, scores, rows, calibration.set_threshold)
            if above or sets:
                _row(library, protocol, len(modules), above, len(units), sets or "none")


def _alarmed_architectures(data: TrainingSet, scores: Scores, rows: Mask, least: float) -> str:
    archs = [
        int(arch)
        for arch in np.unique(data.arch[rows])
        if rate_at(data, scores, rows & (data.arch == arch), least, "unit") > 0
    ]
    return ", ".join(f"sm_{arch}" for arch in archs)


def _changed_code(
    data: TrainingSet, raw: dict[str, Raw], calibration: Calibration, scores: Scores
) -> None:
    _title("Evasions (simulated), other toolchains, crackers and plotters: modules found at 0.1%")
    alone = _views_alone(data, raw, calibration)
    _head("code", "modules", "both views", *alone)
    families = np.unique(data.family[data.mining])
    same = data.mining & np.isin(data.arch, MUTATED_ARCHITECTURES)
    parts: dict[str, Mask] = {"unchanged (sm_80, 90, 120)": same}
    order = sorted(np.unique(data.part), key=lambda part: part.startswith("toolchain"))
    for part in order:
        if ":" in part:
            parts[part] = (data.part == part) & np.isin(data.family, families)
    for kind in ("dual_use_cracker", "plotter"):
        for project in np.unique(data.project[data.kind == kind]):
            parts[project] = (data.kind == kind) & (data.project == project)
    for name, rows in parts.items():
        least = calibration.module_threshold
        shares = [rate_at(data, s, rows, least, "module") for s in (scores, *alone.values())]
        _row(name, len(of_groups(data, scores, rows, "module")), *shares)


def _generations(data: TrainingSet, calibration: Calibration, scores: Scores) -> None:
    _title("Generations, calibrated each by itself")
    _head("from", "benign modules", "alarmed", "benign kernels", "at score 3", "mining found")
    benign, generation = data.negatives("B"), generation_of(data.arch)
    for number, name in enumerate(GENERATIONS):
        rows = benign & (generation == number)
        modules = grouped(data.module[rows], scores[rows], data.count[rows])
        alarmed = int((modules >= calibration.module_threshold).sum())
        kernels = int(data.count[rows].sum())
        share = rate_at(data, scores, rows, 3.0, "kernel")
        mining = data.mining & (generation == number)
        found = rate_at(data, scores, mining, calibration.module_threshold, "module")
        _row(name, len(modules), alarmed, kernels, f"{share:.5f}", found)
    worst = collections.Counter(
        f"{data.library[row]} sm_{data.arch[row]}"
        for row in np.flatnonzero(benign & (scores >= calibration.module_threshold))
    )
    print("\nBenign kernels at or above the module threshold by themselves:", end=" ")
    print("; ".join(f"{name}: {count}" for name, count in worst.most_common(12)) or "none")
    print(f"Scored on other versions under B: {', '.join(HASHING_OTHER_VERSIONS)}.")
