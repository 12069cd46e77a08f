"""Run the notebooks and store what they print and draw in them: python tools/notebooks.py."""

from __future__ import annotations

import ast
import base64
import json
from contextlib import redirect_stdout
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"


def outputs_of(source: str, program: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell; return what it printed, the value of its last line, and its figures, small."""
    from matplotlib import pyplot

    tree, printed = ast.parse(source), StringIO()
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), program)
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), program) if last else None
    found: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        found.append({"name": "stdout", "output_type": "stream", "text": text})
    for number in pyplot.get_fignums():
        content = BytesIO()
        pyplot.figure(number).savefig(content, format="png", dpi=72, bbox_inches="tight")
        picture = base64.b64encode(content.getvalue()).decode()
        found.append({"data": {"image/png": picture}, "metadata": {}, "output_type": "display_data"})
    pyplot.close("all")
    if value is not None:
        data = {"text/plain": [repr(value)]}
        found.append({"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"})
    return found


def run(path: Path) -> None:
    """Run a notebook from its first cell, and write it with its outputs."""
    notebook, program = json.loads(path.read_text(encoding="utf-8")), {"__name__": path.stem}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = outputs_of("".join(cell["source"]), program)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.ipynb")):
        run(path)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
