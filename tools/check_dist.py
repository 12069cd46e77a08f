"""Build the sdist and the wheel, and see that an index would take them and that they hold what they should.

    python tools/check_dist.py    # leaves both in dist/

The sdist is the repository without its CI; the wheel is built from the sdist and holds src/feddf. It needs git, and a
package index for build and twine, so it is a part of CI and not of the tests.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
DIST = HERE / "dist"


def run(*command: str | Path) -> str:
    """Run a command at the top of the repository and return what it says; if it fails, this is the end."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        sys.exit(f"failed: {' '.join(words)}\n{done.stdout}")
    return done.stdout


def build() -> tuple[Path, Path]:
    """Return a new sdist, and the wheel that is built from it, as twine wants them."""
    for old in DIST.glob("feddf-*"):
        old.unlink()
    with tempfile.TemporaryDirectory(prefix="feddf-dist-") as name:
        venv.create(name, with_pip=True)
        python = Path(name, "bin", "python")
        run(python, "-m", "pip", "--quiet", "install", "-c", HERE / "constraints.txt", "build", "twine")
        run(python, "-m", "build", "--outdir", DIST, HERE)
        run(python, "-m", "twine", "check", "--strict", *DIST.glob("feddf-*"))
    return next(DIST.glob("feddf-*.tar.gz")), next(DIST.glob("feddf-*.whl"))


def compare(what: str, found: set[str], expected: set[str]) -> None:
    """End with the names of the files that are too few or too many."""
    if found != expected:
        sys.exit(f"the {what} lacks {sorted(expected - found)[:9]} and should not have {sorted(found - expected)[:9]}")
    print(f"the {what} has its {len(found)} files")


if __name__ == "__main__":
    sdist, wheel = build()
    tracked = {name for name in run("git", "ls-files").splitlines() if not name.startswith((".ci/", ".github/"))}
    with tarfile.open(sdist) as archive:
        compare("sdist", {one.name.partition("/")[2] for one in archive if one.isfile()}, tracked | {"PKG-INFO"})
    modules = {name.removeprefix("src/") for name in tracked if name.startswith("src/")}
    names = set(zipfile.ZipFile(wheel).namelist())
    compare("wheel", {name for name in names if ".dist-info/" not in name}, modules)
