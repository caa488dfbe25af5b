"""Run the zoo: ``python tests/zoo``. Writes ``docs/zoo.json`` and, from it, ``docs/zoo.md``."""

from __future__ import annotations

import argparse
import json
import random
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from zoo import page, pool  # noqa: E402


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="run only names that contain one of these")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="three cases instead of eight")
    parser.add_argument("--seconds", type=float, default=pool.SECONDS, help="of an architecture")
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "zoo.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "zoo.md")
    given = parser.parse_args()
    found = pool.architectures()
    names = [n for n in found if not given.words or any(w in n for w in given.words)]
    random.Random(0).shuffle(names)  # spreads the large models of a family over the run
    old = json.loads(given.json.read_text()) if given.words and given.json.exists() else []
    records = {r["name"]: r for r in old}
    run = pool.run(found, names, given.processes, given.quick, given.seconds)
    for done, record in enumerate(run, 1):
        records[record["name"]] = record | {"run": date.today().isoformat()}
        print(f"{done}/{len(names)} {record['name']}: {record['status']} "
              f"{record.get('why', '')} ({record['seconds']} s)", flush=True)  # fmt: skip
        if done % 20 == 0 or done == len(names):  # a run that is cut off keeps most of its records
            every = [records[name] for name in sorted(records)]
            given.json.write_text(page.dumped(every))
            given.page.write_text(page.rendered(every, found))
    sys.exit(any(record["status"] == "fails" for record in records.values()))


if __name__ == "__main__":
    main()
