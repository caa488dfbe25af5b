"""Write docs/zoo.json and docs/zoo.md, which have the result of every architecture."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

HEAD = """# The zoo

What `make zoo` found: tiny models of random weights, one of every model type that Transformers,
diffusers, timm and torchvision build without a download, and plain `nn`. Each is planned,
converted, run, saved, loaded and run again. Every FP8 layer is compared with fake quantization in
plain torch on the input that it really got, row by row, within the bounds of `tests/numerics.py`;
what was saved and loaded gives the same bits as before. A module of experts is compared as a whole:
its result with that of fake-quantized experts around the dense class's own gate, after these sums
have been shown to be what the dense module computes.

| result | meaning |
|---|---|
| passes | all of this holds in every case, but for cases that `save` refuses with a reason |
| refused | it runs as it should; in no case can a target of `save` hold it, for a reason |
| dense | no layer becomes FP8, for the reasons in the last column, and `convert` warns |
| not built | the model could not be built or run in high precision here, so nothing was tried |
| not run | it is listed, and this run ended before it |
| fails | something of this does not hold |

*Decoded when loaded*: Transformers joins these layers in a checkpoint, which keeps their codes and
scales; `load` makes them dense, warns, and computes what the codes say. *Never ran*: the input did
not reach a layer. A `*` in a name stands for numbers; *(4 experts)* is a module of so many experts,
which are converted together.

Not every run is of all: each row says when the architecture was last run, and the table of runs
with which cases. Of an *earlier* run are records from before experts were converted and MXFP8 was
tried.
"""
EARLIER = "earlier"  # the run of records without a date


def dumped(records: list[dict[str, Any]]) -> str:
    """Return records as JSON, one per line."""
    lines = ",\n".join(json.dumps(r, sort_keys=True) for r in records)
    return f"[\n{lines}\n]\n"


def rendered(records: list[dict[str, Any]], listed: Iterable[str] = ()) -> str:
    """Return records as a Markdown page.

    Args:
        records: results of ``check``, sorted by name.
        listed: every name of the zoo; names without a record were not run.
    """
    not_run = sorted({*listed} - {r["name"] for r in records})
    counts = Counter(r["status"] for r in records) + Counter({"not run": len(not_run)})
    cases = Counter(_word(said) for r in records for said in r["cases"].values())
    lines = [HEAD, "| result | architectures |", "|---|---|"]
    lines += [f"| {status} | {count} |" for status, count in sorted(counts.items())]
    lines += [f"| listed | {counts.total()} |", ""]
    lines += ["| run | architectures | with | cases |", "|---|---|---|---|"]
    lines += _runs(records)
    lines += ["", f"Of all cases: {_listed(cases)}.", ""]
    lines += [
        "| architecture | run | result | converted | kept, and why |",
        "|---|---|---|---|---|",
    ]
    lines += [_row(r) for r in records if r["status"] != "not built"]
    lines += ["", "## Not built", "", "| architecture | run | why |", "|---|---|---|"]
    lines += [
        f"| {r['name']} | {r.get('run', EARLIER)} | {_safe(r.get('why', ''))} |"
        for r in records
        if r["status"] == "not built"
    ]
    if not_run:
        lines += ["", "## Not run", "", f"The run ended before them: {', '.join(not_run)}."]
    return "\n".join(lines) + "\n"


def _runs(records: list[dict[str, Any]]) -> list[str]:
    days: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        days.setdefault(record.get("run", EARLIER), []).append(record)
    lines = []
    for day, found in sorted(days.items(), reverse=True):
        tried = ", ".join(dict.fromkeys(case for r in found for case in r["cases"]))
        experts = sum("experts)" in name for r in found for name in r.get("converted", ()))
        lines.append(f"| {day} | {len(found)} | {experts} modules of experts | {tried} |")
    return lines


def _row(record: dict[str, Any]) -> str:
    bad = [f"{case}: {said}" for case, said in record["cases"].items() if _word(said) != "passes"]
    result = record["status"] + (f" ({record['why']})" if "why" in record else "")
    if bad:
        result += f"; {'; '.join(dict.fromkeys(bad))}"
    kept = [f"{', '.join(names)}: {why}" for why, names in record.get("kept", {}).items()]
    cells = (
        record["name"],
        record.get("run", EARLIER),
        result,
        ", ".join(record.get("converted", [])),
        "; ".join(kept),
    )
    return f"| {' | '.join(map(_safe, cells))} |"


def _word(said: str) -> str:
    return said.partition(":")[0].partition(";")[0].partition(",")[0]


def _listed(cases: Counter[str]) -> str:
    return ", ".join(f"{count} {word}" for word, count in cases.most_common())


def _safe(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
