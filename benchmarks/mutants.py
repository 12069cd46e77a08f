"""Change the core's code in small ways, one at a time, and see whether the tests notice (mutation testing, by mutmut).

    pip install mutmut
    python benchmarks/mutants.py [MODULE ...] [--folder DIR] [--ending 37]

Without a module all of :data:`TESTS` are done, which takes hours. Each module is tried with the tests that are about
it, so that a change is noticed where a reader would look for it. For every module a line with the counts is printed,
and the changes that no test noticed are written to ``DIR/MODULE.txt``. With ``--ending 37`` only those changes are
tried whose number ends in 3 or 7: a fifth of them, spread evenly.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
AUDIT = "tests/audit"
TESTS = {
    "states": ["tests/test_states.py", "tests/runs/test_store.py"],
    "admit": ["tests/test_admit.py"],
    "rounds": ["tests/test_rounds.py"],
    "client": ["tests/test_client.py", AUDIT],
    "evaluate": ["tests/test_evaluate.py", "tests/test_outcomes.py"],
    "data/partition": ["tests/data/test_partition.py", AUDIT],
    "fusion/average": [
        "tests/fusion/test_average.py",
        "tests/fusion/test_batchnorm.py",
        "tests/fusion/test_momentum.py",
    ],
    "fusion/weights": ["tests/fusion/test_weights.py", "tests/fusion/test_average.py", "tests/test_admit.py"],
    "fusion/ensemble": ["tests/fusion/test_ensemble.py"],
    "fusion/distill": ["tests/fusion/test_distill.py", "tests/fusion/test_feddf.py"],
    "fusion/early_stopping": ["tests/fusion/test_distill.py", AUDIT],
    "fusion/feddf": ["tests/fusion/test_feddf.py", "tests/fusion/test_ensemble.py"],
    "fusion/scaffold": ["tests/fusion/test_scaffold.py"],
    "fusion/select": ["tests/fusion/test_select.py", AUDIT],
    "fusion/swag": ["tests/fusion/test_swag.py", AUDIT],
    "fusion/fedma": ["tests/fusion/test_fedma.py", AUDIT],
    "robust/rules": ["tests/fusion/test_robust.py"],
}
SETTINGS = """
[tool.mutmut]
source_paths = ["src/feddf"]
only_mutate = ["src/feddf/{module}.py"]
pytest_add_cli_args_test_selection = {tests}
pytest_add_cli_args = ["-n", "0", "-p", "no:cacheprovider", "-p", "no:warnings"]
also_copy = ["reproduction", "tests", "examples", "docs", "README.md"]
process_isolation = "forkserver"
"""


def tried(module: str, folder: Path, ending: str = "") -> Counter[str]:
    """Try all changes of a module; return how many ended in which way, and write down those that nobody noticed."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch)
        for name in ("src", "reproduction", "tests", "examples", "docs"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "README.md", copy)
        tests = [test for test in TESTS[module] if (ROOT / test).exists()]
        settings = SETTINGS.format(module=module, tests=tests)
        (copy / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text(encoding="utf-8") + settings)
        calm = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
        mutmut = [str(Path(sys.executable).with_name("mutmut"))]
        subprocess.run(
            [*mutmut, "run", "--max-children", "1", *(f"*__mutmut_*{digit}" for digit in ending)],
            cwd=copy,
            env=calm,
            capture_output=True,
            check=False,
        )
        listed = subprocess.run(
            [*mutmut, "results", "--all", "true"], cwd=copy, env=calm, capture_output=True, text=True
        )
        ends = [line.strip().rpartition(": ")[::2] for line in listed.stdout.splitlines() if ": " in line]
        ends = [(name, end) for name, end in ends if end != "not checked"]
        unnoticed = [name for name, end in ends if end not in ("killed", "timeout")]
        shown = [
            subprocess.run([*mutmut, "show", name], cwd=copy, env=calm, capture_output=True, text=True).stdout
            for name in unnoticed
        ]
    (folder / f"{module.replace('/', '-')}.txt").write_text("\n".join(shown), encoding="utf-8")
    return Counter(end for _, end in ends)


def main() -> None:
    """Try the modules that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=list(TESTS), metavar="MODULE")
    parser.add_argument("--folder", type=Path, default=Path("mutants"))
    parser.add_argument("--ending", default="", metavar="DIGITS")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for module in arguments.modules:
        counts = tried(module, arguments.folder, arguments.ending)
        print(f"{module}: {sum(counts.values())} changes, {dict(counts)}", flush=True)


if __name__ == "__main__":
    main()
